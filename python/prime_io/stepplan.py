"""What a step reads: its samples, their packing, which of them are masked, the layout of every field."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec
import numpy as np

from .failure import Lost
from .packing import CORE, Item, Layout, Packed, Slot, check_sample, items, lay, layouts, pack
from .segment import FieldSpec, PayloadSegment, row_bytes
from .store import PayloadStore
from .types import TrainBatch

_COLUMN = FieldSpec()


class StepPlan:
    """What this rank reads for a batch. Pure but for `probe`.

    `fields` and `columns` are specs by name. ValueError naming the trace for a sample that does not fit its specs
    or is longer than `seq_len`: the same on every rank.
    """

    def __init__(
        self,
        batch: TrainBatch,
        *,
        fields: Mapping[str, FieldSpec],
        columns: Mapping[str, FieldSpec],
        seq_len: int,
        multiple: int,
        dp: tuple[int, int],
        cp: tuple[int, int],
    ) -> None:
        self.batch, self.items = batch, items(batch)
        self.fields, self.cp = fields, cp
        names = {name for item in self.items for name in item.sample.columns}
        self.columns = {name: columns.get(name, _COLUMN) for name in (*CORE, *sorted(names - CORE.keys()))}
        self.specs: dict[str, FieldSpec] = {**self.columns, **fields}
        if both := self.columns.keys() & fields.keys():
            raise ValueError(
                f"{sorted(both)} are payload fields and columns of batch {batch.step}: rename one"
            )
        for item in self.items:
            check_sample(item, fields)
            if item.sample.n_tokens > seq_len:
                raise ValueError(
                    f"trace {item.trace_id}, sample {item.nth}: {item.sample.n_tokens} tokens are more than "
                    f"seq_len {seq_len}; TrainSink(seq_len=...) cuts them"
                )
        lengths = [item.sample.n_tokens for item in self.items]
        self.packed = pack(lengths, seq_len=seq_len, multiple=multiple, ranks=dp[1])[dp[0]]
        self.masked: Collection[int] = frozenset()
        """Samples of which nothing is read."""
        self._gone: Collection[tuple[int, str]] = frozenset()
        self.layouts: dict[str, Layout] = {}

    def window(self, packed: Packed) -> tuple[int, int]:
        """The rows of a sequence that this context-parallel rank has."""
        rank, size = self.cp
        return packed.length * rank // size, packed.length * (rank + 1) // size

    def probe(self, store: PayloadStore) -> list[Lost]:
        """Look for everything that this rank will read; one entry per sample and field that is not whole.

        OSError naming trace, field and file where that cannot be told (EACCES, EIO, ELOOP, ESTALE).
        """
        asked: list[tuple[int, str, PayloadSegment]] = []
        for packed in self.packed:
            lo, hi = self.window(packed)
            for slot in packed.slots:
                for name, own in self.reads(slot, lo, hi):
                    asked += [(slot.sample, name, s) for s in own]
        segments = [s for _, _, s in asked]
        probe = store.probe(segments)
        try:
            probe.raise_errors(segments)
        except OSError as error:
            sample, name = next((i, name) for i, name, s in asked if s.file == error.filename)
            where = f"trace {self.items[sample].trace_id}, field {name!r}"
            raise OSError(error.errno, f"{where}: {error.strerror}", error.filename) from error
        lost: dict[tuple[int, str], Lost] = {}
        for i in np.flatnonzero(~probe.present).tolist():
            sample, name, s = asked[i]
            lost.setdefault((sample, name), Lost(sample, name, s.file, int(probe.errno[i])))
        return list(lost.values())

    def agree(self, lost: Iterable[Lost]) -> None:
        """Leave out what any rank found lost: a sample that lacks a required field, or an optional field of one.

        After it every rank has the same `masked` and the same `layouts`.
        """
        gone = {(one.sample, one.field) for one in lost}
        self.masked = frozenset(i for i, name in gone if self.specs[name].required)
        self._gone = gone
        every = [(i, name) for i in range(len(self.items)) for name in self.specs]
        kept = layouts(self._by_name(pair for pair in every if not self.is_lost(*pair)), self.specs)
        # No file stands behind the others' shapes; better than none where all of a field is lost.
        self.layouts = layouts(self._by_name(every), self.specs) | kept
        for name, dtype in CORE.items():
            self.layouts.setdefault(name, (dtype, ()))

    def is_lost(self, sample: int, name: str) -> bool:
        """Whether a field of a sample is left out."""
        return sample in self.masked or (sample, name) in self._gone

    def nbytes(self, packed: Packed, *, wide: bool) -> int:
        """The most bytes that this rank's rows of a sequence take, as stored or as they are handed out."""
        lo, hi = self.window(packed)
        total = 4 * (hi - lo + len(packed.slots) + 2)
        for name in self.layouts:
            spec, (dtype, row) = self.specs[name], self.layout(name, wide=wide)
            own = [s for slot in packed.slots for s in self.own(slot, name)]
            rows, marks = hi - lo, hi - lo
            if spec.align == "free":
                rows = sum(s.rows for s in own)
                marks = rows + 8 * len(packed.slots)
            elif spec.ragged:
                # What the counts say is not known before they are read; each value belongs to one count.
                rows, marks = sum(s.rows for s in own if s.field == f"{name}.values"), 9 * (hi - lo)
            total += rows * row_bytes(dtype, row) + marks
        return total

    def layout(self, name: str, *, wide: bool) -> Layout:
        """dtype and row shape of a field: as stored, or as it is handed out."""
        dtype, row = self.layouts[name]
        return (self.specs[name].dtype or dtype if wide else dtype), row

    def own(self, slot: Slot, name: str) -> list[PayloadSegment]:
        """A sample's segments of a payload field or column, where they are in the sample."""
        item = self.items[slot.sample]
        return _own(item, name, self.fields)

    def _by_name(self, pairs: Iterable[tuple[int, str]]) -> dict[str, list[PayloadSegment]]:
        """The segments that decide the layout of each field: of a ragged one, its values."""
        found: dict[str, list[PayloadSegment]] = {}
        for i, name in pairs:
            own = _own(self.items[i], name, self.fields)
            ragged = self.specs[name].ragged
            found.setdefault(name, []).extend(s for s in own if not ragged or s.field == f"{name}.values")
        return found

    def reads(self, slot: Slot, lo: int, hi: int) -> Iterator[tuple[str, list[PayloadSegment]]]:
        """Per field what is read of a sample for rows [lo, hi) of its sequence, at its place there."""
        for name, spec in self.specs.items():
            own = self.own(slot, name)
            if not own or self.is_lost(slot.sample, name):
                continue
            if spec.align == "free":
                yield name, own
                continue
            laid = lay(own, name, spec, n_tokens=slot.n_tokens, start=slot.start)
            rows = [s for s in laid if s.field != f"{name}.values" and s.pos < hi and s.pos + s.rows > lo]
            if rows:
                yield name, rows + [s for s in laid if spec.ragged and s.field == f"{name}.values"]


def _own(item: Item, name: str, fields: Mapping[str, FieldSpec]) -> list[PayloadSegment]:
    if name in fields:
        return item.own(name, fields[name])
    column = item.sample.columns.get(name)
    return [] if column is None else [msgspec.structs.replace(column, field=name)]
