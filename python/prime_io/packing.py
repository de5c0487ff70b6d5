"""Micro-batches as plans: which samples lie where in which packed sequence, and which rows that makes.

Pure: no I/O, no payload bytes, no torch. Every rank computes the same plan by itself from the same batch.

A *packed sequence* is a run of samples one after the other, padded at its end. What lies where is decided by
`pack` from lengths alone; `lay` moves a sample's segments to its place by clip and shift, so that one gather
over the segments of all samples of a sequence reads a field straight into its final place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from .segment import FieldSpec, PayloadSegment, clip, covers, end_to_end, needed, result_layout, shift
from .types import StoredSample, TrainBatch

__all__ = [
    "CORE",
    "Item",
    "Layout",
    "Packed",
    "Slot",
    "check_sample",
    "items",
    "lay",
    "lay_free",
    "layouts",
    "pack",
]

CORE = {"token_ids": "int32", "mask": "bool", "logprobs": "float32", "advantages": "float32"}
"""The columns that every micro-batch has, and their dtypes; all are one item per token."""

Layout = tuple[str, tuple[int, ...]]
"""dtype name and row shape of a field."""


class Slot(NamedTuple):
    """A sample's place in a packed sequence."""

    sample: int
    """Which one: its index in the list of lengths, which is that of `items`."""
    start: int
    """Its first row in the sequence."""
    n_tokens: int
    """How many rows are its own."""


class Packed(NamedTuple):
    """One packed sequence. Rows [tokens, length) are padding; a dummy has no slots."""

    slots: tuple[Slot, ...]
    tokens: int
    length: int

    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """int32[k + 1]: where each sample begins and the last one ends, padding as one more sequence."""
        ends = [slot.start + slot.n_tokens for slot in self.slots]
        padding = [self.length] * (self.length > self.tokens)
        return np.array([0, *ends, *padding], np.int32)

    def position_ids(self, lo: int, hi: int) -> npt.NDArray[np.int32]:
        """int32[hi - lo]: each row's position in its own sample (or in the padding), for rows [lo, hi)."""
        rows = np.arange(lo, hi, dtype=np.int32)
        starts = self.cu_seqlens()[:-1]
        # The last sequence that begins at or before the row: an empty sample owns none.
        owner = np.searchsorted(starts, rows, side="right") - 1
        return rows - starts[owner]


class Item(NamedTuple):
    """A sample of a batch, with the trace it belongs to."""

    trace_id: str
    nth: int
    """Which sample of its trace."""
    sample: StoredSample

    def own(self, field: str, spec: FieldSpec) -> list[PayloadSegment]:
        """Its payload segments of one field (of a ragged one: counts and values)."""
        names = (f"{field}.counts", f"{field}.values") if spec.ragged else (field,)
        return [s for s in self.sample.payload if s.field in names]


def items(batch: TrainBatch) -> list[Item]:
    """The samples of a batch in order."""
    return [Item(t.trace_id, i, s) for t in batch.traces for i, s in enumerate(t.samples)]


