"""Segments: handles to consecutive rows of a payload field, and their row algebra.

Pure: no I/O, no numpy, usable alone. Everything takes and returns segments in any order of fields; order
matters only within a field, where later segments win over earlier ones (as in `PayloadStore.gather`).

How a field's rows relate to the tokens of its sample is said by a `FieldSpec`, handed to the functions as
`fields`, a mapping from field name to spec. A field that it does not name is one row per token.

- *token*: row i belongs to token i. `clip` and `shift` apply.
- *token-1*: likewise, but the last token has no row (it was sampled and never fed to the model).
- *free*: rows that do not follow the tokens (pixel patches). `clip` and `shift` leave them alone; their
  segments are read one after the other, see `end_to_end`.
- *ragged*: `F` is stored as `F.counts`, one integer per token, and `F.values`, the rows of all tokens one
  after the other. `counts` is clipped and shifted like any token field. `values` is never clipped, and its
  `pos` is not a row number but the token that its first row belongs to: it moves with `shift`, and may so
  become negative. A clipped `counts` therefore still finds its values: `counts.pos - values.pos` counts
  precede it in the same tensor, and their sum is how many rows of `values` to skip. Within one file, the
  `counts` segments of a ragged field do not overlap before they are clipped.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, Literal, NamedTuple

import msgspec

__all__ = [
    "ITEMSIZE",
    "FieldSpec",
    "PayloadSegment",
    "RaggedPair",
    "byte_range",
    "check",
    "clip",
    "coalesce",
    "covers",
    "end_to_end",
    "files",
    "needed",
    "ragged_pairs",
    "result_layout",
    "row_bytes",
    "shift",
    "visible",
    "whole_tensor",
    "widens",
]

ITEMSIZE: Final[Mapping[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
}
"""Bytes per item of every dtype of the format, by its numpy / ml_dtypes name."""

_MAX: Final = 2**63 - 1
_UNSIGNED: Final = ("uint8", "uint16", "uint32", "uint64")
_SIGNED: Final = ("int8", "int16", "int32", "int64")
_UNBACKED_ROW: Final = 1 << 20  # most bytes a row may claim when no row in the file stands behind it
_COUNTS: Final = ".counts"
_VALUES: Final = ".values"


class PayloadSegment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive rows of one field in one file of a store. A handle: making one does no I/O."""

    field: str
    """Name of the field, and of its tensor in the file."""
    file: str
    """Path of the file, relative to the store."""
    offset: int
    """First byte of the first row, from byte 0 of the file."""
    pos: int
    """The token (row of the sample) that the first row belongs to."""
    rows: int
    """Number of rows."""
    dtype: str
    """numpy / ml_dtypes name of the item type; little-endian."""
    shape: tuple[int, ...]
    """Shape of one row; `()` where a row is a single item."""
    checksum: str = ""
    """XXH3-64 of the tensor's block checksums as 16 hex digits; "" if there are none. It survives a clip."""


class FieldSpec(msgspec.Struct, frozen=True):
    """How the rows of a field relate to the tokens of a sample, and what stands in for missing ones."""

    align: Literal["token", "token-1", "free"] = "token"
    """Which tokens have a row: each, each but the last, or "free": rows do not follow tokens."""
    ragged: bool = False
    """Stored as `<field>.counts` and `<field>.values`: a varying number of rows per token."""
    shift: int = 0
    """Position i of the sample reads row i + shift (1: label-aligned)."""
    required: bool = True
    """A sample whose rows are gone is dropped; if not required, only the field is."""
    fill: int | float | Literal["spread"] = 0
    """Value of uncovered rows; "spread": distinct expert ids per row, so that no expert gets all padding."""
    dtype: str | None = None
    """Item type to widen to when gathered; None: the widest of the segments."""

    def __post_init__(self) -> None:
        if not isinstance(self.shift, int):
            raise TypeError(f"shift is {self.shift!r}: it counts rows")
        if self.align not in ("token", "token-1", "free"):
            raise ValueError(f'align is {self.align!r}; use "token", "token-1" or "free"')
        if isinstance(self.fill, str) and self.fill != "spread":
            raise ValueError(f'fill is {self.fill!r}; use a number or "spread"')
        if self.align == "free" and (self.ragged or self.shift):
            raise ValueError("a free field follows no tokens: it can be neither ragged nor shifted")
        if self.dtype is not None and self.dtype not in ITEMSIZE:
            raise ValueError(_dtype_problem(self.dtype))


