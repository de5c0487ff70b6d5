"""Reading one micro-batch: from a step's plan to tensors.

`fetch` runs on the reader's thread; what it returns is called on the consumer's.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from .device import Staging
from .failure import Failure
from .gather import Array, Gather, Ragged, Valid
from .microbatch import MicroBatch, PackedSample, Rows
from .packing import CORE, Layout, Packed, lay_free
from .segment import PayloadSegment, needed
from .stepplan import StepPlan
from .store import PayloadStore

_PACKING = ("position_ids", "cu_seqlens")


class FetchError(Exception):
    """A read that failed, in a form that the other ranks can be told."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Fetched:
    """A micro-batch that was read, perhaps still on its way to the device."""

    receive: Callable[[], MicroBatch]
    """Its tensors, ready for the caller's current stream."""
    nbytes: int
    """As it was read, in bytes."""


def fetch(plan: StepPlan, index: int, *, store: PayloadStore, staging: Staging, verify: bool) -> Fetched:
    """Read this rank's rows of sequence `index` of a step: ragged fields first, all else in one crossing.

    FetchError naming trace, field and file if anything cannot be read.
    """
    packed = plan.packed[index]
    lo, hi = plan.window(packed)
    # What the engine does not put into place: known already, or of a size that its counts decide.
    parts: dict[str, tuple[str, Array]] = {
        "position_ids": ("int32", packed.position_ids(lo, hi)),
        "cu_seqlens": ("int32", packed.cu_seqlens()),
    }
    requests: dict[str, Gather] = {}
    for name, own in _segments(plan, packed).items():
        spec, (dtype, row) = plan.specs[name], plan.layout(name, wide=not staging.widens_late)
        rows = (lo, hi)
        if spec.ragged:
            try:
                ragged = _ragged(store, own, name, lo, hi, layout=(dtype, row), verify=verify)
            except (OSError, ValueError) as error:
                raise _blame(error, plan, packed, name) from error
            parts[f"{name}.rows"] = (dtype, ragged.values)
            parts[f"{name}.counts"] = ("int64", ragged.counts)
            parts[f"{name}.valid"] = ("bool", ragged.valid)
            continue
        if spec.align == "free":
            own, counts = _free(plan, packed, name)
            rows = (0, sum(counts))
            parts[f"{name}.counts"] = ("int64", np.array(counts, np.int64))
        requests[name] = Gather(
            segments=own, field=name, lo=rows[0], hi=rows[1], fill=spec.fill, dtype=dtype, shape=row
        )
    slab = staging.take([*_layouts(requests), *((dtype, array.shape) for dtype, array in parts.values())])
    outs: Sequence[object] = slab.arrays[: 2 * len(requests) : 2] if slab else [None] * len(requests)
    asked = [replace(r, out=out) for r, out in zip(requests.values(), outs, strict=True)]
    gathered: dict[str, tuple[str, Array]] = {}
    for (name, request), answer in zip(requests.items(), _gather(store, asked, verify=verify), strict=True):
        if isinstance(answer, Exception):
            raise _blame(answer, plan, packed, name) from answer
        gathered[f"{name}.rows"] = (request.dtype or "", answer[0])
        gathered[f"{name}.valid"] = ("bool", answer[1])
    _scalar_advantages(plan, packed, gathered["advantages.rows"][1])
    parts = gathered | parts
    if slab:
        in_place = {f"{name}.rows" for name in requests}
        for place, (key, (_, array)) in zip(slab.arrays, parts.items(), strict=True):
            if key not in in_place and array.size:
                place.view(np.uint8)[...] = array.view(np.uint8)
    receive = staging.send(
        slab, [array for _, array in parts.values()], [dtype for dtype, _ in parts.values()]
    )
    return Fetched(
        lambda: _micro_batch(plan, index, dict(zip(parts, receive(), strict=True))),
        sum(array.nbytes for _, array in parts.values()),
    )


def _segments(plan: StepPlan, packed: Packed) -> dict[str, list[PayloadSegment]]:
    """Per field what is read for this rank's window of a sequence, at its place in it; what is lost left out."""
    segments: dict[str, list[PayloadSegment]] = {name: [] for name in plan.layouts}
    for slot in packed.slots:
        for name, own in plan.reads(slot, *plan.window(packed)):
            if name in segments:  # not a field of which no sample of the batch has a row
                segments[name] += own
    return segments


