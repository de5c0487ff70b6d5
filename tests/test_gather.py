"""Reading rows, against a plain numpy model, with real files."""

from __future__ import annotations

import itertools
import json
import struct
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prime_io.segment import FieldSpec, PayloadSegment, clip, end_to_end, result_layout, shift
from prime_io.store import Gather, PayloadStore
from prime_io.tensors import as_torch

DTYPES = ["uint8", "uint16", "int64"]


@pytest.fixture(scope="module", params=["threads", "uring"])
def store(request, tmp_path_factory):
    try:
        store = PayloadStore(tmp_path_factory.mktemp("store"), engine=request.param)
    except OSError as e:
        pytest.skip(f"no io_uring here: {e.strerror}")
    with store:
        yield store


def expected(parts, lo, hi, dtype, row, fill):
    """`parts` are (segment, all rows of its tensor, index of its first row in them)."""
    blank = np.zeros(row, dtype)
    blank[...] = np.arange(row[-1] if row else 1) if fill == "spread" else fill
    rows = np.broadcast_to(blank, (hi - lo, *row)).copy()
    valid = np.zeros(hi - lo, bool)
    winner = {}
    for s, tensor, first in parts:
        for i in range(s.rows):
            if lo <= s.pos + i < hi:
                winner[s.pos + i - lo] = (s, tensor[first + i])
    for at, (s, data) in winner.items():
        rows[(at, *map(slice, s.shape))] = data
        valid[at] = True
    return rows, valid


@st.composite
def pieces(draw):
    """Tensors of one field, and for each the rows kept of it and the token of its first row."""
    rank = draw(st.integers(0, 2))
    out = []
    for _ in range(draw(st.integers(1, 5))):
        rows = draw(st.integers(0, 7))
        row = tuple(draw(st.integers(0, 4)) for _ in range(rank))
        first, end = sorted(draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
        out.append((rows, row, draw(st.sampled_from(DTYPES)), first, end, draw(st.integers(0, 10))))
    return out


def written(store, pieces, seed=0):
    rng = np.random.default_rng(seed)
    tensors = [rng.integers(0, 200, (rows, *row)).astype(dtype) for rows, row, dtype, *_ in pieces]
    parts = []
    for result, tensor, (*_, first, end, pos) in zip(
        store.write_many([{"x": t, "other": t} for t in tensors], version=0), tensors, pieces, strict=True
    ):
        for s in shift(clip([result["x"]], first, end), pos):
            parts.append((s, tensor, first))
    return parts


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces(),
    st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted),
    st.sampled_from([0, 7, "spread"]),
    st.sampled_from([None, "int64"]),
    st.booleans(),
)
def test_gather_is_what_numpy_says(store, pieces, lo_hi, fill, wanted, verify):
    """Promise: overlaps, gaps, fills, mixed widths and ragged row shapes come out as in the plain model."""
    lo, hi = lo_hi
    parts = written(store, pieces)
    if not parts:
        return
    segments = [s for s, _, _ in parts]
    dtype, row = result_layout(segments, lo, hi, dtype=wanted)
    want, covered = expected(parts, lo, hi, dtype, row, fill)
    options = {"fill": fill, "dtype": wanted, "verify": verify}
    rows, valid = store.gather(segments, "x", lo, hi, **options)
    assert rows.dtype == want.dtype and rows.shape == want.shape and valid.dtype == bool
    np.testing.assert_array_equal(valid, covered)
    np.testing.assert_array_equal(rows, want)
    # Into the caller's memory: shaped for the rows, with room to spare, and as plain bytes.
    exact = np.full_like(want, 99)
    wide = np.full((hi - lo + 2, *(n + 1 for n in row)), 99, np.int64)
    wide_want, _ = expected(parts, lo, hi, "int64", wide.shape[1:], fill)
    raw = bytearray(b"\x63" * (want.nbytes + 3))
    requests = [
        Gather(segments=iter(segments), field="x", lo=lo, hi=hi, out=o, fill=fill) for o in (exact, wide)
    ]
    requests.append(Gather(segments=segments, field="x", lo=lo, hi=hi, out=raw, fill=fill, dtype=wanted))
    for result, target in zip(
        store.gather_many(requests, verify=verify), (want, wide_want, want), strict=True
    ):
        np.testing.assert_array_equal(result[0], target)
        np.testing.assert_array_equal(result[1], covered)
    np.testing.assert_array_equal(exact, want)
    np.testing.assert_array_equal(wide[: hi - lo], wide_want)
    assert (wide[hi - lo :] == 99).all()
    assert raw == want.tobytes() + b"ccc"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), max_size=8), st.integers(0, 8), st.data()),
        min_size=1,
        max_size=3,
    ),
    st.tuples(st.integers(0, 16), st.integers(0, 16)).map(sorted),
)
def test_ragged_rows_follow_their_counts(store, turns, lo_hi):
    """Promise: after clips and shifts every token still has its own rows, and later counts win."""
    lo, hi = lo_hi
    fields = {"r": FieldSpec(ragged=True)}
    segments, per_token = [], {}
    for i, (counts, pos, data) in enumerate(turns):
        values = np.arange(sum(counts) * 2, dtype=np.float32).reshape(-1, 2) + 100 * i
        made = store.write({"r.counts": np.array(counts, np.uint8), "r.values": values}, version=1)
        a, b = sorted(data.draw(st.tuples(st.integers(0, len(counts)), st.integers(0, len(counts)))))
        segments += shift(
            clip(made.values(), a, b, fields=fields), pos - a if pos < a else pos, fields=fields
        )
        moved = pos - a if pos < a else pos
        ends = np.cumsum([0, *counts])
        per_token.update({t + moved: values[ends[t] : ends[t + 1]] for t in range(a, b)})
    got = store.gather_ragged(segments, "r", lo, hi, verify=True)
    want = [per_token.get(t, np.empty((0, 2), np.float32)) for t in range(lo, hi)]
    np.testing.assert_array_equal(got.counts, [len(w) for w in want])
    np.testing.assert_array_equal(got.valid, [t in per_token for t in range(lo, hi)])
    np.testing.assert_array_equal(got.values, np.concatenate([np.empty((0, 2), np.float32), *want]))


