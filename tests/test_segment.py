"""The row algebra of segments, against a plain model: which byte of which file is the row of a token."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_io import segment as sg
from prime_io.segment import FieldSpec, PayloadSegment

ROW = 6  # bytes: uint16 x 3


def seg(field="x", file="v0/a", offset=4096, pos=0, rows=10, dtype="uint16", shape=(3,), checksum="c"):
    return PayloadSegment(field, file, offset, pos, rows, dtype, shape, checksum)


def model(segments, field="x"):
    """token -> (file, byte of its row); later segments win."""
    rows = {}
    for s in segments:
        if s.field == field:
            width = sg.row_bytes(s.dtype, s.shape)
            rows.update({s.pos + i: (s.file, s.offset + i * width) for i in range(s.rows)})
    return rows


@st.composite
def segments(draw, *, max_size=8):
    """Segments of two fields in two files; those of one file are rows of one tensor per field."""
    out = []
    for _ in range(draw(st.integers(0, max_size))):
        first = draw(st.integers(0, 12))
        out.append(
            seg(
                field=draw(st.sampled_from("xy")),
                file=draw(st.sampled_from(["v0/a", "v1/b"])),
                offset=4096 + first * ROW,
                # Mostly at the position that continues its neighbours, so that some of them join.
                pos=first + draw(st.sampled_from([0, 0, 0, 1, 5])),
                rows=draw(st.integers(0, 8)),
            )
        )
    return out


def window(n=24):
    return st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted)


@given(segments(), window())
def test_clip_keeps_exactly_the_rows_of_the_window(items, lo_hi):
    """Promise: clip keeps the rows of tokens [lo, hi), each still at its byte, and nothing else."""
    lo, hi = lo_hi
    got = sg.clip(items, lo, hi)
    for field in "xy":
        want = {t: at for t, at in model(items, field).items() if lo <= t < hi}
        assert model(got, field) == want
    assert all(lo <= s.pos and s.pos + s.rows <= hi and s.rows > 0 for s in got)
    assert all(s.checksum == "c" for s in got)


@given(segments(), st.integers(0, 9), window())
def test_shift_moves_every_row(items, delta, lo_hi):
    """Promise: shift moves tokens only, and clip then shift back is where the rows were."""
    moved = sg.shift(items, delta)
    for field in "xy":
        assert model(moved, field) == {t + delta: at for t, at in model(items, field).items()}
    assert sg.shift(moved, -delta) == items
    lo, hi = lo_hi
    rebased = sg.shift(sg.clip(items, lo, hi), -lo)
    assert model(rebased) == {t - lo: at for t, at in model(items).items() if lo <= t < hi}


def test_shift_refuses_to_lose_rows():
    """Promise: a row never moves below token 0 silently."""
    with pytest.raises(ValueError, match=r"'x' in 'v0/a'.*clip"):
        sg.shift([seg(pos=3)], -4)
    with pytest.raises(ValueError, match=r"2\*\*63"):
        sg.shift([seg(pos=2**63 - 20)], 15)


@given(segments(), window(), st.sampled_from(["token", "token-1"]), st.integers(-2, 2))
def test_covers_says_whether_every_needed_row_is_there(items, lo_hi, align, shift):
    """Promise: covers is true exactly if each row that the tokens of a sample read is held."""
    lo, hi = lo_hi
    spec = FieldSpec(align=align, shift=shift)
    exist = range(lo, hi - 1 if align == "token-1" else hi)
    want = {t + shift for t in range(lo, hi)} & set(exist)
    first, end = sg.needed(spec, lo, hi)
    assert set(range(first, end)) == want
    assert sg.covers(items, "x", lo, hi, fields={"x": spec}) == (want <= model(items).keys())
    assert sg.covers(items, "x", lo, hi) == (set(range(lo, hi)) <= model(items).keys())


def test_covers_free_and_ragged_fields():
    """Promise: a free field is covered by any segment of it, a ragged one by counts that have values."""
    fields = {"p": FieldSpec(align="free"), "r": FieldSpec(ragged=True)}
    items = [seg("p", pos=0, rows=1), seg("r.counts", rows=5, dtype="uint16", shape=()), seg("r.values")]
    assert sg.covers(items, "p", 0, 99, fields=fields)
    assert not sg.covers(items[1:], "p", 0, 0, fields=fields)
    assert sg.covers(items, "r", 0, 5, fields=fields)
    assert not sg.covers(items, "r", 0, 6, fields=fields)
    assert not sg.covers(items[:2], "r", 0, 5, fields=fields)
    elsewhere = [items[1], seg("r.values", file="v0/b")]
    assert not sg.covers(elsewhere, "r", 0, 5, fields=fields)


@given(segments())
def test_coalesce_changes_no_row(items):
    """Promise: coalesce changes no row and its winner, adds no segment and is finished after one pass."""
    got = sg.coalesce(items)
    for field in "xy":
        assert model(got, field) == model(items, field)
    assert len(got) <= len(items)
    assert sg.coalesce(got) == got


@given(st.lists(st.integers(0, 10), max_size=4))
def test_coalesce_joins_what_clip_cut(cuts):
    """Promise: the parts of a segment, one after the other, are the segment again."""
    whole = seg(rows=10)
    cuts = sorted({0, 10, *cuts})
    parts = [p for lo, hi in itertools.pairwise(cuts) for p in sg.clip([whole], lo, hi)]
    assert sg.coalesce(parts) == [whole]
    assert sg.coalesce([seg(checksum="c"), seg(offset=4096 + 10 * ROW, pos=10, checksum="d")]) != [
        seg(rows=20)
    ]


FIELDS = {"p": FieldSpec(align="free"), "r": FieldSpec(ragged=True)}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=10), st.data())
def test_ragged_values_are_found_after_any_clips_and_shifts(counts, data):
    """Promise: clipped and shifted counts still know which rows of the values are theirs."""
    n = len(counts)
    tokens = list(range(n))  # which token of the file is at which position
    c = [
        PayloadSegment("r.counts", "v0/a", 4096 + 64, 0, n, "uint16", ()),
        PayloadSegment("r.values", "v0/a", 8192, 0, sum(counts), "float32", (2,)),
    ]
    for _ in range(data.draw(st.integers(0, 4))):
        lo, hi = sorted(data.draw(st.tuples(st.integers(0, len(tokens)), st.integers(0, len(tokens)))))
        c = sg.shift(sg.clip(c, lo, hi, fields=FIELDS), -lo, fields=FIELDS)
        tokens = tokens[lo:hi]
    pairs = sg.ragged_pairs(c, "r")
    assert len(pairs) == (1 if tokens else 0)
    assert c[-1].rows == sum(counts) and c[-1].offset == 8192
    for pair in pairs:
        assert pair.counts.offset == 4096 + 64 and pair.values.offset == 8192
        assert pair.skipped == tokens[0]
        assert pair.counts.rows == tokens[-1] + 1
    assert sg.coalesce(c + c, fields=FIELDS)[-1] == c[-1]


def test_ragged_pairs_refuses_what_it_cannot_resolve():
    """Promise: counts without values, ambiguous values or counts that are no counts are ValueErrors."""
    counts = PayloadSegment("r.counts", "v0/a", 4096, 3, 5, "uint8", ())
    values = PayloadSegment("r.values", "v0/a", 8192, 3, 5, "float32", ())
    assert sg.ragged_pairs([counts, values, values], "r")[0].skipped == 0
    for items, match in [
        ([counts], "not among"),
        ([counts, msgspec.structs.replace(values, pos=4)], "not among"),
        ([counts, values, msgspec.structs.replace(values, offset=0)], "two"),
        ([counts, msgspec.structs.replace(values, pos=-5000)], "before the file"),
        ([msgspec.structs.replace(counts, shape=(2,)), values], "count nothing"),
        ([msgspec.structs.replace(counts, dtype="float32"), values], "count nothing"),
    ]:
        with pytest.raises(ValueError, match=match):
            sg.ragged_pairs(items, "r")


def test_free_fields_ignore_clip_and_shift():
    """Promise: pixel patches do not follow tokens; end to end they are the field's rows in order."""
    items = [seg("p", rows=4), seg("p", file="v0/b", rows=3), seg("x", rows=4)]
    got = sg.shift(sg.clip(items, 2, 3, fields=FIELDS), -2, fields=FIELDS)
    assert got[:2] == items[:2] and got[2] == seg("x", offset=4096 + 2 * ROW, pos=0, rows=1)
    assert sg.coalesce(items[:1] * 2, fields=FIELDS) == items[:1] * 2
    assert [(s.file, s.pos) for s in sg.end_to_end(items[:2])] == [("v0/a", 0), ("v0/b", 4)]
    with pytest.raises(ValueError, match="'p' and 'x'"):
        sg.end_to_end(items)