class RaggedPair(NamedTuple):
    """The counts of some tokens and where their values are."""

    counts: PayloadSegment
    """All counts from the first one of the tensor on, so that their running sum finds any token's rows."""
    skipped: int
    """How many of those come before the rows that were asked for."""
    values: PayloadSegment
    """The values tensor (its `pos` is that of `counts`)."""


def check(segment: PayloadSegment, *, negative_pos: bool = False) -> int:
    """Check a segment's arithmetic; returns the number of bytes of one row.

    ValueError, naming field and file, for a negative or non-integer number, an end beyond 2**63 - 1, or a
    dtype that is unknown or big-endian. Nothing is known about the file itself after it. `negative_pos`
    admits the `values` of a ragged field.
    """
    try:
        width = row_bytes(segment.dtype, segment.shape)
        offset, pos, rows = segment.offset, segment.pos, segment.rows
        if offset < 0 or rows < 0 or (pos < 0 and not negative_pos):
            name = "offset" if offset < 0 else "rows" if rows < 0 else "pos"
            raise ValueError(f"{name} is {getattr(segment, name)}, below 0")
        if offset + rows * width > _MAX or pos + rows > _MAX or pos < -_MAX:
            raise ValueError(
                f"{rows} rows of {width} bytes from byte {offset} (pos {pos}) end beyond 2**63 - 1"
            )
    except (ValueError, TypeError) as e:
        raise ValueError(f"segment of {segment.field!r} in {segment.file!r}: {e}") from None
    return width


def whole_tensor(
    field: str, file: str, dtype: str, shape: tuple[int, ...], offset: int, checksum: str, *, pos: int = 0
) -> PayloadSegment:
    """The segment of a whole tensor of full `shape`; one without axes is a single row."""
    rows, row = (shape[0], shape[1:]) if shape else (1, ())
    return PayloadSegment(field, file, offset, pos, rows, dtype, row, checksum)


