"""Slabs: one piece of memory cut into arrays and seen as tensors again; on the CPU what CUDA does with them."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="slabs are tensors: pip install 'prime-io[torch]'")

from prime_io.device import PinnedPool, cut, slab_bytes, views  # noqa: E402
from prime_io.packing import Layout  # noqa: E402


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