def test_files_names_each_once_in_order():
    """Promise: files is what must be held for these segments."""
    items = [seg(file="v1/b"), seg(file="v0/a"), seg("y", file="v1/b")]
    assert sg.files(items) == ["v1/b", "v0/a"]


@given(segments(), window(), st.data())
def test_result_layout_is_that_of_the_rows_that_are_read(items, lo_hi, data):
    """Promise: widest dtype and greatest row shape over the segments that win some row of the window."""
    lo, hi = lo_hi
    items = [
        seg(s.field, s.file, i << 20, s.pos, s.rows, *data.draw(st.sampled_from(LAYOUTS)))
        for i, s in enumerate(s for s in items if s.field == "x")
    ]
    if not items:
        return
    winner = {}
    for i, s in enumerate(items):
        winner.update(dict.fromkeys(range(max(s.pos, lo), min(s.pos + s.rows, hi)), i))
    read = [items[i] for i in sorted(set(winner.values()))] or items
    dtype, shape = sg.result_layout(items, lo, hi)
    assert shape == tuple(map(max, *(s.shape for s in read))) if len(read) > 1 else read[0].shape
    assert dtype == max((s.dtype for s in read), key=["uint8", "uint16", "int64"].index)


LAYOUTS = [(d, s) for d in ("uint8", "uint16", "int64") for s in ((1, 2), (2, 1), (2, 3))]


