"""Reading rows: what a request asks of the engine, and what becomes of the answer.

The users of this module are `PayloadStore.gather` and its siblings; what is promised is said there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from prime_io import _native
from prime_io._native import CorruptPayloadError
from prime_io.segment import (
    ITEMSIZE,
    PayloadSegment,
    ragged_pairs,
    result_layout,
    row_bytes,
    visible,
    widens,
)
from prime_io.tensors import EXTENDED, destination, fill_item, from_buffer, layout

__all__ = ["Array", "Gather", "Ragged", "Valid", "gather_many", "gather_ragged"]

Array = npt.NDArray[Any]
Valid = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """One request of `PayloadStore.gather_many`: the parameters of `PayloadStore.gather`, and `shape`."""

    segments: Iterable[PayloadSegment]
    field: str
    lo: int
    hi: int
    out: object = None
    fill: float | Literal["spread"] = 0
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    """Row shape of a fresh result of `dtype`, in place of the least one that fits; both or neither."""


class Ragged(NamedTuple):
    """The rows of a ragged field."""

    counts: npt.NDArray[np.int64]
    """int64[hi - lo]: how many rows of `values` each token has; 0 where none are known."""
    values: Array
    """[counts.sum(), *row_shape]: the rows of all tokens, one token after the other."""
    valid: Valid
    """bool[hi - lo]: which tokens are covered by a segment."""


def gather_many(
    native: _native.Store, requests: Iterable[Gather], *, verify: bool
) -> list[tuple[Array, Valid] | Exception]:
    """One crossing: (rows, valid) per request, or what it met. See `PayloadStore.gather_many`."""
    results: list[tuple[Array, Valid] | Exception | None] = []
    plans: list[_Plan] = []
    for request in requests:
        try:
            plans.append(_Plan(request, at=len(results)))
            results.append(None)
        except (ValueError, TypeError) as e:
            results.append(e)
    if plans:
        answers = native.gather([plan.native() for plan in plans], verify=verify)
        for plan, answer in zip(plans, answers, strict=True):
            if isinstance(answer, Exception):
                results[plan.at] = plan.explain(answer)
            else:
                results[plan.at] = plan.wrap(*answer)
    return [r for r in results if r is not None]


def gather_ragged(
    native: _native.Store,
    segments: Iterable[PayloadSegment],
    field: str,
    lo: int,
    hi: int,
    *,
    dtype: str | None,
    verify: bool,
) -> Ragged:
    """Two crossings: the counts, then the values. See `PayloadStore.gather_ragged`."""
    own = [s for s in segments if s.field in (f"{field}.counts", f"{field}.values")]
    if not 0 <= lo <= hi:
        raise ValueError(f"rows [{lo}, {hi}) are no range: 0 <= lo <= hi must hold")
    owner = np.full(hi - lo, -1, np.int64)
    counts = [s for s in own if s.field == f"{field}.counts"]
    pairs = ragged_pairs(own, field)
    for i, c in enumerate(counts):
        owner[max(c.pos - lo, 0) : max(c.pos + c.rows - lo, 0)] = i
    asked = [i for i in np.unique(owner).tolist() if i >= 0]
    whole = [pairs[i].counts for i in asked]
    requests = [Gather(segments=[c], field=c.field, lo=0, hi=c.rows) for c in whole]
    known = gather_many(native, requests, verify=verify)
    result = np.zeros(hi - lo, np.int64)
    ends: dict[int, npt.NDArray[np.int64]] = {}
    for i, answer in zip(asked, known, strict=True):
        if isinstance(answer, Exception):
            raise answer
        c, pair = counts[i], pairs[i]
        sums = _running_sum(answer[0], pair.values)
        ends[i] = sums
        mine = np.flatnonzero(owner == i)
        rows = mine + (lo - c.pos + pair.skipped)
        result[mine] = sums[rows + 1] - sums[rows]
    parts: list[PayloadSegment] = []
    total = 0
    cuts = np.flatnonzero(np.diff(owner, prepend=-2, append=-2)).tolist()
    for first, end in pairwise(cuts):
        i = int(owner[first])
        if i < 0:
            continue
        v, row = pairs[i].values, first + lo - counts[i].pos + pairs[i].skipped
        begin, stop = int(ends[i][row]), int(ends[i][row + end - first])
        offset = v.offset + begin * row_bytes(v.dtype, v.shape)
        parts.append(msgspec.structs.replace(v, offset=offset, pos=total, rows=stop - begin))
        total += stop - begin
    valid: Valid = owner >= 0
    if not parts:
        parts = [msgspec.structs.replace(s, pos=0, rows=0) for s in own if s.field == f"{field}.values"]
    request = Gather(segments=parts, field=f"{field}.values", lo=0, hi=total, dtype=dtype)
    [values] = gather_many(native, [request], verify=verify)
    if isinstance(values, Exception):
        raise values
    return Ragged(result, values[0], valid)


class _Plan:
    """A checked request on its way through the engine."""

    def __init__(self, request: Gather, *, at: int) -> None:
        lo, hi, out = request.lo, request.hi, request.out
        if not 0 <= lo <= hi < 2**63:
            raise ValueError(f"rows [{lo}, {hi}) of {request.field!r} are no range: 0 <= lo <= hi must hold")
        self.at = at
        own = [s for s in request.segments if s.field == request.field]
        self.lo, self.hi = lo, hi
        # Segments that are alike in type and shape, as nearly always, leave the rest to the engine: it finds
        # out which rows are hidden, and checks the arithmetic.
        self.request, self.alike = (
            request,
            request.out is None and request.dtype is None and _alike(own, lo, hi),
        )
        if self.alike:
            self.dtype, self.row, self.segments = own[0].dtype, own[0].shape, own
        else:
            self.dtype, self.row = _result(request, own)
            self.segments = visible(own, lo, hi)
        nbytes = (hi - lo) * row_bytes(self.dtype, self.row)
        self.fill = None if request.fill == "spread" else fill_item(request.fill, self.dtype)
        self.out = None if out is None else destination(out, nbytes)

    def native(
        self,
    ) -> tuple[list[PayloadSegment], int, int, str, tuple[int, ...], bytes | None, memoryview | None, None]:
        """The request as `_native.Store.gather` takes it."""
        return self.segments, self.lo, self.hi, self.dtype, self.row, self.fill, self.out, None

    def explain(self, error: Exception) -> Exception:
        """What is wrong with the segments in the words of `segment.check`, which name field and file."""
        if self.alike and isinstance(error, ValueError) and not isinstance(error, CorruptPayloadError):
            try:
                _result(self.request, self.segments)
            except ValueError as known:
                return known
        return error

    def wrap(self, rows: _native.Slab | None, valid: _native.Slab | None) -> tuple[Array, Valid]:
        """The arrays over what `_native.Store.gather` gave back."""
        assert valid is not None
        if rows is None:
            assert self.out is not None
            array = from_buffer(self.out, self.dtype, (self.hi - self.lo, *self.row))
        else:
            array = from_buffer(rows, self.dtype, (self.hi - self.lo, *self.row))
        return array, from_buffer(valid, "bool", (self.hi - self.lo,))


def _alike(segments: Sequence[PayloadSegment], lo: int, hi: int) -> bool:
    """Whether all are of one dtype and row shape, and some row of them is in [lo, hi)."""
    if not segments:
        return False
    dtype, shape = segments[0].dtype, segments[0].shape
    if dtype not in ITEMSIZE or any(s.dtype != dtype or s.shape != shape for s in segments):
        return False
    return any(s.rows > 0 and s.pos < hi and s.pos + s.rows > lo for s in segments)


def _result(request: Gather, segments: Sequence[PayloadSegment]) -> tuple[str, tuple[int, ...]]:
    """dtype and row shape of the result: those of the segments, or of an `out` that is shaped for it."""
    field, lo, hi = request.field, request.lo, request.hi
    if request.out is None and request.shape is not None and request.dtype is not None:
        return _fitting(request, segments, request.dtype, request.shape)
    if request.out is None:
        if segments:
            return result_layout(segments, lo, hi, dtype=request.dtype)
        raise ValueError(
            f"no segment of {field!r} to take the row shape from: pass an `out` array of the wanted shape"
        )
    name, shape = layout(request.out)
    if segments and name == "uint8" and len(shape) == 1:
        return result_layout(segments, lo, hi, dtype=request.dtype)  # plain bytes
    if not shape or shape[0] < hi - lo:
        raise ValueError(f"out is too short: its shape {shape} does not hold {hi - lo} rows of {field!r}")
    return _fitting(request, segments, name, shape[1:])


def _fitting(
    request: Gather, segments: Sequence[PayloadSegment], name: str, row: tuple[int, ...]
) -> tuple[str, tuple[int, ...]]:
    """A wanted dtype and row shape, if they hold those of the segments."""
    field = request.field
    if segments:
        dtype, least = result_layout(segments, request.lo, request.hi, dtype=request.dtype)
    else:
        dtype, least = request.dtype or name, row
    bits = f"uint{8 * row_bytes(dtype, ())}"
    if dtype in EXTENDED and name == bits:
        name = dtype
    if not widens(dtype, name):
        raise ValueError(
            f"a result of dtype {name} was asked for, which does not hold the {dtype} of {field!r}"
        )
    if len(row) != len(least) or any(n < m for n, m in zip(row, least, strict=True)):
        raise ValueError(
            f"a result with rows of shape {row} was asked for, which do not hold the {least} of {field!r}"
        )
    return name, row


def _running_sum(counts: Array, values: PayloadSegment) -> npt.NDArray[np.int64]:
    """[0, counts[0], counts[0] + counts[1], ...], none of which exceeds the rows of the values."""
    if len(counts) and (counts.min() < 0 or counts.max() > values.rows):
        asked = int(counts.min() if counts.min() < 0 else counts.max())
    else:
        sums = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, dtype=np.int64, out=sums[1:])
        # Each count fits, so that a sum that overflows is less than the one before it.
        if sums[-1] <= values.rows and (np.diff(sums) >= 0).all():
            return sums
        asked = int(counts.sum(dtype=object))
    raise CorruptPayloadError(
        f"{values.file}: the counts ask for {asked} rows of {values.field!r}, which has {values.rows}"
    )