def test_free_rows_are_read_end_to_end(store):
    """Promise: the pixel patches of all turns come out one after the other."""
    turns = [np.arange(n * 3, dtype=np.float16).reshape(n, 3) for n in (2, 0, 5)]
    segments = end_to_end(store.write({"pixels": t}, version=0)["pixels"] for t in turns)
    rows, valid = store.gather(segments, "pixels", 0, 7)
    np.testing.assert_array_equal(rows, np.concatenate(turns))
    assert valid.all()


def test_scalars_and_zero_rows(store):
    """Promise: a tensor without axes is one row; one without rows reads as none, of its shape and dtype."""
    made = store.write(
        {"s": np.float32(1.5), "z": np.empty((0, 3), np.int16), "e": np.empty((4, 0))}, version=0
    )
    assert (made["s"].rows, made["s"].shape) == (1, ())
    assert store.read(made["s"]).tolist() == [1.5]
    zero = store.read(made["z"])
    assert zero.shape == (0, 3) and zero.dtype == np.int16
    rows, valid = store.gather([made["z"]], "z", 0, 2, fill=5)
    assert rows.tolist() == [[5] * 3] * 2 and not valid.any()
    rows, valid = store.gather([made["e"]], "e", 2, 6)
    assert rows.shape == (4, 0) and valid.tolist() == [True, True, False, False]
    rows, valid = store.gather([made["s"]], "s", 0, 0)
    assert rows.shape == (0,) and valid.shape == (0,)


def test_without_segments_out_says_the_shape(store):
    """Promise: a field that a sample lacks is filled where `out` has a place for it, else one error."""
    out = np.ones((3, 2), np.uint16)
    rows, valid = store.gather([], "x", 4, 7, out=out, fill="spread")
    assert out.tolist() == [[0, 1]] * 3 and not valid.any() and np.shares_memory(rows, out)
    with pytest.raises(ValueError, match="no segment of 'x'"):
        store.gather([], "x", 0, 3)


def test_fills_that_do_not_fit_are_refused(store):
    """Promise: a fill is stored exactly or refused."""
    made = store.write({"x": np.zeros((2, 300), np.uint8), "f": np.zeros(2, np.float32)}, version=0)
    for fill, field, match in [
        (-1, "x", "fill -1 does not fit into uint8"),
        (0.5, "x", "fill 0.5 does not fit"),
        ("spread", "x", "distinct"),
        ("spread", "f", "distinct"),
    ]:
        with pytest.raises(ValueError, match=match):
            store.gather([made[field]], field, 0, 5, fill=fill)
    rows, _ = store.gather([made["f"]], "f", 1, 3, fill=float("nan"))
    assert np.isnan(rows[1]) and rows[0] == 0


