"""A run with batches whose every array is known, for tests of the trainer's side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prime_io import (
    Episode,
    Exchange,
    FieldSpec,
    Lineage,
    PayloadStore,
    QueuedTrace,
    Sample,
    Trace,
    TrainBatch,
    prepare_resume,
    shift,
)
from prime_io.columns import spill

EXPERTS, PIXELS, TOPK = "routed_experts", "pixels", "teacher"
FIELDS = {
    EXPERTS: FieldSpec(align="token-1", fill="spread"),
    PIXELS: FieldSpec(align="free", required=False),
    TOPK: FieldSpec(ragged=True, required=False),
}
Arrays = dict[str, np.ndarray]


def arrays_of(seed: int, n: int, *, pixels: bool = False, ragged: bool = False) -> Arrays:
    """What a sample of n tokens holds: a function of its seed."""
    chance = np.random.default_rng(seed)
    made: Arrays = {
        "token_ids": chance.integers(1, 50_000, n, np.int32),
        "mask": chance.random(n) < 0.7,
        "logprobs": -chance.random(n, np.float32),
        "advantages": chance.standard_normal(n).astype(np.float32),
        "temperatures": chance.random(n, np.float32),
        EXPERTS: chance.integers(0, 200, (n - 1, 3, 2), np.uint8),
    }
    if pixels:
        made[PIXELS] = chance.random((int(chance.integers(1, 9)), 4), np.float32)
    if ragged:
        made[f"{TOPK}.counts"] = chance.integers(0, 4, n, np.int32)
        made[f"{TOPK}.values"] = chance.integers(0, 9999, (int(made[f"{TOPK}.counts"].sum()), 2), np.uint16)
    return made


class Run:
    """A started run with its owner's store, into which samples are written and batches are published."""

    def __init__(self, root: Path) -> None:
        self.root = root
        if not (root / "LINEAGE").exists():
            prepare_resume(root, None)
        self.lineage = Lineage.load(root)
        self.exchange = Exchange(self.lineage)
        self.store = PayloadStore(root / "payloads", owner=True)

    def trace(self, name: str, samples: Sequence[Arrays], *, parts: int = 2) -> QueuedTrace:
        """Write samples, payload in `parts` files, as the workers and the sink do."""
        made = []
        for arrays in samples:
            payload = []
            for part in range(parts):
                rows = arrays[EXPERTS]
                lo, hi = len(rows) * part // parts, len(rows) * (part + 1) // parts
                payload += shift(self.store.write({EXPERTS: rows[lo:hi]}, version=0).values(), lo)
            others = {k: a for k, a in arrays.items() if k.startswith((PIXELS, TOPK))}
            if others:
                payload += self.store.write(others, version=0).values()
            made.append(
                Sample(
                    arrays["token_ids"],
                    arrays["mask"],
                    arrays["logprobs"],
                    payload,
                    {"temperatures": arrays["temperatures"]},
                    advantages=arrays["advantages"],
                )
            )
        episode = Episode(name, "env", name, None, None, 0, [Trace(name, 1.0, made)], lineage=self.lineage.id)
        stored = spill(episode, store=self.store)
        tokens = sum(s.n_tokens for s in stored.traces[0].samples)
        return QueuedTrace(name, name, "env", name, None, 0, 0, tokens, 1.0, stored.traces[0].samples)

    def publish(self, step: int, traces: Iterable[QueuedTrace], *, lineage: str | None = None) -> TrainBatch:
        traces = list(traces)
        files = list(dict.fromkeys(s.file for t in traces for s in t.segments()))
        batch = TrainBatch(step, lineage or self.lineage.id, traces, files)
        self.exchange.publish_batch(batch)
        return batch

    def batch(self, step: int, lengths: Sequence[int], **kinds: Any) -> dict[str, list[Arrays]]:
        """Publish a batch of one sample per trace; the arrays by trace id."""
        made = {f"t{step}.{i}": [arrays_of(1000 * step + i, n, **kinds)] for i, n in enumerate(lengths)}
        self.publish(step, [self.trace(name, samples) for name, samples in made.items()])
        return made


def check(micro_batch: Any, made: Mapping[str, Sequence[Arrays]]) -> list[str]:
    """Compare every row of every sample of a micro-batch, and its padding; the traces seen."""
    mb, lo, hi = micro_batch, micro_batch.lo, micro_batch.hi
    tokens = {
        "token_ids": mb.token_ids,
        "mask": mb.mask,
        "logprobs": mb.logprobs,
        "advantages": mb.advantages,
        **mb.columns,
    }
    whole = {name: np.zeros(mb.length, t.numpy().dtype) for name, t in tokens.items()}
    position = np.zeros(mb.length, np.int32)
    experts, valid = np.zeros((mb.length, 3, 2), np.uint8), np.zeros(mb.length, bool)
    experts[:] = np.arange(2)
    end = 0
    for s in mb.samples:
        own = made[s.trace_id][s.nth]
        assert s.start == end and s.n_tokens == len(own["token_ids"])
        end = s.start + s.n_tokens
        position[s.start : end] = np.arange(s.n_tokens)
        if s.masked:
            continue
        for name in whole:
            whole[name][s.start : end] = own[name]
        experts[s.start : end - 1], valid[s.start : end - 1] = own[EXPERTS], True
    position[end:] = np.arange(mb.length - end)
    for name, tensor in tokens.items():
        np.testing.assert_array_equal(tensor.numpy(), whole[name][lo:hi], err_msg=name)
    np.testing.assert_array_equal(mb.position_ids.numpy(), position[lo:hi])
    bounds = [0, *(s.start + s.n_tokens for s in mb.samples), *[mb.length] * (end < mb.length)]
    np.testing.assert_array_equal(mb.cu_seqlens.numpy(), bounds)
    if EXPERTS in mb.payload:
        np.testing.assert_array_equal(mb.payload[EXPERTS].rows.numpy(), experts[lo:hi])
        np.testing.assert_array_equal(mb.payload[EXPERTS].valid.numpy(), valid[lo:hi])
    return [s.trace_id for s in mb.samples]
