"""A run whose batches have real shapes and known contents, for the benchmarks of the trainer's side.

A sequence is three samples of 5/8, 1/4 and 1/8 of its rows, the last a little short, so that some padding follows.
Sample k is rows [61 k, 61 k + n) of one array per column: no two are equal, and what was written is known anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from prime_io import (
    Episode,
    Exchange,
    FieldSpec,
    Lineage,
    MicroBatch,
    PayloadLoader,
    PayloadStore,
    QueuedTrace,
    Ranks,
    Sample,
    Trace,
    TrainBatch,
    prepare_resume,
    shift,
)
from prime_io.columns import spill
from prime_io.stepplan import StepPlan

EXPERTS = "routed_experts"
ROW = (48, 8)
"""Layers and experts per token of Qwen3-30B-A3B."""

_MULTIPLE = 128
_STRIDE = 61
_TURNS = 2
_MADE = ("valid", "position_ids", "cu_seqlens")
"""What a micro-batch has beside what was written."""


class Run:
    """A finished run of `steps` batches, each of `sequences` packed sequences of `seq_len` (1,024 or more) rows.

    One payload file per turn of a sample, two turns, and one spill file. `nbytes`: of the payload's rows.
    """

    def __init__(self, root: Path, *, steps: int, sequences: int, seq_len: int) -> None:
        prepare_resume(root, None)
        self._lineage = Lineage.load(root)
        self.exchange = Exchange(self._lineage)
        self.store = PayloadStore(root / "payloads", owner=True)
        self.steps, self.sequences, self.seq_len = steps, sequences, seq_len
        self.lengths = [seq_len * 5 // 8, seq_len // 4, seq_len // 8 - 3]
        self.nbytes = self.n_sequences * sum(n - 1 for n in self.lengths) * ROW[0] * ROW[1]
        random, most = np.random.default_rng(0), seq_len + 3 * _STRIDE * self.n_sequences
        self.base: dict[str, np.ndarray] = {
            EXPERTS: random.integers(0, 128, (most, *ROW), np.uint8),
            "token_ids": random.integers(1, 150_000, most, np.int32),
            "mask": random.random(most) < 0.7,
            "logprobs": -random.random(most, np.float32),
            "advantages": random.standard_normal(most, np.float32),
            "temperatures": random.random(most, np.float32),
        }
        self.batches: list[TrainBatch] = []
        for step in range(1, steps + 1):
            traces = [self._trace(i) for i in range(*self._numbers(step))]
            files = [s.file for trace in traces for s in trace.segments()]
            self.batches.append(TrainBatch(step, self._lineage.id, traces, list(dict.fromkeys(files))))
            self.exchange.publish_batch(self.batches[-1])
        self.exchange.say_stop(steps)

    @property
    def n_sequences(self) -> int:
        """Of all steps: how many micro-batches one trainer gets."""
        return self.steps * self.sequences

    def loader(
        self, *, device: torch.device | str = "cpu", dtype: str | None = None, **options: Any
    ) -> PayloadLoader:
        """A lone trainer's loader from the first step on; `dtype`: what the experts are widened to."""
        return PayloadLoader(
            self.store,
            self.exchange,
            _fields(dtype),
            seq_len=self.seq_len,
            multiple=_MULTIPLE,
            start=1,
            device=device,
            ranks=Ranks.alone(),
            **options,
        )

    def plans(self) -> list[StepPlan]:
        """The same packing, for those that read by themselves."""
        alone, options = (0, 1), {"columns": {}, "seq_len": self.seq_len, "multiple": _MULTIPLE}
        return [StepPlan(b, fields=_fields(None), dp=alone, cp=alone, **options) for b in self.batches]

    def experts(self, trace_id: str, n_tokens: int) -> np.ndarray:
        """The rows that a trace's payload files hold: none for its last token."""
        first = int(trace_id) * _STRIDE
        return self.base[EXPERTS][first : first + n_tokens - 1]

    def close(self) -> None:
        """Close the store; the files stay."""
        self.store.close()

    def _numbers(self, step: int) -> tuple[int, int]:
        per_step = self.sequences * len(self.lengths)
        return (step - 1) * per_step, step * per_step

    def _trace(self, number: int) -> QueuedTrace:
        n, name = self.lengths[number % len(self.lengths)], str(number)
        own = {key: column[number * _STRIDE : number * _STRIDE + n] for key, column in self.base.items()}
        rows, payload = own[EXPERTS][: n - 1], []
        for turn in range(_TURNS):
            lo, hi = (len(rows) * t // _TURNS for t in (turn, turn + 1))
            payload += shift(self.store.write({EXPERTS: rows[lo:hi]}, version=0).values(), lo)
        sample = Sample(
            own["token_ids"],
            own["mask"],
            own["logprobs"],
            payload,
            {"temperatures": own["temperatures"]},
            advantages=own["advantages"],
        )
        episode = Episode(
            name, "env", name, None, None, 0, [Trace(name, 1.0, [sample])], lineage=self._lineage.id
        )
        [trace] = spill(episode, store=self.store).traces
        return QueuedTrace(name, name, "env", name, None, 0, number, n, 1.0, trace.samples)


def _fields(dtype: str | None) -> dict[str, FieldSpec]:
    return {EXPERTS: FieldSpec(align="token-1", fill="spread", dtype=dtype)}


class Checker:
    """Compares micro-batches with what was written, item by item, on their device and its current stream.

    Nothing in `add` waits for the device, so that it can be far behind when the next micro-batch comes. Make it
    and use it under one current stream.
    """

    def __init__(self, run: Run, device: torch.device, *, dtype: torch.dtype = torch.uint8) -> None:
        self._run, self._dtype = run, dtype
        # Blocking copies from pageable memory: not the path that is checked.
        self._base = {name: torch.from_numpy(column).to(device) for name, column in run.base.items()}
        self._device = self._base["token_ids"].device
        self._wrong = {
            name: torch.zeros((), dtype=torch.int64, device=device) for name in (*self._base, *_MADE)
        }
        self._seen: list[str] = []

    def add(self, micro_batch: MicroBatch) -> None:
        """Compare one. AssertionError at once for a wrong dtype, shape or device; for items see `finish`."""
        experts = micro_batch.payload[EXPERTS]
        got = {
            "token_ids": micro_batch.token_ids,
            "mask": micro_batch.mask,
            "logprobs": micro_batch.logprobs,
            "advantages": micro_batch.advantages,
            **micro_batch.columns,
            EXPERTS: experts.rows,
            "valid": experts.valid,
            "position_ids": micro_batch.position_ids,
        }
        want = self._expected(micro_batch)
        assert got.keys() == want.keys(), f"{sorted(got)} came, {sorted(want)} were written"
        for name, expected in want.items():
            tensor = got[name]
            made, due = ((t.dtype, t.shape, t.device) for t in (tensor, expected))
            assert made == due, f"{name} is {made}, not {due}"
            self._wrong[name] += (tensor != expected).sum()
        ends = [0, *(s.start + s.n_tokens for s in micro_batch.samples)]
        bounds = ends + [micro_batch.length] * (ends[-1] < micro_batch.length)
        assert micro_batch.cu_seqlens.shape == (len(bounds),)
        for i, bound in enumerate(bounds):
            self._wrong["cu_seqlens"] += micro_batch.cu_seqlens[i] != bound
        self._seen += [s.trace_id for s in micro_batch.samples]

    def finish(self) -> int:
        """How many micro-batches' worth of samples were compared. AssertionError unless each came once, right."""
        wrong = {name: int(count.item()) for name, count in self._wrong.items()}
        assert not any(wrong.values()), f"items that differ from what was written: {wrong}"
        due = [trace.trace_id for batch in self._run.batches for trace in batch.traces]
        assert sorted(self._seen) == sorted(due), "not every trace came exactly once"
        return self._run.n_sequences

    def _expected(self, mb: MicroBatch) -> dict[str, torch.Tensor]:
        assert (mb.lo, mb.hi) == (0, mb.length)
        n, device = mb.length, self._device
        want = {
            name: torch.zeros((n, *base.shape[1:]), dtype=base.dtype, device=device)
            for name, base in self._base.items()
        }
        # Without a row: distinct experts.
        want[EXPERTS] = torch.arange(ROW[1], device=device).to(self._dtype).expand(n, *ROW).clone()
        want["valid"] = torch.zeros(n, dtype=torch.bool, device=device)
        want["position_ids"] = torch.zeros(n, dtype=torch.int32, device=device)
        end = 0
        for sample in mb.samples:
            assert sample.start == end and not sample.masked
            number, end = int(sample.trace_id) * _STRIDE, sample.start + sample.n_tokens
            for name, base in self._base.items():
                rows = sample.n_tokens - (name == EXPERTS)
                want[name][sample.start : sample.start + rows] = base[number : number + rows]
            want["valid"][sample.start : end - 1] = True
            want["position_ids"][sample.start : end] = torch.arange(sample.n_tokens, device=device)
        want["position_ids"][end:] = torch.arange(n - end, device=device)
        return want