def test_bad_destinations_are_refused(store):
    """Promise: read-only, strided, short, narrow or wrongly typed destinations are refused and told why."""
    s = store.write({"x": np.ones((4, 2), np.uint16)}, version=0)["x"]
    frozen = np.zeros((4, 2), np.uint16)
    frozen.flags.writeable = False
    for out, match in [
        (frozen, "read-only"),
        (bytes(16), "read-only"),
        (np.zeros((4, 4), np.uint16)[:, ::2], "strided"),
        (np.zeros((4, 2), np.uint16, order="F"), "strided"),
        (memoryview(bytearray(32))[::2], "strided"),
        (bytearray(15), "too short"),
        (np.zeros((3, 2), np.uint16), "does not hold 4 rows"),
        (np.zeros((4, 1), np.uint16), "do not hold"),
        (np.zeros((4, 2), np.float32), "does not hold the uint16"),
        (np.zeros((4, 2), ">u2"), "big-endian"),
        (np.zeros((4, 2), object), "not one of the format"),
        (np.uint16(1), "does not hold 4 rows"),
    ]:
        with pytest.raises(ValueError, match=match):
            store.gather([s], "x", 0, 4, out=out)
    with pytest.raises(TypeError, match="list"):
        store.gather([s], "x", 0, 4, out=[0] * 8)


def test_types_that_numpy_lacks(store):
    """Promise: bf16 and fp8 rows go into arrays of their bits too, and their fills are rounded, not cut."""
    ml = pytest.importorskip("ml_dtypes")
    for name, bits in [("bfloat16", np.uint16), ("float8_e4m3fn", np.uint8), ("float8_e5m2", np.uint8)]:
        data = np.arange(6).reshape(3, 2).astype(getattr(ml, name))
        s = store.write({"x": data}, version=0)["x"]
        for fill in (0, 1.0, -0.3, 3.14159, 1.00390625, 1e-8, float("inf") if name != "float8_e4m3fn" else 2):
            want = np.concatenate([data, np.full((1, 2), fill).astype(np.float32).astype(data.dtype)])
            out = np.zeros((4, 2), bits)
            rows, _ = store.gather([s], "x", 0, 4, fill=fill, out=out)
            np.testing.assert_array_equal(out, want.view(bits))
            assert rows.dtype == data.dtype
            empty = np.zeros((1, 2), bits)
            store.gather([], "x", 0, 1, fill=fill, out=empty, dtype=name)
            np.testing.assert_array_equal(empty, want[3:].view(bits))
    s = store.write({"x": np.zeros((3, 2), np.int16)}, version=0)["x"]
    with pytest.raises(ValueError, match="does not hold the int16"):
        store.gather([s], "x", 0, 3, out=np.zeros((3, 2), np.uint16))
    with pytest.raises(ValueError, match="not one of the format"):
        store.gather([], "x", 0, 3, out=np.zeros((3, 2), np.uint16), dtype="half")


def test_torch_destinations(store):
    """Promise: PyTorch CPU tensors of any dtype are filled in place, bf16 and fp8 too."""
    torch = pytest.importorskip("torch")
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.bool, torch.int64):
        source = torch.arange(12).reshape(4, 3).to(dtype)
        s = store.write({"x": source}, version=0)["x"]
        out = torch.zeros((4, 3), dtype=dtype)
        rows, valid = store.gather([s], "x", 0, 4, out=out, verify=True)
        assert torch.equal(out.view(torch.uint8), source.view(torch.uint8)) and valid.all()
        assert np.shares_memory(rows, out.view(torch.uint8).numpy())
        fresh = as_torch(store.read(s), s.dtype)
        assert fresh.dtype == dtype and torch.equal(fresh.view(torch.uint8), source.view(torch.uint8))
    ids = store.write({"x": torch.ones((2, 3), dtype=torch.uint8)}, version=0)["x"]
    out = torch.zeros((2, 3), dtype=torch.int32)
    store.gather([ids], "x", 0, 2, out=out)
    assert out.eq(1).all()
    with pytest.raises(ValueError, match="strided"):
        store.gather([ids], "x", 0, 2, out=torch.zeros((3, 2), dtype=torch.uint8).T)
    with pytest.raises(ValueError, match="meta"):
        store.gather([ids], "x", 0, 2, out=torch.zeros((2, 3), dtype=torch.uint8, device="meta"))


