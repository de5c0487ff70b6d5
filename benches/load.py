"""A queue as a long run has it: thousands of scored traces with many payload segments, in a real sink."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prime_io import (
    CheckpointManager,
    Dispatcher,
    Environment,
    Episode,
    Exchange,
    Orchestrator,
    PayloadSegment,
    PayloadStore,
    Policy,
    PolicySpan,
    Progress,
    Rollout,
    Sample,
    Trace,
    TrainSink,
    TrainSource,
    prepare_resume,
)

TRACES, SEGMENTS, GROUP = 4_000, 10, 8


class Life:
    """Store, sink and orchestrator of a run whose only component is the orchestrator's; nothing is dispatched."""

    def __init__(self, run: Path, *, batch_size: int = 64) -> None:
        self.lineage = prepare_resume(run, None, components=("orchestrator",))
        self.store = PayloadStore(run / "payloads", owner=True)
        self.progress, self.policy = Progress(), Policy(1)
        self.source = TrainSource(envs=[Environment("math", list(range(1000)), GROUP)], seed=1)
        self.sink = TrainSink(
            store=self.store,
            progress=self.progress,
            policy=self.policy,
            group_size=GROUP,
            batch_size=batch_size,
            max_off_policy_steps=1000,
            lineage=self.lineage.id,
            filter_zero_advantages=False,
        )
        self.manager = CheckpointManager(run_dir=run, components=("orchestrator",), keep_last=1)
        self.orchestrator = Orchestrator(
            exchange=Exchange(self.lineage),
            store=self.store,
            source=self.source,
            dispatcher=Dispatcher(
                source=self.source,
                run_episode=_nobody,
                policy=self.policy,
                progress=self.progress,
                max_inflight=1,
                max_off_policy_steps=1000,
                lineage=self.lineage.id,
            ),
            sink=self.sink,
            manager=self.manager,
            progress=self.progress,
            policy=self.policy,
            max_steps=1000,
            checkpoint_every=1,
        )
        self._added = 0

    def payloads(self, traces: int, files: int) -> list[list[PayloadSegment]]:
        """Per trace SEGMENTS segments of one field, in `files` files: a request each, or one for all turns."""
        turns = SEGMENTS // files
        rows = np.arange(turns * 16, dtype=np.uint8).reshape(turns, 16, 1)
        batch = [{f"routed_experts.{i}": rows[i] for i in range(turns)}] * (traces * files)
        written = self.store.write_many(batch, version=0)
        per_trace: list[list[PayloadSegment]] = [[] for _ in range(traces)]
        for i, made in enumerate(written):
            assert not isinstance(made, Exception), made
            for segment in made.values():
                at = len(per_trace[i // files])
                per_trace[i // files].append(_placed(segment, pos=16 * at))
        return per_trace

    async def add(self, sample: Sample, payload: Sequence[PayloadSegment]) -> str:
        """One more rollout of the group that is being filled: its spill is written, the last one scores."""
        number = self._added
        self._added += 1
        group = f"math-{number // GROUP:06d}"
        name = f"{group}.{number % GROUP}.{self.lineage.id}"
        own = Sample(sample.token_ids, sample.mask, sample.logprobs, list(payload), dict(sample.columns))
        await self.sink.add(
            Episode(
                name,
                "math",
                group,
                {"question": number // GROUP},
                PolicySpan(0, 1),
                0,
                [Trace(name, float(number % 3), [own])],
                lineage=self.lineage.id,
            )
        )
        return name

    async def fill(self, traces: int, *, files: int, tokens: int) -> None:
        """Queue that many traces. Their files are written back: what a run has had minutes for."""
        payloads = await asyncio.to_thread(self.payloads, traces, files)
        await asyncio.to_thread(os.sync)
        sample = make_sample(tokens)
        for payload in payloads:
            await self.add(sample, payload)
        await asyncio.to_thread(os.sync)
        await self.sink.drain()
        assert self.sink.queued == traces

    async def checkpoint(self) -> int:
        """A step: a batch is taken, the cut made, its save, retention and sweep awaited. Returns the step."""
        batch = self.sink.take_batch()
        assert batch is not None
        self.orchestrator._cut()
        await asyncio.gather(*self.orchestrator._saves)
        if self.orchestrator._sweeping is not None:
            await self.orchestrator._sweeping
        assert self.manager.failed_saves == 0 and self.orchestrator._failure is None
        return batch.step

    def close(self) -> None:
        self.store.close()


def make_sample(tokens: int) -> Sample:
    return Sample(
        np.arange(tokens, dtype=np.int32),
        np.ones(tokens, np.bool_),
        np.zeros(tokens, np.float32),
        columns={"temperatures": np.ones(tokens, np.float32)},
    )


def _placed(segment: PayloadSegment, *, pos: int) -> PayloadSegment:
    fields: list[Any] = [getattr(segment, name) for name in segment.__struct_fields__]
    fields[0], fields[3] = "routed_experts", pos
    return PayloadSegment(*fields)


async def _nobody(rollout: Rollout) -> Episode:
    raise AssertionError("nothing is dispatched here")
