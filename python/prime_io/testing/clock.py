"""An event loop whose clock jumps: waiting costs nothing, and the order of what happens does not depend on speed."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """When nothing is ready and no executor works, the clock jumps to the next timer.

    Work given to executors (`asyncio.to_thread`) takes no virtual time: the clock stands until it is done.
    Sockets and pipes are looked at but never waited for while a timer is set: use this loop for runs that
    live in one process. RuntimeError if nothing is left that could ever happen.
    """

    def __init__(self) -> None:
        self._virtual_now = 0.0
        self._working = 0
        self._own_files = 0
        self._waiting = _JumpingSelector(self)
        super().__init__(self._waiting)
        self._own_files = len(self._waiting.get_map())  # the loop's own wake-up pipe

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """As in asyncio; until the result is there, time does not pass."""
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        self._working += 1
        future.add_done_callback(self._worked)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """As in asyncio; its threads are waited for in real time."""
        self._working += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._working -= 1

    def _worked(self, future: asyncio.Future[Any]) -> None:
        self._working -= 1

    def _before_wait(self, timeout: float | None) -> float | None:
        """How long to wait for real; moves the clock."""
        if timeout is not None and timeout <= 0:
            return 0
        if self._working:
            return None
        if timeout is not None:
            self._virtual_now += timeout
            return 0
        if len(self._waiting.get_map()) <= self._own_files:
            raise RuntimeError("virtual time: no timer is set and no work is under way; this waits for ever")
        return None


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(self._loop._before_wait(timeout))


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
