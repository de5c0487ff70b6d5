"""`Releases`: files behind the event loop: unlinked when nobody needs them, made durable when they are queued."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from .resume import Ledger
from .store import PayloadStore

log = logging.getLogger("prime_io.sink")

_SYNCED_TOGETHER = 1024


class Releases:
    """Unlinks what the ledger has free and syncs what is queued: one batch of each at a time, with all that came
    meanwhile. `counters` counts "reclaimed", "reclaim_failed" and "sync_failed"."""

    def __init__(self, *, store: PayloadStore, ledger: Ledger, counters: Counter[str]) -> None:
        self._store, self._ledger, self._counters = store, ledger, counters
        self._unsynced: set[str] = set()
        self._spared: set[str] = set()
        self._reclaiming = _Background(self._unlink)
        self._syncing = _Background(self._sync)

    def reclaim(self) -> None:
        """Unlink what nobody needs any more, soon."""
        if self._ledger.has_free:
            self._reclaiming.start()

    def sync(self, files: Iterable[str]) -> None:
        """Make files durable, soon, so that a checkpoint has little left to do."""
        self._unsynced.update(files)
        self._syncing.start()

    def spare(self, files: Iterable[str]) -> None:
        """From now on leave these where they are, though nobody needs them."""
        self._spared.update(files)

    def raise_failure(self) -> None:
        """RuntimeError if the background work met what it does not expect."""
        for work in (self._reclaiming, self._syncing):
            if work.failure is not None:
                raise RuntimeError("background work of the sink failed") from work.failure

    async def drain(self) -> None:
        """Wait until all of it is done."""
        await self._syncing.wait()
        await self._reclaiming.wait()
        self.raise_failure()

    async def _unlink(self) -> None:
        while self._ledger.has_free:
            free = self._ledger.take_free(self._ledger.AT_ONCE)
            files = [file for file in free if file not in self._spared]
            if not files:
                await asyncio.sleep(0)
                continue
            results = await asyncio.to_thread(self._store.reclaim, files)
            for file, result in zip(files, results, strict=True):
                if isinstance(result, Exception):
                    self._counters["reclaim_failed"] += 1
                    log.warning("reclaiming %s failed; a later sweep takes it: %s", file, result)
                elif result >= 0:
                    self._counters["reclaimed"] += 1

    async def _sync(self) -> None:
        while self._unsynced:
            files = sorted(self._unsynced.pop() for _ in range(min(_SYNCED_TOGETHER, len(self._unsynced))))
            for file, error in zip(files, await asyncio.to_thread(self._store.sync, files), strict=True):
                if error is not None and file in self._ledger:
                    self._counters["sync_failed"] += 1
                    log.warning("fdatasync of %s failed; a save that pins it will say so: %s", file, error)


class _Background:
    """One task at a time that does all there is to do; `start` while it runs is seen by its loop."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None

    def start(self) -> None:
        if self._task is None and self.failure is None:
            self._task = asyncio.ensure_future(self._work())
            self._task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled():
            self.failure = task.exception()

    async def wait(self) -> None:
        while self._task is not None:
            await asyncio.wait([self._task])