def test_a_failed_request_does_not_stop_the_others(store):
    """Promise: a batch has one result per request; a missing file is an answer, not an exception."""
    good = store.write({"x": np.arange(3)}, version=0)["x"]
    gone = PayloadSegment("x", "v0/gone.safetensors", 4096, 0, 3, "int64", ())
    bad = PayloadSegment("x", good.file, -1, 0, 3, "int64", ())
    requests = [Gather(segments=[s], field="x", lo=0, hi=3) for s in (good, gone, bad, good)]
    first, second, third, fourth = store.gather_many(requests)
    assert first[0].tolist() == fourth[0].tolist() == [0, 1, 2]
    assert isinstance(second, FileNotFoundError) and second.filename
    assert isinstance(third, ValueError)
    assert store.gather_many([]) == []
    # A file that no row comes from need not be there.
    rows, _ = store.gather([gone, good], "x", 0, 3)
    assert rows.tolist() == [0, 1, 2]


def test_results_outlive_the_store_and_are_their_own(tmp_path):
    """Promise: fresh results own their memory, are writable, and do not change when it is used again."""
    with PayloadStore(tmp_path) as store:
        s = store.write({"x": np.arange(100_000)}, version=0)["x"]
        first = store.read(s)
        first[:] = 7
        others = [store.read(s) for _ in range(4)]
    assert (first == 7).all() and all((o == np.arange(100_000)).all() for o in others)
    views = [o[5:7] for o in others]
    del others
    assert all(v.tolist() == [5, 6] for v in views)


def sparse(store, name, items, item="U8"):
    """A valid safetensors file with one tensor of zeros that takes no room on disk."""
    width = {"U8": 1, "U16": 2}[item]
    header = json.dumps({"x": {"dtype": item, "shape": [items], "data_offsets": [0, items * width]}}).encode()
    header += b" " * (4088 - len(header))
    path = f"{store.root}/v0/{name}"
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header)
        f.truncate(4096 + items * width)
    return path


def test_offsets_beyond_2_gib(store):
    """Promise: positions and offsets are 64 bit throughout."""
    store.write({"x": np.zeros(1)}, version=0)
    n = 5 << 30
    path = sparse(store, "far.safetensors", n)
    marks = [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 5, n - 1]
    with open(path, "r+b") as f:
        for i, at in enumerate(marks):
            f.seek(4096 + at)
            f.write(bytes([i + 1]))
    [s] = store.segments("v0/far.safetensors").values()
    assert (s.rows, s.offset) == (n, 4096)
    for i, at in enumerate(marks):
        rows, valid = store.gather([s], "x", at, at + 1)
        assert rows.tolist() == [i + 1] and valid.all()
        moved = shift(clip([s], at, at + 1), 2**40 - at)
        assert store.gather(moved, "x", 2**40, 2**40 + 1)[0].tolist() == [i + 1]


@pytest.mark.skipif(sys.maxsize < 2**32, reason="needs a 64-bit address space")
def test_one_read_beyond_2_gib(tmp_path):
    """Promise: one read of more than 2 GiB is exact, though the kernel returns at most 2 GiB at a time."""
    store = PayloadStore(tmp_path)
    store.write({"x": np.zeros(1)}, version=0)
    n = 2**31 + 2**20 + 3
    path = sparse(store, "long.safetensors", n)
    marks = [0, 1, 2**31 - 4097, 2**31 - 4096, 2**31, n - 1]
    with open(path, "r+b") as f:
        for i, at in enumerate(marks):
            f.seek(4096 + at)
            f.write(bytes([i + 1]))
    [s] = store.segments("v0/long.safetensors").values()
    rows = store.read(s)
    assert rows.shape == (n,)
    assert np.flatnonzero(rows).tolist() == marks
    assert rows[marks].tolist() == list(range(1, 7))


def test_many_small_segments(store):
    """Promise: a sample of thousands of turns is one crossing and comes out exact."""
    made = store.write({"x": np.arange(6000, dtype=np.uint16).reshape(3000, 2)}, version=0)["x"]
    order = np.random.default_rng(0).permutation(3000).tolist()
    segments = list(
        itertools.chain.from_iterable(
            shift(clip([made], i, i + 1), at - i) for at, i in enumerate(order) if at >= i
        )
    )
    segments += itertools.chain.from_iterable(
        shift(clip([made], i, i + 1), at - i) for at, i in enumerate(order) if at < i
    )
    rows, valid = store.gather(segments, "x", 0, 3000)
    assert valid.all()
    np.testing.assert_array_equal(rows, np.arange(6000).reshape(3000, 2)[order])
