"""Packing: sequences from lengths, and rows of packed samples against plain numpy."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_io import FieldSpec, Gather, PayloadSegment, PayloadStore, shift
from prime_io.packing import Item, Packed, check_sample, lay, pack
from prime_io.types import StoredSample


@given(
    lengths=st.lists(st.integers(0, 24), max_size=40),
    multiple=st.sampled_from([1, 2, 8]),
    ranks=st.integers(1, 4),
)
def test_every_sample_is_packed_once(lengths: list[int], multiple: int, ranks: int) -> None:
    """Every sample is trained once, no sequence is too long, and all ranks get equally many."""
    dealt = pack(lengths, seq_len=24, multiple=multiple, ranks=ranks)
    assert len(dealt) == ranks and len({len(hand) for hand in dealt}) == 1 and dealt[0]
    seen = []
    for packed in (p for hand in dealt for p in hand):
        assert packed.length % multiple == 0 and 0 < packed.length <= 24
        assert packed.tokens <= packed.length < packed.tokens + multiple or packed.tokens == 0
        end = 0
        for slot in packed.slots:
            assert (slot.start, slot.n_tokens) == (end, lengths[slot.sample])
            end += slot.n_tokens
        assert end == packed.tokens
        seen += [slot.sample for slot in packed.slots]
    assert sorted(seen) == list(range(len(lengths)))
    assert dealt == pack(list(lengths), seq_len=24, multiple=multiple, ranks=ranks)


def test_ranks_are_about_equally_loaded() -> None:
    """No rank gets all the long sequences: they are dealt there and back."""
    dealt = pack([8, 7, 6, 5, 4, 3, 2, 1], seq_len=8, ranks=2)
    tokens = [sum(p.tokens for p in hand) for hand in dealt]
    assert max(tokens) - min(tokens) <= 4 and sum(tokens) == 36


def test_what_does_not_fit_is_an_error() -> None:
    """A sample longer than a sequence, or a padding that does not divide it, is refused before anything is read."""
    with pytest.raises(ValueError, match="sample 1 has 9 tokens"):
        pack([3, 9], seq_len=8)
    with pytest.raises(ValueError, match="positive multiple"):
        pack([3], seq_len=9, multiple=2)


def test_sequence_boundaries_and_positions() -> None:
    """Positions begin anew with every sample and with the padding; boundaries name each of them."""
    [[packed]] = pack([3, 2], seq_len=8, multiple=8)
    assert packed.cu_seqlens().tolist() == [0, 3, 5, 8]
    assert packed.position_ids(0, 8).tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert packed.position_ids(4, 6).tolist() == [1, 0]
    [[full]] = pack([2, 0, 2], seq_len=4)
    assert full.cu_seqlens().tolist() == [0, 2, 4, 4] and full.position_ids(0, 4).tolist() == [0, 1, 0, 1]
    dummy = pack([4], seq_len=4, multiple=2, ranks=2)[1]
    assert dummy == [Packed((), 0, 2)] and dummy[0].cu_seqlens().tolist() == [0, 2]


@pytest.fixture(scope="module")
def store() -> Iterator[PayloadStore]:
    with tempfile.TemporaryDirectory() as root, PayloadStore(Path(root) / "payloads", owner=True) as opened:
        yield opened


def oracle(
    arrays: Sequence[np.ndarray], packed: Packed, lengths: Sequence[int], spec: FieldSpec
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a packed sequence by a loop over its rows."""
    fill = np.arange(2) if spec.fill == "spread" else np.full(2, spec.fill)
    rows = np.tile(fill.astype(np.uint8), (packed.length, 1))
    valid = np.zeros(packed.length, bool)
    for slot in packed.slots:
        n = lengths[slot.sample]
        for i in range(n):
            j = i + spec.shift
            if 0 <= j < (n - 1 if spec.align == "token-1" else n):
                rows[slot.start + i], valid[slot.start + i] = arrays[slot.sample][j], True
    return rows, valid


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_packed_rows_equal_numpy(store: PayloadStore, data: Any) -> None:
    """A field packed by shift and clip is what numpy makes of the arrays: never a neighbour's row."""
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    spec = FieldSpec(
        align=data.draw(st.sampled_from(["token", "token-1"])),
        shift=data.draw(st.integers(-2, 2)),
        fill=data.draw(st.sampled_from([0, 7, "spread"])),
    )
    short = spec.align == "token-1"
    arrays, segments = [], []
    for i, n in enumerate(lengths):
        rows = np.random.default_rng(i).integers(10, 250, (n - short, 2), np.uint8)
        cut = data.draw(st.integers(0, len(rows)))
        own: list[PayloadSegment] = []
        for lo, hi in ((0, cut), (cut, len(rows))):
            own += shift(store.write({"x": rows[lo:hi]}, version=0).values(), lo)
        arrays.append(rows)
        segments.append(own)
    multiple = data.draw(st.sampled_from([1, 4]))
    for packed in pack(lengths, seq_len=12, multiple=multiple)[0]:
        laid = [
            s
            for slot in packed.slots
            for s in lay(segments[slot.sample], "x", spec, n_tokens=slot.n_tokens, start=slot.start)
        ]
        want_rows, want_valid = oracle(arrays, packed, lengths, spec)
        lo = data.draw(st.integers(0, packed.length))
        hi = data.draw(st.integers(lo, packed.length))
        for first, end in ((0, packed.length), (lo, hi)):
            near = [s for s in laid if s.pos < end and s.pos + s.rows > first]
            request = Gather(
                segments=near, field="x", lo=first, hi=end, fill=spec.fill, dtype="uint8", shape=(2,)
            )
            [answer] = store.gather_many([request])
            assert not isinstance(answer, Exception), answer
            np.testing.assert_array_equal(answer[0], want_rows[first:end])
            np.testing.assert_array_equal(answer[1], want_valid[first:end])


