"""Ours and its rivals in turns, in one process, so that what else the machine does hits all of them.

Every contestant has one round that is not timed (it faults pages in, fills caches and is checked), then each round
runs all of them, in another order. Each result is checked, outside of its time. Best and median are kept: the best
is what a contestant can do, the median says how noisy the machine was.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple


def _nothing(*_: Any) -> None:
    return


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A contestant: `before` prepares a round, `run` is timed, `check` raises if its result is wrong, `after`
    clears up. `seconds` says what a run took where the wall clock would not (fio's own figure)."""

    name: str
    run: Callable[[], Any]
    check: Callable[[Any], object] = _nothing
    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing
    seconds: Callable[[Any], float] | None = None


class Times(NamedTuple):
    """Seconds, per round."""

    all: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.all)

    @property
    def median(self) -> float:
        return median(self.all)


def duel(entries: Sequence[Entry], *, rounds: int, warm_up: bool = True) -> dict[str, Times]:
    """Each entry's times over `rounds` rounds, by name."""
    took: dict[str, list[float]] = {entry.name: [] for entry in entries}
    assert len(took) == len(entries), "two entries of one name"
    if warm_up:
        for entry in entries:
            _once(entry)
    order, shuffle = list(entries), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for entry in order:
            took[entry.name].append(_once(entry))
    return {name: Times(tuple(seconds)) for name, seconds in took.items()}


def fastest(times: dict[str, Times], names: Iterable[str]) -> str:
    """The name of the rival whose best round was the best."""
    return min(names, key=lambda name: times[name].best)


def _once(entry: Entry) -> float:
    entry.before()
    gc.collect()
    start = time.perf_counter()
    result = entry.run()
    seconds = time.perf_counter() - start
    if entry.seconds is not None:
        seconds = entry.seconds(result)
    try:
        entry.check(result)
    except Exception as error:
        error.add_note(f"the contestant: {entry.name}")
        raise
    del result
    entry.after()
    return seconds
