"""Reading a micro-batch: any packing on any split against numpy, and by one slab as for CUDA."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loading import EXPERTS, FIELDS, PIXELS, TOPK, Run, arrays_of, check
from prime_io import FieldSpec, TrainBatch

torch = pytest.importorskip("torch", reason="micro-batches are tensors: pip install 'prime-io[torch]'")

from prime_io.device import HostStaging, Slab, Tensors, cut, slab_bytes, views  # noqa: E402
from prime_io.failure import Lost  # noqa: E402
from prime_io.fetch import fetch  # noqa: E402
from prime_io.packing import Layout  # noqa: E402
from prime_io.stepplan import StepPlan  # noqa: E402

_numbers = itertools.count()


class SlabStaging:
    """As CudaStaging, with ordinary memory for both sides and the copy done at once."""

    widens_late = True
    hits = misses = 0

    def take(self, full: Sequence[Layout]) -> Slab:
        return cut(torch.full((slab_bytes(full) + 512,), 0xAB, dtype=torch.uint8), full)

    def send(self, slab: Slab | None, arrays: Any, names: Sequence[str]) -> Callable[[], Tensors]:
        assert slab is not None
        copy = slab.memory[: slab.nbytes].clone()
        slab.memory.fill_(0xCD)
        return lambda: views(copy, slab, names)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as root:
        made = Run(Path(root) / "run")
        yield made
        made.store.close()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_batch_on_any_split_equals_numpy(run: Run, data: Any) -> None:
    """Main job: rows, marks and token columns of every rank are those that numpy packs, each sample once."""
    made, traces = {}, []
    for counts in data.draw(st.lists(st.lists(st.integers(1, 16), min_size=1, max_size=3), max_size=6)):
        name = f"trace{next(_numbers)}"
        kinds = {"pixels": data.draw(st.booleans()), "ragged": data.draw(st.booleans())}
        made[name] = [arrays_of(next(_numbers), n, **kinds) for n in counts]
        traces.append(run.trace(name, made[name], parts=data.draw(st.integers(1, 3))))
    samples = [(name, nth) for name, each in made.items() for nth in range(len(each))]
    lost = data.draw(st.sets(st.integers(0, len(samples) - 1), max_size=2)) if samples else set()
    dp, cp = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 2), (1, 4)]))
    batch = TrainBatch(1, run.lineage.id, traces, [])
    seen, counts = [], set()
    for rank in range(dp):
        for window in range(cp):
            plan = StepPlan(
                batch, fields=FIELDS, columns={}, seq_len=24, multiple=4, dp=(rank, dp), cp=(window, cp)
            )
            assert not plan.probe(run.store)
            plan.agree([Lost(i, EXPERTS, "", 2) for i in lost])
            counts.add(len(plan.packed))
            end = [0] * len(plan.packed)
            for i, packed in enumerate(plan.packed):
                staging: Any = data.draw(st.sampled_from([HostStaging(), SlabStaging()]))
                fetched = fetch(plan, i, store=run.store, staging=staging, verify=True)
                assert fetched.nbytes <= plan.nbytes(packed, wide=not staging.widens_late)
                mb = fetched.receive()
                check(mb, made)
                assert {samples.index((s.trace_id, s.nth)) for s in mb.samples if s.masked} <= lost
                seen += [(s.trace_id, s.nth) for s in mb.samples] * (window == 0)
                end[i] = mb.hi
            assert window + 1 < cp or end == [packed.length for packed in plan.packed]
    assert sorted(seen) == sorted(samples) and len(counts) == 1


def test_a_micro_batch_by_slab_equals_one_by_the_engine(run: Run) -> None:
    """Read narrow into one slab, copied whole and widened late: the same tensors as on the CPU."""
    run.batch(1, [10, 20, 5, 33, 7, 12], pixels=True, ragged=True)
    batch = run.exchange.read_batch(1)
    assert batch is not None
    fields = {
        EXPERTS: FieldSpec(align="token-1", fill="spread", dtype="int32"),
        PIXELS: FIELDS[PIXELS],
        TOPK: FieldSpec(ragged=True, required=False, dtype="int64"),
    }
    for cp in ((0, 1), (1, 2)):
        plan = StepPlan(batch, fields=fields, columns={}, seq_len=64, multiple=2, dp=(0, 1), cp=cp)
        plan.agree([])
        for i in range(len(plan.packed)):
            one = fetch(plan, i, store=run.store, staging=HostStaging(), verify=True)
            other = fetch(plan, i, store=run.store, staging=SlabStaging(), verify=True)
            for fetched, wide in ((one, True), (other, False)):
                assert fetched.nbytes <= plan.nbytes(plan.packed[i], wide=wide)
            assert other.nbytes < one.nbytes, "the narrow dtype is what is read and copied"
            a, b = one.receive(), other.receive()
            assert a.payload[EXPERTS].rows.dtype == torch.int32 and a.payload[TOPK].rows.dtype == torch.int64
            for name in ("token_ids", "mask", "logprobs", "advantages", "position_ids", "cu_seqlens"):
                assert torch.equal(getattr(a, name), getattr(b, name)), name
            assert a.payload.keys() == b.payload.keys() == fields.keys()
            for name in fields:
                for x, y in zip(a.payload[name], b.payload[name], strict=True):
                    assert (x is None and y is None) or (x.dtype == y.dtype and torch.equal(x, y)), name
