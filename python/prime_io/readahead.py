"""Reading ahead: one background thread, in order, within a budget of bytes.

The thread calls functions that release the GIL for all of their I/O, so that one is enough: the engine reads
with several of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

_LOOK_S = 0.5
"""How often a waiting thread looks whether the program is ending, seconds."""


class Job(NamedTuple, Generic[T]):
    """Something to read: `nbytes` is the most that it holds until it is taken."""

    nbytes: int
    run: Callable[[], T]


class _Done(NamedTuple):
    nbytes: int
    result: Any
    error: BaseException | None


class ReadAhead(Generic[T]):
    """Runs jobs in order on a thread of its own and hands out their results in that order.

    What is being read and what is read but not taken yet never exceeds `budget_bytes`, nor `lookahead` jobs;
    except that a job larger than the whole budget runs alone. The thread starts with the first job and ends
    with `close`, or with the program.
    """

    def __init__(self, *, budget_bytes: int, lookahead: int) -> None:
        self._budget, self._lookahead = budget_bytes, lookahead
        self._changed = threading.Condition()
        self._jobs: deque[Job[T]] = deque()
        self._soon: deque[Callable[[], object]] = deque()
        self._done: deque[_Done] = deque()
        self._ahead = 0  # jobs that run or wait to be taken
        self._held = 0  # their bytes
        self._closed = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self.peak_bytes = 0
        self.read_s = 0.0
        self.waited_s = 0.0

    def add(self, jobs: Iterable[Job[T]]) -> None:
        """Read these after all that was added before."""
        with self._changed:
            self._jobs.extend(jobs)
            self._wake()

    def soon(self, call: Callable[[], object]) -> None:
        """Call this before the next job, whatever is held. It may not raise."""
        with self._changed:
            self._soon.append(call)
            self._wake()

    def take(self) -> T:
        """The next result; waits for it, and raises what its job raised. Signals get through while it waits."""
        began = time.perf_counter()
        with self._changed:
            while not self._done:
                self.check()
                if not self._jobs and not self._ahead:
                    raise RuntimeError("nothing is being read: the step's micro-batches are used up")
                self._changed.wait()
            done = self._done.popleft()
            self._ahead -= 1
            self._held -= done.nbytes
            self._changed.notify_all()
        self.waited_s += time.perf_counter() - began
        if done.error is not None:
            raise done.error
        result: T = done.result
        return result

    def close(self, *, wait: bool = True) -> None:
        """End the thread after the call it is in, and forget what was read. `wait` for that. Idempotent."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._soon.clear()
            self._done.clear()
            self._changed.notify_all()
        if wait and self._thread is not None and self._pid == os.getpid():
            self._thread.join()

    def check(self) -> None:
        """ValueError if it is closed, RuntimeError in a forked child."""
        if self._pid != os.getpid():
            raise RuntimeError("a PayloadLoader cannot be used in a forked child: make one there")
        if self._closed:
            raise ValueError("the loader is closed")

    def _wake(self) -> None:
        self.check()
        if self._thread is None:
            # Not a daemon: a daemon that is inside a native call when the interpreter ends may abort the process.
            self._thread = threading.Thread(target=self._work, name="prime-io-read-ahead")
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            began = time.perf_counter()
            result, error = None, None
            try:
                result = job.run()
            except BaseException as e:  # handed to whoever takes it
                error = e
            with self._changed:
                self.read_s += time.perf_counter() - began
                if not self._closed:
                    self._done.append(_Done(job.nbytes, result, error))
                self._changed.notify_all()
            del job, result, error  # the consumer's alone from here on

    def _next(self) -> Job[T] | None:
        """The next job that there is room for; None at the end."""
        while True:
            with self._changed:
                while not (self._closed or self._soon or self._has_room()):
                    self._changed.wait(_LOOK_S)
                    if not threading.main_thread().is_alive():
                        return None
                if self._closed:
                    return None
                if not self._soon:
                    job = self._jobs.popleft()
                    self._ahead += 1
                    self._held += job.nbytes
                    self.peak_bytes = max(self.peak_bytes, self._held)
                    return job
                call = self._soon.popleft()
            call()

    def _has_room(self) -> bool:
        if not self._jobs:
            return False
        fits = self._ahead < self._lookahead and self._held + self._jobs[0].nbytes <= self._budget
        return fits or not self._ahead
