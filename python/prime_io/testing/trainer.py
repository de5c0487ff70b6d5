"""`FakeTrainer`: a trainer's part of the protocol, with every byte of its batches read and compared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import CheckpointManager
from ..columns import load_batch
from ..exchange import Exchange
from ..lineage import Lineage
from ..store import PayloadStore
from ..types import TrainBatch
from .load import FakeLoad


class FakeTrainer:
    """Trains the batches of `lineage` (default: the current one of `run_dir`) until the orchestrator says stop.

    A step reads the batch to its last byte (WrongBytesError, FileNotFoundError or CorruptPayloadError end the
    trainer), takes `step_s`, publishes weights, commits its component of a checkpoint step and acknowledges.
    `on_event(name, facts)` is told of "trained" (step, trace ids), as soon as the batch counts as trained, and
    of "committed". Use it in the orchestrator's event loop, or in a process of its own.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        load: FakeLoad,
        store: PayloadStore | None = None,
        lineage: Lineage | None = None,
        reader: str = "trainer",
        step_s: float = 0.05,
        poll_s: float = 0.005,
        on_event: Callable[[str, Mapping[str, Any]], None] = lambda name, facts: None,
    ) -> None:
        self.lineage = lineage or Lineage.load(run_dir)
        self.exchange = Exchange(self.lineage)
        self.manager = CheckpointManager(run_dir=run_dir, lineage=self.lineage)
        self.step = self.lineage.resumed_from or 0
        self._load = load
        self._store = store or PayloadStore(Path(run_dir) / "payloads", create=False)
        self._reader = reader
        self._step_s = step_s
        self._poll_s = poll_s
        self._on_event = on_event

    async def run(self) -> None:
        """Until the last batch is trained and committed."""
        committed = self.step
        await asyncio.to_thread(self._publish, self.step)
        while True:
            # The word to stop comes after the last batch: it is looked for first.
            stop = await asyncio.to_thread(self.exchange.stop_step)
            batch = await asyncio.to_thread(self.exchange.read_batch, self.step + 1)
            if batch is None:
                if stop is not None and stop <= self.step:
                    break
                await asyncio.sleep(self._poll_s)
                continue
            await asyncio.to_thread(self._read, batch)
            await asyncio.sleep(self._step_s)
            self.step = batch.step
            self._on_event("trained", {"step": self.step, "traces": [t.trace_id for t in batch.traces]})
            await asyncio.to_thread(self._publish, self.step)
            if batch.checkpoint:
                await asyncio.to_thread(self._commit)
                committed = self.step
            await asyncio.to_thread(self.exchange.acknowledge, self.step, self._reader)
        if committed != self.step:
            await asyncio.to_thread(self._commit)

    def _read(self, batch: TrainBatch) -> None:
        self._load.check(load_batch(batch, store=self._store), store=self._store)

    def _publish(self, version: int) -> None:
        self.exchange.publish_weights(version, {"weights": b"weights %d" % version})

    def _commit(self) -> None:
        directory = self.manager.new_component_dir()
        (directory / "model").write_bytes(b"model %d" % self.step)
        self.manager.commit_component(self.step, self._reader, directory)
        self._on_event("committed", {"step": self.step})