def pack(lengths: Sequence[int], *, seq_len: int, multiple: int = 1, ranks: int = 1) -> list[list[Packed]]:
    """Put samples of these lengths into sequences of at most `seq_len` rows: one list per data-parallel rank.

    First fit, longest sample first. A sequence is padded to a `multiple`. All lists are equally long: where
    sequences do not suffice, dummies of `multiple` rows of padding do. The same for the same arguments.
    ValueError if a sample does not fit, or `seq_len` is no multiple of `multiple`.
    """
    if multiple < 1 or seq_len < 1 or seq_len % multiple or ranks < 1:
        raise ValueError(
            f"seq_len {seq_len} must be a positive multiple of the padding ({multiple}), ranks ({ranks}) positive"
        )
    bins: list[list[Slot]] = []
    used: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        n = lengths[i]
        if n > seq_len:
            raise ValueError(f"sample {i} has {n} tokens, more than seq_len {seq_len}")
        at = next((b for b, tokens in enumerate(used) if tokens + n <= seq_len), len(bins))
        if at == len(bins):
            bins.append([])
            used.append(0)
        bins[at].append(Slot(i, used[at], n))
        used[at] += n
    # Dealt in turns there and back, fullest first, so that ranks come out about equally loaded.
    order = sorted(range(len(bins)), key=lambda b: (-used[b], b))
    dealt: list[list[Packed]] = [[] for _ in range(ranks)]
    for turn in range(0, len(order), ranks):
        hands = dealt if turn // ranks % 2 == 0 else dealt[::-1]
        for hand, b in zip(hands, order[turn : turn + ranks], strict=False):
            hand.append(Packed(tuple(bins[b]), used[b], max(1, -(-used[b] // multiple)) * multiple))
    count = max(1, -(-len(bins) // ranks))
    for hand in dealt:
        hand.extend([Packed((), 0, multiple)] * (count - len(hand)))
    return dealt


def lay(
    segments: Iterable[PayloadSegment], field: str, spec: FieldSpec, *, n_tokens: int, start: int
) -> list[PayloadSegment]:
    """The segments of one field of a sample, at their rows in a sequence in which the sample begins at `start`.

    Row i of the sample comes from its row `i + spec.shift`. What lies outside of the sample, or has no row by
    `spec.align`, is not read: never a neighbour's row. Not for free fields, see `lay_free`.
    """
    fields = {field: spec}
    first, end = needed(spec, 0, n_tokens)
    return shift(clip(segments, first, end, fields=fields), start - spec.shift, fields=fields)


def lay_free(
    samples: Iterable[Sequence[PayloadSegment]],
) -> tuple[list[list[PayloadSegment]], list[int]]:
    """The segments of a free field of several samples, each sample's rows after those of the one before.

    Also how many rows each sample has.
    """
    each = [list(segments) for segments in samples]
    laid = iter(end_to_end([s for own in each for s in own]))
    return [[next(laid) for _ in own] for own in each], [sum(s.rows for s in own) for own in each]


def check_sample(item: Item, fields: Mapping[str, FieldSpec]) -> None:
    """ValueError, naming trace and field, unless the rows of each field are those that its spec promises.

    "token": one per token. "token-1": none for the last token, or one that is passed over (a sample cut to
    `seq_len` has it). A field that is not required may have no rows at all; a free one may have any number.
    """
    n = item.sample.n_tokens
    for field, spec in fields.items():
        own = item.own(field, spec)
        if not own and not spec.required:
            continue
        where = f"trace {item.trace_id}, sample {item.nth}"
        if spec.align == "free":
            if not own:
                raise ValueError(f"{where}: no rows of required field {field!r}")
            continue
        counted = f"{field}.counts" if spec.ragged else field
        rows = max((s.pos + s.rows for s in own if s.field == counted), default=0)
        allowed = (n,) if spec.align == "token" else (n - 1, n)
        whole = msgspec.structs.replace(spec, shift=0)
        if rows not in allowed or not covers(own, field, 0, n, fields={field: whole}):
            raise ValueError(
                f"{where}: {field!r} has rows up to {rows} for {n} tokens, or a gap before; "
                f"align={spec.align!r} means rows 0 to {allowed[0]}"
            )


def layouts(
    segments: Mapping[str, Iterable[PayloadSegment]], fields: Mapping[str, FieldSpec]
) -> dict[str, Layout]:
    """Per field the stored dtype and row shape into which all of the segments fit; fields without any are left out.

    ValueError, naming the field, if they do not mix, or do not widen to the dtype of the spec.
    """
    found: dict[str, Layout] = {}
    for field, own in segments.items():
        spec = fields.get(field, FieldSpec())
        # Without a row, no file stands behind a shape: only where nothing is multiplied by it does it count.
        kinds = list({(s.dtype, s.shape): s for s in own if s.rows or spec.ragged}.values())
        if kinds:
            found[field] = result_layout(kinds, 0, 0)
            result_layout(kinds, 0, 0, dtype=spec.dtype)
    return found
