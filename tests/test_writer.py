"""The streaming writer: what is appended is what is read, once it is published and never before."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers its names with numpy)
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_io import _native
from prime_io.segment import ITEMSIZE, FieldSpec, clip, coalesce, covers
from prime_io.store import PayloadStore
from prime_io.tensors import SAFETENSORS, numpy_dtype
from prime_io.writer import FILLER

HEADER = 64 << 10


@pytest.fixture
def store(tmp_path):
    with PayloadStore(tmp_path / "store", owner=True) as store:
        yield store


def in_version(store, version=0):
    """The names in a version directory."""
    directory = Path(store.root, f"v{version}")
    return sorted(p.name for p in directory.iterdir()) if directory.is_dir() else []


def bits(a):
    return np.ascontiguousarray(a).reshape(-1).view(np.uint8)


def random_rows(dtype, shape, seed):
    count = int(np.prod(shape)) * ITEMSIZE[dtype]
    data = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    return (data % 2 if dtype == "bool" else data).view(numpy_dtype(dtype)).reshape(shape)


def check_file(store, file, want):
    """The reference library finds these tensors, in a file with 64 KiB of header and 64-byte alignment."""
    data = Path(store.root, file).read_bytes()
    assert int.from_bytes(data[:8], "little") + 8 == HEADER
    found = dict(safetensors.deserialize(data))
    for name in [name for name in found if name.startswith(FILLER)]:
        filler = found.pop(name)
        assert filler["dtype"] == "U8" and 0 < len(filler["data"]) < 64 and not any(filler["data"])
    assert found.keys() == want.keys()
    for name, array in want.items():
        tensor = found[name]
        assert (tensor["dtype"], tuple(tensor["shape"])) == (SAFETENSORS[array.dtype.name], array.shape)
        assert tensor["data"] == bits(array).tobytes()
    for name, s in store.segments(file).items():
        assert s.offset % 64 == 0 or not want[name].size


append = st.tuples(
    st.sampled_from(["tokens", "logprobs", "routed.experts", "ß\n\"'"]),
    st.sampled_from(sorted(ITEMSIZE)),
    st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 40)),
        st.tuples(st.integers(0, 40), st.integers(0, 5), st.integers(1, 3)),
    ),
    st.integers(0, 2**32),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(append, min_size=1, max_size=25))
def test_any_appends_come_back(tmp_path_factory, appends):
    """Promise: whatever is appended is read back by handle and by the reference library, rows in order."""
    with PayloadStore(tmp_path_factory.mktemp("any") / "store") as store:
        wrote, number, rows = [], {}, {}
        with store.writer(version=3) as writer:
            for field, dtype, shape, seed in appends:
                array = random_rows(dtype, shape, seed)
                s = writer.append(field, array)
                assert (s.field, s.dtype, s.pos) == (field, dtype, rows.get(field, 0))
                assert (s.rows, *s.shape) == (shape or (1,))
                rows[field] = s.pos + s.rows
                wrote.append((s, f"{field}.{number.get(field, 0)}", array))
                number[field] = number.get(field, 0) + 1
        assert not any(".tmp" in name for name in in_version(store, 3))
        for s, _, array in wrote:
            got = store.read(s, verify=True)
            assert got.dtype == array.dtype and got.shape == (s.rows, *s.shape)
            np.testing.assert_array_equal(bits(got), bits(array))
        [file] = {s.file for s, _, _ in wrote}
        check_file(store, file, {name: array for _, name, array in wrote})
        assert set(store.segments(file)) == {name for _, name, _ in wrote}


def test_turns_are_one_run_of_token_rows(store):
    """Promise: a trace written turn by turn yields consecutive segments that gather, clip and cover as one."""
    rng = np.random.default_rng(0)
    turns = [rng.integers(0, 99, (n, 2), np.uint16) for n in (5, 1, 0, 17, 64)]
    with store.writer(version=0) as writer:
        segments = [writer.append("experts", turn) for turn in turns]
    assert [s.pos for s in segments] == [0, 5, 6, 6, 23]
    everything = np.concatenate(turns)
    rows, valid = store.gather(segments, "experts", 0, 87, verify=True)
    np.testing.assert_array_equal(rows, everything)
    assert valid.all() and covers(segments, "experts", 0, 87) and len(coalesce(segments)) >= 4
    rows, _ = store.gather(clip(segments, 3, 30), "experts", 3, 30, verify=True)
    np.testing.assert_array_equal(rows, everything[3:30])


def test_ragged_turns(store):
    """Promise: counts and values appended together belong together, in whatever file they are."""
    rng = np.random.default_rng(1)
    segments, counts, values = [], [], []
    with store.writer(version=0) as writer:
        for _ in range(700):
            counts.append(rng.integers(0, 3, rng.integers(1, 4), np.uint8))
            values.append(rng.standard_normal((int(counts[-1].sum()), 3), np.float32))
            turn = {"top.values": values[-1], "top.counts": counts[-1], "tokens": np.zeros(len(counts[-1]))}
            segments += writer.append_many(turn).values()
    total = sum(map(len, counts))
    assert len({s.file for s in segments}) > 1
    assert covers(segments, "top", 0, total, fields={"top": FieldSpec(ragged=True)})
    ragged = store.gather_ragged(segments, "top", 0, total, verify=True)
    np.testing.assert_array_equal(ragged.counts, np.concatenate(counts))
    np.testing.assert_array_equal(ragged.values, np.concatenate(values))


def test_a_full_header_begins_another_file(store):
    """Promise: thousands of appends work; a full file can be read before close, the last one only after it."""
    segments = []
    with store.writer(version=0) as writer:
        for n in range(3000):
            segments.append(writer.append("x", np.full(n % 5, n, np.int32)))
        last = segments[-1].file
        done = [s for s in segments if s.file != last]
        assert len(done) > 1000
        for s in done[::97]:
            assert (store.read(s, verify=True) == s.rows * [segments.index(s)]).all()
        with pytest.raises(FileNotFoundError):
            store.read(segments[-1])
    assert in_version(store) == sorted({s.file.removeprefix("v0/") for s in segments})
    wrote = {}
    for n, s in enumerate(segments):
        wrote.setdefault(s.file, {})[f"x.{n}"] = np.full(n % 5, n, np.int32)
    for file, want in wrote.items():
        check_file(store, file, want)
    rows, valid = store.gather(segments, "x", 0, 6000, verify=True)
    np.testing.assert_array_equal(rows, np.concatenate([np.full(n % 5, n) for n in range(3000)]))
    assert valid.all()


def test_large_arrays(store):
    """Promise: appends of many megabytes, strided ones too, arrive bit for bit, each block checksummed."""
    big = np.random.default_rng(2).integers(0, 2**16, (9, 1 << 20), np.uint16)
    with store.writer(version=0) as writer:
        small = writer.append("small", np.uint8(7))
        first = writer.append("x", big)
        turned = writer.append("x", big[:, ::3].T[:1000])
    np.testing.assert_array_equal(store.read(first, verify=True), big)
    np.testing.assert_array_equal(store.read(turned, verify=True), big[:, ::3].T[:1000])
    assert store.read(small, verify=True).tolist() == [7]
    path = Path(store.root, first.file)
    data = bytearray(path.read_bytes())
    data[first.offset + (5 << 20)] ^= 1
    path.write_bytes(data)
    with pytest.raises(_native.CorruptPayloadError):
        store.read(first, verify=True)


def test_close_discard_and_what_comes_after(store):
    """Promise: close and discard are idempotent, an append after them is a ValueError; nothing makes no file."""
    writer = store.writer(version=0)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.append("x", np.arange(3))
    assert in_version(store) == []
    writer = store.writer(version=0)
    segment = writer.append("x", np.arange(3))
    assert len(in_version(store)) == 1
    writer.close()
    writer.close()
    writer.discard()
    assert store.read(segment).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="closed"):
        writer.append("x", np.arange(3))
    writer = store.writer(version=0)
    gone = writer.append("x", np.arange(3))
    writer.discard()
    writer.discard()
    writer.close()
    with pytest.raises(ValueError, match="discarded"):
        writer.append("x", np.arange(3))
    assert not store.probe([gone]).present.any() and len(in_version(store)) == 1
    writer = store.writer(version=0)
    writer.append("x", np.arange(3))
    del writer
    assert len(in_version(store)) == 1
    for version in (-1, 2**63):
        with pytest.raises(ValueError, match="version"):
            store.writer(version=version)


def test_an_exception_inside_discards(store):
    """Promise: a trace that fails half way leaves no file and no temporary."""
    with pytest.raises(RuntimeError), store.writer(version=0) as writer:
        segment = writer.append("x", np.arange(3))
        raise RuntimeError
    assert in_version(store) == [] and not store.probe([segment]).present.any()


def test_the_callers_mistakes_change_nothing(store):
    """Promise: what is no tensor of the format is refused by field, and the writer goes on."""
    with store.writer(version=0) as writer:
        first = writer.append("x", np.arange(3))
        for field, bad, error in [
            ("y", np.zeros(3, ">f4"), ValueError),
            ("y", object(), TypeError),
            ("", np.zeros(3), ValueError),
        ]:
            with pytest.raises(error):
                writer.append_many({"x": np.arange(2), field: bad})
        assert writer.append_many({}) == {}
        second = writer.append("x", np.arange(4))
    assert (second.pos, second.file) == (3, first.file)
    assert store.read(second).tolist() == [0, 1, 2, 3]


def test_a_version_retired_meanwhile(store):
    """Promise: a writer notices that its version directory went, at the latest when it closes."""
    for before in (0, 1):
        writer = store.writer(version=2)
        for _ in range(before):
            writer.append("x", np.arange(3))
        store.retire(2)
        with pytest.raises(OSError) as e:
            writer.append("x", np.arange(3))
            writer.close()
        assert e.value.errno == errno.ESTALE and e.value.filename.startswith("v2/")
        with pytest.raises(ValueError, match="void"):
            writer.close()
        assert store.versions() == []


def test_a_killed_writer_leaves_a_temporary(store):
    """Promise: nobody ever reads what a killed writer had not published, and the sweep removes it."""
    code = f"""
