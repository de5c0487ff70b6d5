"""Slabs: one piece of memory cut into arrays and seen as tensors again; on the CPU what CUDA does with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loading import EXPERTS, FIELDS, PIXELS, TOPK, Run
from prime_io import FieldSpec

torch = pytest.importorskip("torch", reason="slabs are tensors: pip install 'prime-io[torch]'")

from prime_io.device import HostStaging, PinnedPool, Slab, Tensors, cut, slab_bytes, views  # noqa: E402
from prime_io.fetch import fetch  # noqa: E402
from prime_io.packing import Layout  # noqa: E402
from prime_io.stepplan import StepPlan  # noqa: E402


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


def test_arrays_of_a_slab_do_not_meet() -> None:
    """Every array of a slab is its own memory, aligned for any dtype, and comes back with its dtype and shape."""
    full: list[Layout] = [
        ("uint8", (3, 5)),
        ("bfloat16", (7,)),
        ("int64", (0, 4)),
        ("int64", (2,)),
        ("bool", (1,)),
        ("float8_e4m3fn", (9,)),
    ]
    slab = cut(torch.zeros(slab_bytes(full), dtype=torch.uint8), full)
    for i, array in enumerate(slab.arrays):
        array.view(np.uint8)[...] = i + 1
    tensors = views(slab.memory.clone(), slab, [dtype for dtype, _ in full])
    for i, (tensor, (dtype, shape)) in enumerate(zip(tensors, full, strict=True)):
        assert tensor.dtype == getattr(torch, dtype) and tuple(tensor.shape) == shape
        assert (tensor.view(torch.uint8) == i + 1).all()
    assert all(offset % 256 == 0 for offset in slab.offsets) and slab.nbytes == slab_bytes(full)


def test_a_micro_batch_by_slab_equals_one_by_the_engine(tmp_path: Path) -> None:
    """Read narrow into one slab, copied whole and widened late: the same tensors as on the CPU."""
    run = Run(tmp_path / "run")
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
    run.store.close()


class Copy:
    """A copy out of a slab, as the event after it tells of it."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def pool_of(limit: int) -> PinnedPool:
    return PinnedPool(limit, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))


def test_a_slab_is_reused_only_after_its_copy() -> None:
    """Reading into a slab that the device still copies from would train on the next micro-batch's bytes."""
    pool = pool_of(12 << 20)
    first, copy = pool.take(3 << 20), Copy()
    pool.give(first, copy)
    second = pool.take(3 << 20)
    assert second is not first
    copy.done = True
    assert pool.take((3 << 20) + 5) is first and (pool.hits, pool.misses) == (1, 2)
    late = Copy()
    pool.give(first, late)
    pool.give(second, Copy())
    assert not late.done, "what is kept is not waited for"
    pool.close()
    assert late.done, "memory is freed only after the copy out of it"


@pytest.mark.parametrize(
    ("nbytes", "size"), [(0, 1), (1 << 20, 1), ((1 << 20) + 1, 2), (64 << 20, 64), (65 << 20, 128)]
)
def test_idle_slabs_are_bounded(nbytes: int, size: int) -> None:
    """Slabs come in few sizes, and the pool keeps no more of them than its limit."""
    pool = pool_of(size << 20)
    slabs = [pool.take(nbytes) for _ in range(3)]
    assert {slab.numel() for slab in slabs} == {size << 20}
    copies = [Copy() for _ in slabs]
    for slab, copy in zip(slabs, copies, strict=True):
        pool.give(slab, copy)
    assert [copy.done for copy in copies] == [True, True, False], "the oldest go, after their copies"
