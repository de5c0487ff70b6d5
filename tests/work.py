"""Small, real work for tests of the orchestrator's half: a store, episodes with payload files, a sink."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prime_io import (
    Episode,
    FieldSpec,
    PayloadStore,
    Policy,
    PolicySpan,
    Progress,
    Sample,
    Trace,
    TrainSink,
)

LINEAGE = "life"
FIELD = "routed_experts"
SPECS = {FIELD: FieldSpec(align="token-1"), "pixels": FieldSpec(align="free", required=False)}
_numbers = itertools.count()


class Bench:
    """A store with its owner's sink, and a way to make episodes for it."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.store = PayloadStore(root, owner=True)
        self.progress = options.pop("progress", None) or Progress()
        self.policy = options.pop("policy", None) or Policy(100)
        self.dropped: dict[str, list[str]] = {}
        self.results: list[Any] = []
        self.forgotten: list[str] = []
        callbacks = {
            "on_result": self.results.append,
            "on_consumed": self.forgotten.append,
            "on_drop": self.drop,
        }
        self.sink = self.sink_of(
            self.store, progress=self.progress, policy=self.policy, **(callbacks | options)
        )

    @staticmethod
    def sink_of(store: PayloadStore, **options: Any) -> TrainSink:
        settings: dict[str, Any] = {
            "progress": Progress(),
            "policy": Policy(100),
            "group_size": 2,
            "batch_size": 2,
            "max_off_policy_steps": 4,
            "fields": SPECS,
            "lineage": LINEAGE,
            "filter_zero_advantages": False,
        }
        return TrainSink(store=store, **(settings | options))

    def drop(self, reason: str, traces: Sequence[str]) -> None:
        self.dropped.setdefault(reason, []).extend(traces)

    def episode(
        self,
        group: str = "g0",
        *,
        version: int = 0,
        policy: int | None = 0,
        n: int = 12,
        reward: float | None = None,
        payload: bool = True,
        pixels: bool = False,
        name: str | None = None,
        **more: Any,
    ) -> Episode:
        number = next(_numbers)
        name = name or f"{group}/{number}"
        segments = []
        if payload:
            rows = np.random.default_rng(number).integers(0, 8, (n - 1, 2, 2), np.uint8)
            segments += self.store.write({FIELD: rows}, version=version).values()
        if pixels:
            segments += self.store.write({"pixels": np.ones((3, 4), np.float32)}, version=version).values()
        sample = Sample(
            token_ids=np.arange(n, dtype=np.int32),
            mask=np.arange(n) >= 4,
            logprobs=np.linspace(-1, 0, n, dtype=np.float32),
            payload=segments,
            columns={"temperatures": np.full(n, 0.7, np.float32)},
            scalars={"length": float(n)},
        )
        fields: dict[str, Any] = {
            "env_name": "env",
            "group_id": group,
            "task": {"q": group},
            "policy": None if policy is None else PolicySpan(policy, policy),
            "dispatch_version": version,
            "traces": [Trace(name, float(number) if reward is None else reward, [sample])],
            "lineage": LINEAGE,
        }
        return Episode(name, **(fields | more))

    async def fill(self, groups: int, size: int = 2, **options: Any) -> list[str]:
        """Complete that many groups; the ids of their traces."""
        names = []
        for _ in range(groups):
            group = f"g{next(_numbers)}"
            for _ in range(size):
                episode = self.episode(group, **options)
                names += [trace.id for trace in episode.traces]
                await self.sink.add(episode)
        return names

    def files(self) -> set[str]:
        return {file for file, *_ in self.store.native.scan()}


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    import time

    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.01)