def test_result_layout_refuses_what_does_not_mix():
    """Promise: values never change silently, and a shape that no row backs is not believed."""
    for items, match in [
        ([], "no segments"),
        ([seg(dtype="float16"), seg(dtype="float32", pos=10)], "float16, float32"),
        ([seg(dtype="int16"), seg(dtype="uint16", pos=10)], "int16, uint16"),
        ([seg(shape=(3,)), seg(shape=(3, 1), pos=10)], "different axes"),
        ([seg(rows=0, shape=(10**9,))], "claims rows of 2000000000 bytes"),
        ([seg(pos=100, shape=(10**9,))], "claims rows"),
    ]:
        with pytest.raises(ValueError, match=match):
            sg.result_layout(items, 0, 20)
    hidden = [seg(shape=(10**12,)), seg(rows=20)]
    assert sg.result_layout(hidden, 0, 20) == ("uint16", (3,))
    assert sg.result_layout([seg(rows=0)], 0, 5) == ("uint16", (3,))
    assert sg.result_layout([seg()], 0, 5, dtype="uint32") == ("uint32", (3,))
    with pytest.raises(ValueError, match="does not fit into uint8"):
        sg.result_layout([seg()], 0, 5, dtype="uint8")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"offset": -1}, "offset is -1"),
        ({"rows": -1}, "rows is -1"),
        ({"pos": -1}, "pos is -1"),
        ({"offset": 2**63 - 10}, r"2\*\*63"),
        ({"pos": 2**63 - 10}, r"2\*\*63"),
        ({"rows": 2**62}, r"2\*\*63"),
        ({"rows": 2**64 - 1}, r"2\*\*63"),
        ({"shape": (2**40, 2**40)}, r"2\*\*63"),
        ({"shape": (-1,)}, "non-negative"),
        ({"shape": (1.5,)}, "non-negative"),
        ({"dtype": "uint12"}, "not one of the format"),
        ({"dtype": ">u2"}, "big-endian"),
        ({"dtype": "float128"}, "not one of the format"),
        ({"dtype": ""}, "not one of the format"),
        ({"offset": "0"}, "segment of 'x'"),
    ],
)
def test_arithmetic_is_checked_first(change, match):
    """Promise: what cannot be is a ValueError that names field and file, in every function."""
    bad = msgspec.structs.replace(seg(), **change)
    for use in (
        sg.check,
        sg.byte_range,
        lambda s: sg.clip([s], 0, 5),
        lambda s: sg.coalesce([s]),
        lambda s: sg.result_layout([s], 0, 5),
        lambda s: sg.shift([s], 1),
    ):
        if use is sg.byte_range and "pos" in change and change["pos"] < 0:
            continue
        with pytest.raises(ValueError, match=match) as e:
            use(bad)
        assert "'x'" in str(e.value) and "'v0/a'" in str(e.value)
    for lo, hi in [(-1, 3), (3, 2), (0, 2**63)]:
        with pytest.raises(ValueError, match="no range"):
            sg.clip([seg()], lo, hi)


def test_specs_are_checked_at_construction():
    """Promise: a wrong FieldSpec fails where it is written down, not during training."""
    for kwargs in [
        {"align": "tokens"},
        {"fill": "sprad"},
        {"align": "free", "shift": 1},
        {"align": "free", "ragged": True},
        {"dtype": "float"},
    ]:
        with pytest.raises(ValueError):
            FieldSpec(**kwargs)


def test_wire_form_is_an_array_of_seven_or_eight():
    """Promise: seven-field segments of other frameworks decode here, and ours is the same plus a checksum."""
    plain = ["x", "v0/a", 4096, 0, 10, "uint16", [3]]
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=PayloadSegment)
    assert decoded == seg(checksum="")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(seg())) == [*plain, "c"]


def test_large_lists_take_linear_time():
    """Promise: the algebra is linear: 100,000 segments take seconds, not hours."""
    n = 100_000
    items = [seg(offset=4096 + i * ROW * 2, pos=2 * i, rows=2, file=f"v0/{i % 7}") for i in range(n)]
    began = time.perf_counter()
    assert len(sg.clip(items, n // 2, n)) == n // 4
    assert len(sg.shift(items, 1)) == len(sg.coalesce(items)) == n
    assert sg.covers(items, "x", 0, 2 * n) and len(sg.files(items)) == 7
    assert sg.result_layout(items, 0, 2 * n) == ("uint16", (3,))
    assert time.perf_counter() - began < 20


def test_the_module_stands_alone():
    """Promise: the row algebra needs msgspec only, so that any framework can take it alone."""
    code = (
        "import sys, importlib.util as u;"
        f"s = u.spec_from_file_location('segment', {str(Path(sg.__file__))!r});"
        "m = u.module_from_spec(s); sys.modules['segment'] = m; s.loader.exec_module(m);"
        "assert not {'numpy', 'torch', 'prime_io'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
