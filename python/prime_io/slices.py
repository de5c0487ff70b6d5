"""Long work in threads, in slices: what keeps the event loop of the same process awake (rule 12)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

_T = TypeVar("_T")


def in_slices(items: Sequence[_T], *, size: int = 256) -> Iterator[Sequence[_T]]:
    """Slices of `items`. Gives up the interpreter between them, half a millisecond apart, so that the event
    loop of a process that saves large snapshots never waits long for this thread: it would get its turn only
    every 5 ms otherwise. Not for the loop's own thread."""
    held_since = time.monotonic()
    for start in range(0, len(items), size):
        if time.monotonic() - held_since > 5e-4:
            time.sleep(1e-4)
            held_since = time.monotonic()
        yield items[start : start + size]


def let_go(items: list[_T]) -> None:
    """Empty a list of many objects, in slices: to free them all at once holds the interpreter as well."""
    while items:
        del items[-1024:]
        time.sleep(1e-4)
