"""The first gather of a process: pages that the kernel hands out during the call, for either contestant.

A child per round, so that no allocator has memory left of the round before (glibc keeps arrays of this size once
one was freed). It times the call alone, then says what the bytes were.
"""

from __future__ import annotations

import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from duel import Entry

from prime_io import PayloadSegment, PayloadStore
from prime_io.store import Gather


class Work(msgspec.Struct):
    """Whole files of one tensor each, to be read by `how`."""

    how: str
    root: str
    segments: list[PayloadSegment]


class Done(NamedTuple):
    """Seconds of the call and the CRC-32 of each array."""

    seconds: float
    sums: tuple[int, ...]


def entry(name: str, how: str, root: str, segments: Sequence[PayloadSegment], arrays: Sequence[Any]) -> Entry:
    """A contestant: "prime_io" or "np.fromfile", in a process of its own."""
    work = msgspec.json.encode(Work(how, root, list(segments)))
    expected = tuple(zlib.crc32(array) for array in arrays)

    def run() -> Done:
        child = subprocess.run([sys.executable, __file__], input=work, check=True, stdout=subprocess.PIPE)
        return msgspec.json.decode(child.stdout, type=Done)

    def check(done: Done) -> None:
        assert done.sums == expected

    return Entry(name=name, run=run, check=check, seconds=lambda done: done.seconds)


def _ours(work: Work) -> Callable[[], list[Any]]:
    store = PayloadStore(work.root)
    requests = [Gather(segments=[s], field=s.field, lo=0, hi=s.rows) for s in work.segments]
    return lambda: [answer[0] for answer in store.gather_many(requests) if not isinstance(answer, Exception)]


def _numpy(work: Work) -> Callable[[], list[Any]]:
    places = [(f"{work.root}/{s.file}", s.rows * int(np.prod(s.shape)), s.offset) for s in work.segments]
    return lambda: [np.fromfile(path, np.uint8, n, offset=offset) for path, n, offset in places]


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Work)
    call = {"prime_io": _ours, "np.fromfile": _numpy}[asked.how](asked)
    start = time.perf_counter()
    arrays = call()
    seconds = time.perf_counter() - start
    sums = tuple(zlib.crc32(array) for array in arrays)
    sys.stdout.buffer.write(msgspec.json.encode(Done(seconds, sums)))