import numpy as np, os, signal
from prime_io.store import PayloadStore
store = PayloadStore({store.root!r})
full, open_ = store.writer(version=0), store.writer(version=0)
full.append("x", np.arange(5)); full.close()
open_.append("x", np.arange(5))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    whole, temporary = sorted(in_version(store), key=lambda name: name.startswith(".tmp-"))
    assert whole.endswith(".safetensors") and temporary.startswith(".tmp-")
    assert store.read(store.segments(f"v0/{whole}")["x.0"]).tolist() == [0, 1, 2, 3, 4]
    report = store.sweep(roots=[f"v0/{whole}"])
    assert in_version(store) == [whole], report


def test_a_forked_child_leaves_its_parents_writer_alone(store):
    """Bug guarded: a child that ends drops its copy of the writer, which removed the parent's temporary."""
    writer = store.writer(version=0)
    segment = writer.append("x", np.arange(3))
    pid = os.fork()
    if not pid:
        code = 1
        try:
            writer.append("x", np.arange(3))
        except ValueError:
            writer.discard()
            del writer
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    writer.close()
    assert store.read(segment).tolist() == [0, 1, 2]


def test_threads_take_turns(store):
    """Promise: appends of several threads to several fields do not disturb one another."""
    segments = {n: [] for n in range(6)}
    with store.writer(version=0) as writer:

        def work(n):
            for turn in range(50):
                segments[n].append(writer.append(f"f{n}", np.full(7, 100 * n + turn, np.int32)))

        threads = [threading.Thread(target=work, args=(n,)) for n in segments]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for n, own in segments.items():
        assert [s.pos for s in own] == list(range(0, 350, 7))
        rows, _ = store.gather(own, f"f{n}", 0, 350, verify=True)
        np.testing.assert_array_equal(rows, np.repeat(100 * n + np.arange(50), 7))


def test_a_writer_outlives_its_store(tmp_path):
    """Promise: closing the store gives up its lock at once; the writer still publishes."""
    store = PayloadStore(tmp_path / "store", owner=True)
    writer = store.writer(version=0)
    segment = writer.append("x", np.arange(3))
    store.close()
    with PayloadStore(tmp_path / "store", owner=True) as again:
        writer.close()
        assert again.read(segment).tolist() == [0, 1, 2]


def test_torch_tensors_are_appended(store):
    """Promise: PyTorch tensors are taken as they are, bfloat16 too."""
    torch = pytest.importorskip("torch")
    rows = torch.arange(12, dtype=torch.bfloat16).reshape(4, 3)
    with store.writer(version=0) as writer:
        segment = writer.append("x", rows.T)
    assert (segment.dtype, segment.rows, segment.shape) == ("bfloat16", 3, (4,))