@pytest.mark.parametrize(
    ("align", "rows", "fine"),
    [
        ("token", 5, True),
        ("token", 4, False),
        ("token", 6, False),
        ("token-1", 4, True),
        ("token-1", 5, True),  # a sample that was cut to seq_len: the last row is passed over
        ("token-1", 3, False),
        ("token-1", 6, False),
    ],
)
@pytest.mark.parametrize("ragged", [False, True])
def test_rows_must_be_those_of_the_tokens(align: Any, rows: int, fine: bool, ragged: bool) -> None:
    """A field off by rows would train on a neighbour's data: an error that names the trace."""
    spec = FieldSpec(align=align, ragged=ragged)
    name, dtype = ("x.counts", "int32") if ragged else ("x", "uint8")
    payload = [PayloadSegment(name, "v0/a.safetensors", 4096, 0, rows, dtype, ())]
    if ragged:
        payload.append(PayloadSegment("x.values", "v0/a.safetensors", 8192, 0, 9, "uint8", ()))
    item = Item("trace-7", 0, StoredSample(5, {}, payload))
    if fine:
        check_sample(item, {"x": spec})
        return
    with pytest.raises(ValueError, match=r"trace trace-7.*'x' has rows up to \d for 5 tokens"):
        check_sample(item, {"x": spec})


def test_gaps_and_absence() -> None:
    """A hole in the middle is an error like a missing end; no rows at all are one only where they are required."""
    parts = [PayloadSegment("x", "v0/a.safetensors", 4096, pos, 2, "uint8", ()) for pos in (0, 3)]
    with pytest.raises(ValueError, match="or a gap"):
        check_sample(Item("t", 0, StoredSample(5, {}, parts)), {"x": FieldSpec()})
    nothing = Item("t", 0, StoredSample(5, {}, []))
    check_sample(nothing, {"x": FieldSpec(required=False), "p": FieldSpec(align="free", required=False)})
    for spec in (FieldSpec(), FieldSpec(align="free")):
        with pytest.raises(ValueError, match="trace t"):
            check_sample(nothing, {"x": spec})
