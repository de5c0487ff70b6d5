"""Sweep: find the files that nobody names, and reclaim them.

The user of this module is `PayloadStore.sweep`; what is promised, and when it is safe, is said there.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from prime_io.resume import version_of
from prime_io.slices import in_slices

__all__ = ["GRACE_S", "SweepReport", "sweep"]

GRACE_S: Final = 3600.0
"""How long a sweep spares what a process that is alive may still be writing or handing over, in seconds."""

_NAME: Final = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,200}(/(?!\.)[A-Za-z0-9._-]{1,200})*")


class SweepReport(msgspec.Struct, frozen=True):
    """What a sweep found and did (or, with `dry_run`, would have done)."""

    kept: int
    """Payload files that a root names."""
    reclaimed: list[str]
    """Files unlinked: named by no root. Includes temporaries."""
    bytes: int
    """Bytes freed. A file that a checkpoint pins frees none; a dry run counts it all the same."""
    spared: int
    """Files named by no root that are too young, or of a version that may still be written."""
    temporaries: int
    """How many of the reclaimed files were temporaries that a writer left behind."""
    foreign: int
    """Files that are not of this store; never touched."""
    errors: list[tuple[str, str]]
    """(file, message) for each that could not be unlinked; it stays."""


def sweep(
    scan: Callable[[], Sequence[tuple[str, int, int, str]]],
    reclaim: Callable[[Iterable[str]], Sequence[int | Exception]],
    *,
    roots: Iterable[str] | Callable[[], Iterable[str]],
    before: int | None,
    grace_s: float,
    dry_run: bool,
) -> SweepReport:
    """List with `scan`, then ask for the roots, then give what none names to `reclaim`."""
    if before is not None and before < 0:
        raise ValueError(f"before is {before}: versions count from 0")
    if not 0 <= grace_s < float("inf"):
        raise ValueError(f"grace_s is {grace_s}: it is a number of seconds")
    old = time.time_ns() - int(grace_s * 1e9)  # as of the listing, however long the roots take
    listed = scan()
    live = set(_roots(roots() if callable(roots) else roots))
    kept = spared = foreign = temporaries = size_of_all = 0
    doomed: list[tuple[str, int, bool]] = []
    for part in in_slices(listed):
        for file, size, mtime_ns, kind in part:
            if kind == "foreign":
                foreign += 1
            elif file in live:
                kept += 1
            elif kind == "dead":
                doomed.append((file, size, True))
            elif kind == "temporary":
                if before is None and mtime_ns <= old:
                    doomed.append((file, size, True))
                else:
                    spared += 1
            elif before is None or (mtime_ns <= old and _below(before, file)):
                doomed.append((file, size, False))
            else:
                spared += 1
    results: Sequence[int | Exception]
    results = [size for _, size, _ in doomed] if dry_run else reclaim(f for f, _, _ in doomed)
    reclaimed: list[str] = []
    errors: list[tuple[str, str]] = []
    for (file, _, temporary), result in zip(doomed, results, strict=True):
        if isinstance(result, Exception):
            errors.append((file, str(result)))
        elif result >= 0:
            reclaimed.append(file)
            size_of_all += result
            temporaries += temporary
    return SweepReport(kept, reclaimed, size_of_all, spared, temporaries, foreign, errors)


def _roots(files: Iterable[str]) -> Iterator[str]:
    """The root files, each a plain relative name: another spelling of it would not keep its file."""
    if isinstance(files, str | bytes):
        raise TypeError("roots is a single string: pass an iterable of files, or a callable returning one")
    for part in in_slices(list(files)):
        for file in part:
            if not isinstance(file, str):
                raise TypeError(
                    f"a root is a {type(file).__name__}: pass the segments' files, see `segment.files`"
                )
            if not _NAME.fullmatch(file):
                raise ValueError(
                    f"the root {file!r} is not a file's name relative to the store: nothing was swept"
                )
            yield file


def _below(before: int, file: str) -> bool:
    try:
        return version_of(file) < before
    except ValueError:
        return False  # of no version that we know