def _free(plan: StepPlan, packed: Packed, name: str) -> tuple[list[PayloadSegment], list[int]]:
    """A free field's segments end to end, and the rows of each sample. What is lost keeps its rows, unread."""
    each, counts = lay_free([plan.own(slot, name) for slot in packed.slots])
    kept = [own for slot, own in zip(packed.slots, each, strict=True) if not plan.is_lost(slot.sample, name)]
    return [s for own in kept for s in own], counts


def _ragged(
    store: PayloadStore,
    segments: Sequence[PayloadSegment],
    name: str,
    lo: int,
    hi: int,
    *,
    layout: Layout,
    verify: bool,
) -> Ragged:
    """A ragged field of the window; one without rows has its layout too. A stale handle as in `_gather`."""
    if segments:
        try:
            return store.gather_ragged(segments, name, lo, hi, dtype=layout[0], verify=verify)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        return store.gather_ragged(segments, name, lo, hi, dtype=layout[0], verify=verify)
    empty = Gather(segments=[], field=name, lo=0, hi=0, dtype=layout[0], shape=layout[1])
    [answer] = store.gather_many([empty])
    assert not isinstance(answer, Exception), "nothing is read"
    return Ragged(np.zeros(hi - lo, np.int64), answer[0], np.zeros(hi - lo, np.bool_))


def _layouts(requests: Mapping[str, Gather]) -> list[Layout]:
    """dtype and full shape of the rows and of the marks of each request."""
    full: list[Layout] = []
    for r in requests.values():
        assert r.dtype is not None and r.shape is not None, "every field of a step has a layout"
        full += [(r.dtype, (r.hi - r.lo, *r.shape)), ("bool", (r.hi - r.lo,))]
    return full


def _gather(
    store: PayloadStore, requests: Sequence[Gather], *, verify: bool
) -> list[tuple[Array, Valid] | Exception]:
    """As `store.gather_many`; requests that met a stale handle are tried once more, with files opened afresh."""
    answers = store.gather_many(requests, verify=verify)
    stale = [i for i, a in enumerate(answers) if isinstance(a, OSError) and a.errno == errno.ESTALE]
    if stale:
        for i, answer in zip(
            stale, store.gather_many([requests[i] for i in stale], verify=verify), strict=True
        ):
            answers[i] = answer
    return answers


def _blame(error: Exception, plan: StepPlan, packed: Packed, name: str) -> FetchError:
    """The error with the traces of this sequence whose files it names."""
    text = str(error)
    traces = [
        plan.items[slot.sample].trace_id
        for slot in packed.slots
        if any(s.file in text for s in plan.own(slot, name))
    ]
    who = f"trace {', '.join(dict.fromkeys(traces))}, " if traces else ""
    return FetchError(Failure.of(error, f"{who}field {name!r}"))


def _scalar_advantages(plan: StepPlan, packed: Packed, rows: Array) -> None:
    """Spread the advantage of samples that have one number for all tokens."""
    lo, _ = plan.window(packed)
    spec = plan.specs["advantages"]
    for slot in packed.slots:
        sample = plan.items[slot.sample].sample
        if sample.advantage is not None and slot.sample not in plan.masked:
            first, end = (slot.start + row - spec.shift for row in needed(spec, 0, slot.n_tokens))
            rows[max(first - lo, 0) : max(end - lo, 0)] = sample.advantage


def _micro_batch(plan: StepPlan, index: int, tensors: Mapping[str, torch.Tensor]) -> MicroBatch:
    packed = plan.packed[index]
    lo, hi = plan.window(packed)

    def rows(name: str) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, plan.layout(name, wide=True)[0])
        found = tensors[f"{name}.rows"]
        # Even a conversion to the same type gives the interpreter up, and waits for it again.
        return found if found.dtype == dtype else found.to(dtype)

    return MicroBatch(
        step=plan.batch.step,
        index=index,
        length=packed.length,
        lo=lo,
        hi=hi,
        samples=tuple(
            PackedSample(*plan.items[s.sample][:2], s.start, s.n_tokens, s.sample in plan.masked)
            for s in packed.slots
        ),
        **{name: rows(name) for name in CORE},
        **{name: tensors[name] for name in _PACKING},
        columns={name: rows(name) for name in plan.columns if name in plan.layouts and name not in CORE},
        payload={
            name: Rows(rows(name), tensors[f"{name}.valid"], tensors.get(f"{name}.counts"))
            for name in plan.fields
            if name in plan.layouts
        },
    )
