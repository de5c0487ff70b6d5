"""Memory that micro-batches are read into, and the way from there to the device.

On the CPU a micro-batch keeps what the engine read: pooled memory that lives for as long as anyone views it,
already widened. For CUDA everything of a micro-batch lies in one pinned slab in its stored, narrow dtypes; one
copy on a stream of our own takes it to the device, and it is widened there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from .packing import Layout
from .segment import row_bytes
from .tensors import Array, as_torch, from_buffer, numpy_dtype

_ALIGN = 256
"""Where arrays begin in a slab: what a CUDA allocation promises."""

_LARGE = 64 << 20

Tensors = list[torch.Tensor]


class Slab(NamedTuple):
    """Host memory of one micro-batch, cut into an array per full shape asked for."""

    memory: torch.Tensor
    """uint8, pinned."""
    arrays: list[Array]
    offsets: list[int]
    nbytes: int


class Staging(Protocol):
    """Where the reader puts arrays, and how the consumer gets them as tensors."""

    widens_late: bool
    """Whether rows are read in their stored dtype and widened only on the device."""

    @property
    def hits(self) -> int:
        """How often pinned memory was there already."""

    @property
    def misses(self) -> int:
        """How often some was made."""

    def take(self, full: Sequence[Layout]) -> Slab | None:
        """Memory for arrays of these dtypes and full shapes; None: let the engine choose it."""

    def send(self, slab: Slab | None, arrays: Sequence[Array], names: Sequence[str]) -> Callable[[], Tensors]:
        """Begin to move the arrays (those of the slab, or the engine's; `names` are their dtypes).

        The result is called on the consumer's thread: tensors that may be used on its current stream.
        """

    def close(self) -> None:
        """Free what is idle."""


def staging(device: torch.device, *, budget_bytes: int) -> Staging:
    """The staging for a device. ValueError if it is neither the CPU nor CUDA."""
    if device.type == "cpu":
        return HostStaging()
    if device.type == "cuda":
        return CudaStaging(device, budget_bytes=budget_bytes)
    raise ValueError(f"device is {device}: the loader serves cpu and cuda; read to cpu and copy yourself")


class HostStaging:
    """Tensors over the engine's memory, which goes back to its pool when the last of them dies."""

    widens_late = False
    hits = misses = 0

    def take(self, full: Sequence[Layout]) -> Slab | None:
        """None: the engine's pool does it."""
        return None

    def send(self, slab: Slab | None, arrays: Sequence[Array], names: Sequence[str]) -> Callable[[], Tensors]:
        """The arrays as they are."""
        tensors = [as_torch(array, name) for array, name in zip(arrays, names, strict=True)]
        return lambda: tensors

    def close(self) -> None:
        """Nothing is held."""


def cut(memory: torch.Tensor, full: Sequence[Layout]) -> Slab:
    """Cut a CPU tensor of bytes into arrays of these dtypes and full shapes; see `slab_bytes`."""
    arrays: list[Array] = []
    offsets: list[int] = []
    at = 0
    flat = memory.numpy()
    for dtype, shape in full:
        nbytes = row_bytes(dtype, shape)
        arrays.append(
            from_buffer(flat[at : at + nbytes].data, dtype, shape)
            if nbytes
            else np.empty(shape, numpy_dtype(dtype))
        )
        offsets.append(at)
        at += -(-nbytes // _ALIGN) * _ALIGN
    return Slab(memory, arrays, offsets, at)


def slab_bytes(full: Sequence[Layout]) -> int:
    """How many bytes `cut` needs."""
    return sum(-(-row_bytes(dtype, shape) // _ALIGN) * _ALIGN for dtype, shape in full)


def views(flat: torch.Tensor, slab: Slab, names: Sequence[str]) -> Tensors:
    """The arrays of a slab as tensors over a copy of its bytes, wherever that is."""
    out = []
    for array, at, name in zip(slab.arrays, slab.offsets, names, strict=True):
        dtype = getattr(torch, name)
        nbytes = math.prod(array.shape) * dtype.itemsize
        out.append(flat[at : at + nbytes].view(dtype).view(array.shape))
    return out


def _slab_size(nbytes: int) -> int:
    """Few sizes, so that slabs fit again: powers of two from 1 MiB, multiples of 64 MiB above that."""
    if nbytes > _LARGE:
        return -(-nbytes // _LARGE) * _LARGE
    return max(1 << 20, 1 << (nbytes - 1).bit_length())


class _Idle(NamedTuple):
    memory: torch.Tensor
    copied: Any
    """The event after the copy out of it; None if there was none."""


class PinnedPool:
    """Pinned slabs, each free again once the copy out of it is done. Used by the reader's thread only."""

    def __init__(self, limit: int, allocate: Callable[[int], torch.Tensor]) -> None:
        self._limit, self._allocate = limit, allocate
        self._idle: list[_Idle] = []
        self.hits = self.misses = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """At least `nbytes` of pinned memory that no copy reads any more."""
        size = _slab_size(nbytes)
        for i, idle in enumerate(self._idle):
            if idle.memory.numel() == size and (idle.copied is None or idle.copied.query()):
                self.hits += 1
                return self._idle.pop(i).memory
        self.misses += 1
        return self._allocate(size)

    def give(self, memory: torch.Tensor, copied: Any) -> None:
        """Take a slab back; it is used again when the event `copied` has completed. At most the limit is kept."""
        self._idle.append(_Idle(memory, copied))
        while len(self._idle) > 1 and sum(idle.memory.numel() for idle in self._idle) > self._limit:
            oldest = self._idle.pop(0)
            if oldest.copied is not None:
                oldest.copied.synchronize()  # its memory must outlive the copy

    def close(self) -> None:
        """Wait for the copies and free all."""
        for idle in self._idle:
            if idle.copied is not None:
                idle.copied.synchronize()
        self._idle.clear()


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class CudaStaging:
    """Pinned slabs, one copy per micro-batch on a stream of our own, ordered before the consumer by an event."""

    widens_late = True

    def __init__(self, device: torch.device, *, budget_bytes: int) -> None:
        # Threads have a current device each: without an index the reader's would be the first one.
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = PinnedPool(budget_bytes, _pinned)

    @property
    def hits(self) -> int:
        """How often a slab was reused."""
        return self._pool.hits

    @property
    def misses(self) -> int:
        """How often one was made."""
        return self._pool.misses

    def take(self, full: Sequence[Layout]) -> Slab:
        """A pinned slab."""
        with torch.cuda.device(self._device):
            return cut(self._pool.take(slab_bytes(full)), full)

    def send(self, slab: Slab | None, arrays: Sequence[Array], names: Sequence[str]) -> Callable[[], Tensors]:
        """Copy the slab's bytes; the consumer's stream waits for the event after them."""
        assert slab is not None, "arrays for a device lie in a slab"
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            flat = torch.empty(slab.nbytes, dtype=torch.uint8, device=self._device)
            flat.copy_(slab.memory[: slab.nbytes], non_blocking=True)
            copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        self._pool.give(slab.memory, copied)

        def receive() -> Tensors:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            # The bytes were allocated on our stream: they may not be reused before this one is done with them.
            flat.record_stream(current)
            return views(flat, slab, names)

        return receive

    def close(self) -> None:
        """Wait for the copies, free the slabs."""
        self._pool.close()