@lru_cache(maxsize=1024)
def row_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of one row of this item type and row shape. ValueError if there is no such row."""
    if dtype not in ITEMSIZE:
        raise ValueError(_dtype_problem(dtype))
    if any(not isinstance(n, int) or n < 0 for n in shape):
        raise ValueError(f"row shape {shape} is not one of non-negative integers")
    width = ITEMSIZE[dtype] * math.prod(shape)
    if width > _MAX:
        raise ValueError(f"a row of shape {shape} and dtype {dtype} exceeds 2**63 - 1 bytes")
    return width


def byte_range(segment: PayloadSegment) -> tuple[int, int]:
    """The bytes [first, end) of its file that a segment stands for. ValueError as in `check`."""
    return segment.offset, segment.offset + segment.rows * check(segment, negative_pos=True)


def clip(
    segments: Iterable[PayloadSegment], lo: int, hi: int, *, fields: Mapping[str, FieldSpec] | None = None
) -> list[PayloadSegment]:
    """Keep the rows of tokens [lo, hi). Positions stay; `shift(..., -lo)` makes them count from lo.

    Segments without such a row are dropped, others start and end at whole rows. Free fields and the values
    of ragged ones are kept as they are. ValueError unless 0 <= lo <= hi, and as in `check`.
    """
    _check_range(lo, hi)
    roles = _Roles(fields)
    out: list[PayloadSegment] = []
    for s in segments:
        role = roles[s.field]
        width = check(s, negative_pos=role == "values")
        if role != "rows":
            out.append(s)
            continue
        first, end = max(s.pos, lo), min(s.pos + s.rows, hi)
        if first >= end:
            continue
        if end - first == s.rows:
            out.append(s)
        else:
            out.append(_part(s, s.offset + (first - s.pos) * width, first, end - first))
    return out


def shift(
    segments: Iterable[PayloadSegment], delta: int, *, fields: Mapping[str, FieldSpec] | None = None
) -> list[PayloadSegment]:
    """Move rows by `delta` tokens. Free fields stay; the values of a ragged field move with its counts.

    ValueError if a row would move below token 0 (clip first) or beyond 2**63 - 1.
    """
    roles = _Roles(fields)
    out: list[PayloadSegment] = []
    for s in segments:
        role = roles[s.field]
        check(s, negative_pos=role == "values")
        if role == "free" or not delta:
            out.append(s)
            continue
        pos = s.pos + delta
        if (pos < 0 and role == "rows") or not -_MAX <= pos <= _MAX - s.rows:
            raise ValueError(
                f"segment of {s.field!r} in {s.file!r}: pos {s.pos} shifted by {delta} is not in [0, 2**63); "
                f"clip the segments to the tokens that stay first"
            )
        out.append(_part(s, s.offset, pos, s.rows))
    return out


def needed(spec: FieldSpec, lo: int, hi: int) -> tuple[int, int]:
    """The rows [first, end) of a field that tokens [lo, hi) of a sample of `hi - lo` tokens can read.

    `shift` moves the window; rows that the sample does not have (past its end; that of the last token of a
    "token-1" field) are not needed. Empty: first == end. Meaningless for free fields.
    """
    _check_range(lo, hi)
    end = max(lo, hi - 1) if spec.align == "token-1" else hi
    first, last = max(lo, lo + spec.shift), min(end, hi + spec.shift)
    return (first, last) if first < last else (lo, lo)


def covers(
    segments: Iterable[PayloadSegment],
    field: str,
    lo: int,
    hi: int,
    *,
    fields: Mapping[str, FieldSpec] | None = None,
) -> bool:
    """Whether the segments hold every row of `field` that tokens [lo, hi) need (see `needed`).

    For a ragged field: all of its counts, and values in each of their files. For a free field: any segment
    of it. Linear where the segments of a field come in order of `pos`.
    """
    spec = (fields or {}).get(field, _TOKEN)
    first, end = needed(spec, lo, hi)
    if spec.align == "free":
        return any(s.field == field for s in segments)
    name = field + _COUNTS if spec.ragged else field
    everything = list(segments)
    own = [s for s in everything if s.field == name and s.pos < end and s.pos + s.rows > first]
    if spec.ragged:
        with_values = {s.file for s in everything if s.field == field + _VALUES}
        own = [s for s in own if s.file in with_values]
    own.sort(key=lambda s: s.pos)
    for s in own:
        check(s)
        if s.pos > first:
            return False
        first = max(first, s.pos + s.rows)
    return first >= end


def coalesce(
    segments: Iterable[PayloadSegment], *, fields: Mapping[str, FieldSpec] | None = None
) -> list[PayloadSegment]:
    """Join each segment with the one before it of its field where both are one run of rows of one tensor.

    Overlaps join too; a segment of another tensor between two keeps them apart, so that later segments still
    win. Free fields stay as they are; of a ragged field's values only repetitions go.
    """
    roles = _Roles(fields)
    out: list[PayloadSegment] = []
    last: dict[str, int] = {}
    for s in segments:
        role = roles[s.field]
        width = check(s, negative_pos=role == "values")
        at = last.get(s.field)
        if at is not None and role != "free":
            before = out[at]
            if role == "values":
                if before == s:
                    continue
            elif _same_tensor(before, s):
                delta = s.pos - before.pos
                if 0 <= delta <= before.rows and s.offset - before.offset == delta * width:
                    rows = max(before.rows, delta + s.rows)
                    if rows > before.rows:
                        out[at] = _part(before, before.offset, before.pos, rows)
                    continue
        last[s.field] = len(out)
        out.append(s)
    return out


def files(segments: Iterable[PayloadSegment]) -> list[str]:
    """The files that the segments name, each once, in order of first appearance."""
    return list(dict.fromkeys(s.file for s in segments))


def end_to_end(segments: Iterable[PayloadSegment]) -> list[PayloadSegment]:
    """Give the segments of one free field the positions at which they follow each other, from 0.

    `gather(end_to_end(own), field, 0, sum(s.rows for s in own))` is then all of the field's rows. ValueError
    if the segments are of more than one field.
    """
    out: list[PayloadSegment] = []
    pos = 0
    for s in segments:
        if out and s.field != out[0].field:
            raise ValueError(f"segments of {out[0].field!r} and {s.field!r} do not follow each other")
        laid = _part(s, s.offset, pos, s.rows)
        check(laid)
        out.append(laid)
        pos += s.rows
    return out


def result_layout(
    segments: Sequence[PayloadSegment], lo: int, hi: int, *, dtype: str | None = None
) -> tuple[str, tuple[int, ...]]:
    """The item type and row shape into which rows [lo, hi) of the segments of one field fit.

    The widest dtype (only integers widen, and only to where every value fits) and the elementwise greatest
    row shape of the segments that are read for these rows, later segments winning; of all segments where
    none is. `dtype` asks for a wider one. ValueError if there are no segments, their dtypes do not mix, or
    their row shapes have different numbers of axes.
    """
    _check_range(lo, hi)
    if not segments:
        raise ValueError("no segments to take the row shape from: pass an `out` array of the wanted shape")
    widths = [check(s) for s in segments]
    chosen = visible(segments, lo, hi)
    if not chosen:
        # No row of a file backs these shapes: hold them to what a row plausibly is before any is allocated.
        chosen = list(segments)
        if hi > lo and max(widths) > _UNBACKED_ROW:
            s = segments[widths.index(max(widths))]
            raise ValueError(
                f"segment of {s.field!r} in {s.file!r} has no row in [{lo}, {hi}) and claims rows of "
                f"{max(widths)} bytes"
            )
    names = list(dict.fromkeys(s.dtype for s in chosen))
    if dtype is not None:
        if dtype not in ITEMSIZE:
            raise ValueError(_dtype_problem(dtype))
        names.append(dtype)
    widest = max(names, key=ITEMSIZE.__getitem__)
    if not all(widens(n, widest) for n in names):
        raise ValueError(
            f"{chosen[0].field!r} has dtypes {', '.join(dict.fromkeys(names))}: only integers are widened, "
            f"to where every value fits; convert the others when they are written"
        )
    if dtype is not None and widest != dtype:
        raise ValueError(f"{chosen[0].field!r} holds {widest}, which does not fit into {dtype}")
    shape = chosen[0].shape
    for s in chosen:
        if s.shape != shape:
            if len(s.shape) != len(shape):
                raise ValueError(
                    f"{s.field!r} has row shapes {shape} and {s.shape} ({s.file!r}): they have different axes"
                )
            shape = tuple(map(max, shape, s.shape))
    row_bytes(widest, shape)
    return widest, shape


def ragged_pairs(segments: Iterable[PayloadSegment], field: str) -> list[RaggedPair]:
    """Each `<field>.counts` segment, in order, with its `<field>.values`.

    The values are those of the same file whose `pos` is the greatest not above that of the counts. ValueError
    if there are none, if two different ones have that `pos`, or if the counts are no integers one per token.
    """
    counts: list[PayloadSegment] = []
    values: dict[str, list[PayloadSegment]] = {}
    for s in segments:
        if s.field == field + _COUNTS:
            counts.append(s)
        elif s.field == field + _VALUES:
            check(s, negative_pos=True)
            values.setdefault(s.file, []).append(s)
    pairs: list[RaggedPair] = []
    for c in counts:
        width = check(c)
        where = f"segment of {c.field!r} in {c.file!r}"
        if c.shape or "int" not in c.dtype:
            raise ValueError(
                f"{where}: {c.dtype} rows of shape {c.shape} count nothing; write integers, one a token"
            )
        candidates = [v for v in values.get(c.file, ()) if v.pos <= c.pos]
        if not candidates:
            raise ValueError(f"{where}: the file's {field + _VALUES!r} is not among the segments")
        best = max(candidates, key=lambda v: v.pos)
        if any(v.pos == best.pos and v != best for v in candidates):
            raise ValueError(f"{where}: two {field + _VALUES!r} segments begin at token {best.pos}")
        skipped = c.pos - best.pos
        offset = c.offset - skipped * width
        if offset < 0:
            raise ValueError(f"{where}: {skipped} counts before byte {c.offset} would begin before the file")
        pairs.append(
            RaggedPair(_part(c, offset, 0, c.rows + skipped), skipped, _part(best, best.offset, 0, best.rows))
        )
        check(pairs[-1].counts)
    return pairs


_TOKEN: Final = FieldSpec()


class _Roles(dict[str, Literal["rows", "free", "values"]]):
    """What clip and shift do with a field: "rows" both, "free" neither, "values" (ragged) only shift."""

    def __init__(self, fields: Mapping[str, FieldSpec] | None) -> None:
        self._fields = fields or {}

    def __missing__(self, field: str) -> Literal["rows", "free", "values"]:
        role: Literal["rows", "free", "values"] = "rows"
        spec = self._fields.get(field)
        if spec is not None:
            role = "free" if spec.align == "free" else "rows"
        elif field.endswith(_VALUES):
            spec = self._fields.get(field.removesuffix(_VALUES))
            role = "values" if spec is not None and spec.ragged else "rows"
        self[field] = role
        return role


def visible(segments: Sequence[PayloadSegment], lo: int, hi: int) -> list[PayloadSegment]:
    """The segments of which some row in [lo, hi) is not hidden by a later one."""
    at = lo
    for s in segments:
        if s.pos < at or s.rows == 0 or s.pos + s.rows > hi:
            break
        at = s.pos + s.rows
    else:
        return list(segments)  # one after the other, as nearly always
    starts, ends = ([lo], [hi]) if lo < hi else ([], [])  # ascending, disjoint: what is still uncovered
    out = []
    for s in reversed(segments):
        first, end = s.pos, s.pos + s.rows
        a, b = bisect_right(ends, first), bisect_left(starts, end)
        if a >= b or first >= end:
            continue
        out.append(s)
        left, right = starts[a], ends[b - 1]
        pieces = [(left, first)] * (left < first) + [(end, right)] * (end < right)
        starts[a:b] = [x for x, _ in pieces]
        ends[a:b] = [y for _, y in pieces]
    out.reverse()
    return out


def widens(dtype: str, to: str) -> bool:
    """Whether gather puts rows of one dtype into another: the same, or an integer that holds every value."""
    if dtype == to:
        return True
    signs = tuple("u" if n in _UNSIGNED else "i" if n in _SIGNED else "" for n in (dtype, to))
    return ITEMSIZE[dtype] < ITEMSIZE[to] and signs in (("u", "u"), ("u", "i"), ("i", "i"))


def _part(s: PayloadSegment, offset: int, pos: int, rows: int) -> PayloadSegment:
    return PayloadSegment(s.field, s.file, offset, pos, rows, s.dtype, s.shape, s.checksum)


def _same_tensor(a: PayloadSegment, b: PayloadSegment) -> bool:
    return a.file == b.file and a.dtype == b.dtype and a.shape == b.shape and a.checksum == b.checksum


def _check_range(lo: int, hi: int) -> None:
    if not 0 <= lo <= hi <= _MAX:
        raise ValueError(f"rows [{lo}, {hi}) are no range: 0 <= lo <= hi < 2**63 must hold")


def _dtype_problem(dtype: object) -> str:
    if isinstance(dtype, str) and dtype.startswith((">", "!")):
        return (
            f"dtype {dtype!r} is big-endian; payloads are little-endian, convert with .astype('<...') first"
        )
    return f"dtype {dtype!r} is not one of the format: {', '.join(ITEMSIZE)}"
