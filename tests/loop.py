"""One life of a run in one process: a fake worker and a trainer thread on the real store, for tests of the loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from prime_io import (
    CheckpointManager,
    Dispatcher,
    Environment,
    Episode,
    Exchange,
    FieldSpec,
    Lineage,
    Orchestrator,
    PayloadStore,
    Policy,
    PolicySpan,
    Progress,
    Rollout,
    Sample,
    Trace,
    TrainSink,
    TrainSource,
    load_batch,
)

FIELD = "routed_experts"


class Trainer(threading.Thread):
    """Reads every batch to the last byte, publishes versions, commits its half, acknowledges."""

    def __init__(self, run: Path, *, slower_than: Run | None = None, dies_after: int | None = None) -> None:
        """`slower_than`: a step takes until that run has two batches queued."""
        super().__init__(daemon=True)
        self.run_dir, self.slower_than, self.dies_after = run, slower_than, dies_after
        self.lineage = Lineage.load(run)
        self.exchange = Exchange(self.lineage)
        self.trained: dict[int, list[str]] = {}
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.train()
        except BaseException as error:
            self.error = error

    def train(self) -> None:
        store = PayloadStore(self.run_dir / "payloads", create=False)
        manager = CheckpointManager(run_dir=self.run_dir)
        step = committed = self.lineage.resumed_from or 0
        self.exchange.publish_weights(step, {"weights": b"w"})
        while (batch := self.exchange.wait_batch(step + 1, poll_s=0.002)) is not None:
            for trace in load_batch(batch, store=store):
                [sample] = trace.samples
                rows, valid = store.gather(sample.payload, FIELD, 0, len(sample.token_ids) - 1, verify=True)
                assert valid.all()
                assert (rows == sample.token_ids[0] % 256).all(), "the payload of another trace"
            while self.slower_than is not None and self.slower_than.sink.queued_batches < 2:
                time.sleep(0.002)
            step = batch.step
            self.exchange.publish_weights(step, {"weights": b"w"})
            if batch.checkpoint:
                self.commit(manager, step)
                committed = step
            self.trained[step] = [trace.trace_id for trace in batch.traces]
            self.exchange.acknowledge(step, "trainer")
            if step == self.dies_after:
                return
        if step != committed:
            self.commit(manager, step)

    def commit(self, manager: CheckpointManager, step: int) -> None:
        directory = manager.new_component_dir()
        (directory / "model").write_bytes(b"w" * 100)
        manager.commit_component(step, "trainer", directory)


class Run:
    """One life."""

    def __init__(self, run: Path, *, max_steps: int, pin: Any = "link", **options: Any) -> None:
        self.lineage = Lineage.load(run)
        self.store = PayloadStore(run / "payloads", owner=True)
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.progress, self.policy = Progress(), Policy()
        self.source = TrainSource(envs=[Environment("env", list(range(40)), 4)], seed=3)
        self.calls = 0
        self.sink = TrainSink(
            store=self.store,
            progress=self.progress,
            policy=self.policy,
            group_size=4,
            batch_size=8,
            max_off_policy_steps=6,
            fields={FIELD: FieldSpec(align="token-1")},
            lineage=self.lineage.id,
        )
        self.dispatcher = Dispatcher(
            source=self.source,
            run_episode=self.run_episode,
            policy=self.policy,
            progress=self.progress,
            max_inflight=13,
            max_off_policy_steps=6,
            lineage=self.lineage.id,
        )
        self.manager = CheckpointManager(run_dir=run, keep_last=2, pin=pin)
        self.orchestrator = Orchestrator(
            exchange=Exchange(self.lineage),
            store=self.store,
            source=self.source,
            dispatcher=self.dispatcher,
            sink=self.sink,
            manager=self.manager,
            progress=self.progress,
            policy=self.policy,
            max_steps=max_steps,
            checkpoint_every=2,
            on_event=lambda name, facts: self.events.append((name, facts)),
            poll_s=0.002,
            **options,
        )

    async def run_episode(self, rollout: Rollout) -> Episode:
        self.calls += 1
        number = self.calls
        await asyncio.sleep(0.001 * (number % 7))
        n, first = 10, (hash(rollout.group_id) + rollout.member) % 30000
        rows = np.full((n - 1, 3, 2), first % 256, np.uint8)
        segments = await asyncio.to_thread(self.store.write, {FIELD: rows}, version=rollout.dispatch_version)
        name = f"{rollout.group_id}.{rollout.member}.{self.lineage.id[:6]}"
        sample = Sample(
            np.full(n, first, np.int32), np.arange(n) > 3, np.zeros(n, np.float32), list(segments.values())
        )
        version = PolicySpan(rollout.dispatch_version, rollout.dispatch_version)
        return Episode(
            name,
            "env",
            rollout.group_id,
            rollout.task,
            version,
            rollout.dispatch_version,
            [Trace(name, float(number % 3), [sample])],
            lineage=rollout.lineage,
        )

    def of(self, name: str) -> list[Mapping[str, Any]]:
        return [facts for event, facts in self.events if event == name]


async def until_the_end(life: Run, trainer: Trainer) -> None:
    trainer.start()
    await life.orchestrator.run()
    await asyncio.to_thread(trainer.join, 20)
    assert trainer.error is None, trainer.error
    await life.orchestrator.finish()


async def soon(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not come to that in time"
        await asyncio.sleep(0.002)


async def until_killed(life: Run, trainer: Trainer) -> None:
    """Run until the trainer has died, then drop everything without a word, as a kill does.

    Not during a save: the files of the batches trained since its cut would still wait for it.
    """
    trainer.start()
    running = asyncio.ensure_future(life.orchestrator.run())
    while {"step": trainer.dies_after} not in life.of("trained") or life.orchestrator._saves:
        assert trainer.error is None, trainer.error
        assert not running.done() or running.result() is None
        await asyncio.sleep(0.002)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await life.dispatcher.close()
    await life.sink.drain()
    if life.orchestrator._sweeping is not None:
        await life.orchestrator._sweeping  # its thread holds the store
    life.store.close()
