"""Rows of the tables: what a contest or a measurement came to, beside its target."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from duel import Entry, Times, duel, fastest
from targets import TARGETS

T = TypeVar("T")
CPUS = len(os.sched_getaffinity(0))


class Rows:
    """The rows of one benchmark. A contest may be held once; its table and the rows go into the JSON."""

    def __init__(self, benchmark: Any, *, short: bool) -> None:
        self._benchmark = benchmark
        self.short = short
        self.found: list[dict[str, Any]] = []
        self.skipped: list[str] = []
        self.title = ""
        self.contest_table: list[dict[str, Any]] = []
        self.rounds = 0

    def size(self, full: T, short: T) -> T:
        """The size to run with."""
        return short if self.short else full

    def skip(self, why: str) -> None:
        """Say that a contestant is not there."""
        self.skipped.append(why)

    def measure(self, work: Callable[[], T]) -> T:
        """Run what is no contest."""
        result: T = self._benchmark.pedantic(work, rounds=1)
        return result

    def contest(
        self,
        title: str,
        entries: Sequence[Entry],
        *,
        rounds: int,
        volume: float | None = None,
        unit: str = "GB",
        warm_up: bool = True,
    ) -> dict[str, Times]:
        """Time the entries against each other; `volume` is what a round moves, in `unit`, for the rates."""
        times = self.measure(lambda: duel(entries, rounds=rounds, warm_up=warm_up))
        self.title, self.rounds = title, rounds
        self.contest_table = [
            {
                "name": name,
                "best_s": took.best,
                "median_s": took.median,
                "rate": None if volume is None else f"{volume / took.best:,.1f} {unit}/s",
            }
            for name, took in times.items()
        ]
        return times

    def row(
        self,
        key: str,
        times: dict[str, Times],
        *,
        rival: str | Sequence[str],
        ours: str = "prime_io",
        limit: str | None = None,
        note: str = "",
    ) -> None:
        """A row of the table: ours against a rival, or against the fastest of several."""
        if not isinstance(rival, str):
            rival = fastest(times, rival)
        mine, other = times[ours], times[rival]
        self._add(
            key,
            ours=in_words(mine.best),
            rival=in_words(other.best),
            limit="" if limit is None else in_words(times[limit].best),
            ratio=other.best / mine.best,
            ratio_of_medians=other.median / mine.median,
            note=note,
        )

    def fact(self, key: str, *, ours: str, allowed: str, ratio: float, note: str = "") -> None:
        """A row about something other than time."""
        self._add(key, ours=ours, rival=allowed, limit="", ratio=ratio, ratio_of_medians=ratio, note=note)

    def _add(self, key: str, *, ratio: float, **rest: Any) -> None:
        target = TARGETS[key]
        floor = target.check if self.short and target.check is not None else target.floor
        passed = ratio >= floor
        self.found.append({"key": key, "ratio": ratio, "floor": floor, "passed": passed, **rest})

    def finish(self) -> None:
        self._benchmark.extra_info.update(
            title=self.title,
            rounds=self.rounds,
            contest=self.contest_table,
            rows=self.found,
            skipped=self.skipped,
            short=self.short,
            load=" ".join(Path("/proc/loadavg").read_text().split()[:3]),
        )


def mount_of(path: Path) -> tuple[str, str]:
    """(kind of filesystem, mount options) of a path."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    at = max((m for m in mounts if path.is_relative_to(m[1])), key=lambda m: len(m[1]))
    return at[2], at[3]


def in_words(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.1e} s"
