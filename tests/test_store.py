"""The store from outside: what is written is what is read, by us and by others; what goes and what stays."""

from __future__ import annotations

import array
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from prime_io.segment import ITEMSIZE, PayloadSegment, clip
from prime_io.store import PayloadStore
from prime_io.tensors import SAFETENSORS, as_torch, from_buffer, numpy_dtype, to_bytes


@pytest.fixture
def store(tmp_path):
    with PayloadStore(tmp_path / "store", owner=True) as store:
        yield store


def sample(dtype, shape):
    """Every bit pattern that a byte can have, as far as there is room; only 0 and 1 for bool."""
    count = int(np.prod(shape)) * ITEMSIZE[dtype]
    raw = np.resize(np.arange(256, dtype=np.uint8), count)
    return (raw % 2 if dtype == "bool" else raw).view(numpy_dtype(dtype)).reshape(shape)


def bits(a):
    return np.ascontiguousarray(a).reshape(-1).view(np.uint8)


# --- round trips ---


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("shape", [(64, 4), (5,), (), (0, 3), (3, 0)])
def test_every_dtype_comes_back_bit_for_bit(store, dtype, shape):
    """Promise: every dtype of the format round-trips, and its segment says what it is."""
    pytest.importorskip("ml_dtypes")
    data = sample(dtype, shape)
    s = store.write({"x": data}, version=3)["x"]
    assert (s.dtype, s.pos, s.rows, s.shape) == (dtype, 0, *((shape[0], shape[1:]) if shape else (1, ())))
    assert s.file.startswith("v3/") and s.checksum
    got = store.read(s, verify=True)
    assert got.dtype == data.dtype and got.shape == (s.rows, *s.shape)
    np.testing.assert_array_equal(bits(got), bits(data))


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_every_torch_dtype_comes_back_bit_for_bit(store, dtype):
    """Promise: PyTorch tensors are written as they are, whatever their strides, and read as tensors again."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch, dtype):
        pytest.skip(f"this PyTorch has no {dtype}")
    tensor = as_torch(sample(dtype, (8, 6)), dtype)
    tensors = {"plain": tensor, "turned": tensor.T, "strided": tensor[::2, 1::3], "scalar": tensor[0, 0]}
    for name, s in store.write(tensors, version=0).items():
        want = tensors[name].contiguous().reshape(s.rows, *s.shape)
        got = as_torch(store.read(s, verify=True), s.dtype)
        assert got.dtype == want.dtype and got.shape == want.shape
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_torch_tensors_that_are_not_plain(store):
    """Promise: grad, conjugation and negation are resolved; what has no plain bytes is refused."""
    torch = pytest.importorskip("torch")
    grad = torch.arange(6.0).reshape(2, 3).requires_grad_()
    conj = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64).conj()
    made = store.write({"g": grad * 2, "c": conj, "i": conj.imag}, version=0)
    assert store.read(made["g"]).tolist() == [[0, 2, 4], [6, 8, 10]]
    assert store.read(made["c"]).tolist() == [1 - 2j, 3 + 1j]
    assert store.read(made["i"]).tolist() == [-2, 1]
    for bad, match in [
        (torch.eye(3).to_sparse(), "dense"),
        (torch.empty(3, device="meta"), "meta"),
        (torch.zeros(3, dtype=torch.complex128), "complex128"),
    ]:
        with pytest.raises(ValueError, match=f"field 'bad'.*{match}"):
            store.write({"bad": bad}, version=0)


def test_every_layout_of_numpy_arrays(store):
    """Promise: Fortran order, strides, broadcasts, read-only and other buffers are written by value."""
    base = np.arange(24, dtype=np.int32).reshape(4, 6)
    frozen = base.copy()
    frozen.flags.writeable = False
    arrays = {
        "fortran": np.asfortranarray(base),
        "strided": base[::2, ::-3],
        "broadcast": np.broadcast_to(np.float32(3), (4, 2)),
        "frozen": frozen,
        "scalar": np.uint16(7),
        "unaligned": np.frombuffer(b"\0" + base.tobytes(), np.int32, offset=1),
        "bytes": b"abc",
        "bytearray": bytearray(b"xyz"),
        "array": array.array("d", [1.5, 2.5]),
        "view": memoryview(base)[1:3],
    }
    for name, s in store.write(arrays, version=0).items():
        obj = arrays[name]
        flat = not isinstance(obj, np.ndarray | np.generic) and not isinstance(obj, memoryview | array.array)
        want = np.frombuffer(obj, np.uint8) if flat else np.asarray(obj)
        np.testing.assert_array_equal(store.read(s, verify=True), want.reshape(s.rows, *s.shape))


def test_what_is_no_tensor_is_refused_before_anything_is_written(store):
    """Promise: a wrong field is named, nothing of its batch is written."""
    good = np.zeros(3)
    for bad, error in [
        (np.zeros(3, ">f4"), "big-endian"),
        (np.zeros(3, object), "not one of the format"),
        (np.zeros(3, "U4"), "not one of the format"),
        (np.zeros(3, np.complex128), "not one of the format"),
        (np.zeros(3, [("a", "f4")]), "not one of the format"),
        ([1, 2], "list"),
        (None, "NoneType"),
    ]:
        with pytest.raises((ValueError, TypeError), match=f"field 'bad'.*{error}"):
            store.write_many([{"good": good}, {"good": good, "bad": bad}], version=0)
    for tensors in ({}, {"__metadata__": good}, {"": good}):
        with pytest.raises(ValueError):
            store.write(tensors, version=0)
    with pytest.raises(ValueError, match="version"):
        store.write({"good": good}, version=-1)
    assert store.native.scan() == []


# --- the format ---


def tensors():
    rng = np.random.default_rng(0)
    return {
        "experts": rng.integers(0, 255, (300, 4, 8)).astype(np.uint8),
        "logprobs": rng.random(300).astype(np.float32),
        "wide": rng.random((3, 70_000)),
        "none": np.empty((0, 2), np.int16),
        "one": np.float16(2),
    }


def test_the_reference_library_reads_our_files(store):
    """Promise: a payload file is a valid safetensors file whose data begins at a multiple of 4096."""
    safetensors = pytest.importorskip("safetensors")
    from safetensors.numpy import load_file

    data = tensors()
    made = store.write(data, version=4)
    [file] = {s.file for s in made.values()}
    path = Path(store.root) / file
    loaded = load_file(path)
    assert loaded.keys() == data.keys()
    for name, a in data.items():
        np.testing.assert_array_equal(loaded[name], a)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    assert (8 + length) % 4096 == 0
    with safetensors.safe_open(path, "np") as f:
        assert any("4" in v for v in f.metadata().values())


def test_we_read_files_of_the_reference_library(store):
    """Promise: foreign safetensors files in the store are read by handle, from every dtype that it writes."""
    torch = pytest.importorskip("torch")
    save = pytest.importorskip("safetensors.torch")
    named = {name: SAFETENSORS[name] for name in ITEMSIZE if hasattr(torch, name)}
    data = {name: as_torch(sample(name, (5, 4)), name) for name in named if named[name] in save._TYPES}
    store.write({"x": np.zeros(1)}, version=2)
    save.save_file(data, f"{store.root}/v2/foreign.safetensors", metadata={"a": "b"})
    made = store.segments("v2/foreign.safetensors")
    assert made.keys() == data.keys()
    for name, s in made.items():
        assert (s.dtype, s.rows, s.shape, s.checksum) == (name, 5, (4,), "")
        assert torch.equal(as_torch(store.read(s), name).view(torch.uint8), data[name].view(torch.uint8))


def test_segments_of_a_file_are_those_that_write_returned(store):
    """Promise: a lost handle is found again by the file's header."""
    made = store.write(tensors(), version=0)
    assert store.segments(made["one"].file) == made
    with pytest.raises(FileNotFoundError):
        store.segments("v0/gone.safetensors")


def test_same_input_same_bytes(store):
    """Promise: what a file holds depends on nothing but what was written."""
    data = tensors()
    first = store.write(data, version=1)
    second = store.write(dict(reversed(data.items())), version=1)
    a, b = ((Path(store.root) / m["one"].file).read_bytes() for m in (first, second))
    assert first["one"].file != second["one"].file and a == b
    assert {s.checksum for s in first.values()} == {s.checksum for s in second.values()}


def test_verify_finds_one_flipped_bit(store):
    """Promise: with verify, an edited byte is a CorruptPayloadError; rows of other blocks still read."""
    s = store.write({"x": np.zeros((4, 1 << 20), np.uint8)}, version=0)["x"]
    path = Path(store.root) / s.file
    with open(path, "r+b") as f:
        f.seek(s.offset + (2 << 20) + 5)
        f.write(b"\x01")
    with pytest.raises(ValueError) as e:
        store.read(s, verify=True)
    assert type(e.value).__name__ == "CorruptPayloadError" and s.file in str(e.value)
    rows, _ = store.gather(clip([s], 0, 2), "x", 0, 2, verify=True)
    assert not rows.any()
    assert store.read(s)[2, 5] == 1


# --- identity, probe, reclaim ---


def test_owner_uuid_and_run(tmp_path):
    """Promise: one owner at a time; a store belongs to one run and keeps its identity."""
    with PayloadStore(tmp_path, owner=True, run_id="r1") as store:
        uuid = store.uuid
        assert store.owner and store.run_id == "r1" and store.root == str(tmp_path)
        with pytest.raises(BlockingIOError):
            PayloadStore(tmp_path, owner=True)
        with PayloadStore(tmp_path, create=False) as other:
            assert not other.owner and other.uuid == uuid
            s = other.write({"x": np.zeros(2)}, version=0)["x"]
            assert store.read(s).shape == (2,)
            for call in (lambda: other.sweep(roots=[]), lambda: other.retire(0), other.empty_trash):
                with pytest.raises(PermissionError):
                    call()
            with pytest.raises(PermissionError):
                [result] = other.reclaim([s.file])
                raise result
            assert store.probe([s]).present.all()
    with pytest.raises(ValueError, match="closed"):
        store.versions()
    store.close()
    with pytest.raises(ValueError, match="r1"):
        PayloadStore(tmp_path, run_id="r2")
    with pytest.raises(FileNotFoundError):
        PayloadStore(tmp_path / "none", create=False)
    with PayloadStore(tmp_path, owner=True) as again:
        assert again.uuid == uuid


def test_probe_answers_for_files_and_segments(store):
    """Promise: present, size and errno per item; a segment also needs the file to reach to its end."""
    s = store.write({"x": np.zeros(1000)}, version=0)["x"]
    size = s.offset + 8000
    long = msgspec.structs.replace(s, rows=1001)
    (Path(store.root) / "v0" / "dir").mkdir()
    asked = [s, s.file, "v0/gone", "v7/gone", long, "v0/dir", "../x", msgspec.structs.replace(s, rows=-1)]
    got = store.probe(asked)
    assert got.present.tolist() == [True, True, False, False, False, False, False, False]
    assert got.size[:2].tolist() == [size, size]
    want = [0, 0, errno.ENOENT, errno.ENOENT, errno.ENODATA, errno.EINVAL, errno.EINVAL, errno.EINVAL]
    assert got.errno.tolist() == want
    names = store.probe([s.file, "v0/gone"])
    assert names.present.tolist() == [True, False] and names.size.tolist() == [-1, -1]
    assert store.probe([s.file], sizes=True).size.tolist() == [size]
    assert [a.shape for a in store.probe([])] == [(0,)] * 3


def test_reclaim_has_one_result_per_file(store):
    """Promise: bytes freed, -1 for what was gone, and an exception only for what could not be done."""
    s = store.write({"x": np.zeros(1000)}, version=0)["x"]
    results = store.reclaim([s.file, s.file, "v9/gone", "../outside"])
    assert results[0] == s.offset + 8000
    assert results[1] == results[2] == -1 and isinstance(results[3], Exception)
    with pytest.raises(FileNotFoundError):
        store.read(s)


def test_durable_files_are_remembered(store):
    """Promise: a checkpoint does not sync again what is durable already."""
    a = store.write({"x": np.zeros(10)}, version=0, durable=True)["x"].file
    b = store.write({"x": np.zeros(10)}, version=0)["x"].file
    assert store.is_durable(a) and not store.is_durable(b)
    ok, gone, again = store.sync([b, "v0/gone", b])
    assert ok is again is None and isinstance(gone, FileNotFoundError)
    assert store.is_durable(b) and not store.is_durable("v0/gone")
    store.reclaim([b])
    assert not store.is_durable(b)
    assert store.retire(0) and not store.is_durable(a) and store.versions() == []
    assert store.empty_trash() >= 1 and sorted(os.listdir(store.root)) == ["LOCK", "STORE"]


# --- sweep ---


def names(store, *versions):
    return [store.write({"x": np.zeros(10)}, version=v)["x"].file for v in versions]


def age(store, file, seconds):
    then = time.time() - seconds
    os.utime(Path(store.root) / file, (then, then))


def exists(store, *files):
    return [(Path(store.root) / f).exists() for f in files]


def test_sweep_when_nobody_writes_leaves_the_roots_only(store):
    """Promise: without writers, what no root names goes whatever its age, and nothing else."""
    a, b, c = names(store, 0, 0, 3)
    plan = store.sweep(roots=[a], dry_run=True)
    assert exists(store, a, b, c) == [True] * 3
    report = store.sweep(roots=iter([a, "v1/never-written.safetensors"]))
    assert exists(store, a, b, c) == [True, False, False]
    assert report == plan
    assert (report.kept, sorted(report.reclaimed), report.spared) == (1, sorted([b, c]), 0)
    assert report.bytes == 2 * (Path(store.root) / a).stat().st_size and not report.errors


def test_sweep_while_workers_write_spares_young_and_current_files(store):
    """Promise: below the bound and older than the grace, else spared."""
    old, young, current = names(store, 1, 1, 2)
    for file in (old, current):
        age(store, file, 7200)
    report = store.sweep(roots=[], before=2)
    assert report.reclaimed == [old] and report.spared == 2
    assert exists(store, young, current) == [True, True]
    age(store, young, 30)
    assert store.sweep(roots=[], before=2, grace_s=20).reclaimed == [young]
    ahead = names(store, 0)[0]
    age(store, ahead, -7200)  # the file server's clock is ahead
    assert store.sweep(roots=[], before=2, grace_s=20).spared == 2


def test_roots_are_asked_for_after_the_listing(store):
    """Promise: what is published and taken up while the store is listed is not swept."""
    taken = []

    def roots():
        taken.extend(names(store, 0))
        return taken

    old = names(store, 0)
    report = store.sweep(roots=roots)
    assert report.reclaimed == old and exists(store, *taken) == [True]

    def unlisted():
        names(store, 1)
        return taken

    assert store.sweep(roots=unlisted).reclaimed == []

    def broken():
        raise RuntimeError("no roots")

    with pytest.raises(RuntimeError):
        store.sweep(roots=broken)
    assert exists(store, *taken) == [True]


def test_a_root_that_names_no_file_stops_the_sweep(store):
    """Promise: a root in another spelling never costs the file that it means."""
    [a] = names(store, 0)
    for bad in (f"{store.root}/{a}", f"./{a}", f"v0/../{a}", a.replace("/", "//"), "", b"v0/x"):
        with pytest.raises((ValueError, TypeError)):
            store.sweep(roots=[bad])
    with pytest.raises(TypeError, match="single string"):
        store.sweep(roots=a)
    with pytest.raises(ValueError, match="grace_s"):
        store.sweep(roots=[], grace_s=-1)
    assert exists(store, a) == [True]


def test_sweep_of_temporaries(store):
    """Promise: a dead writer's temporary goes; another only when old and nobody writes."""
    names(store, 0)
    child = subprocess.run(
        [sys.executable, "-c", "from prime_io import _native; print(_native.temporary_name())"],
        check=True,
        capture_output=True,
        text=True,
    )
    dead = f"v0/{child.stdout.strip()}"
    mine = f"v0/{store_temporary()}"
    elsewhere = "v0/.tmp-00000000-1-1-abcdef12"
    for file in (dead, mine, elsewhere):
        (Path(store.root) / file).write_bytes(b"half")
    everything = [f for f, _, _, kind in store.native.scan() if kind == "payload"]
    report = store.sweep(roots=everything, before=5)
    assert report.reclaimed == [dead] and report.temporaries == 1 and report.spared == 2
    for file in (mine, elsewhere):
        age(store, file, 7200)
    assert store.sweep(roots=everything, before=5).reclaimed == []
    report = store.sweep(roots=everything)
    assert sorted(report.reclaimed) == sorted([mine, elsewhere]) and report.temporaries == 2
    assert exists(store, *everything) == [True]


def test_sweep_of_a_temporary_beside_the_versions(store):
    """Bug: what an owner left that was killed while it made the store stayed for ever."""
    child = subprocess.run(
        [sys.executable, "-c", "from prime_io import _native; print(_native.temporary_name())"],
        check=True,
        capture_output=True,
        text=True,
    )
    dead, alive, foreign = child.stdout.strip(), store_temporary(), ".tmp-notes"
    for name in (dead, alive, foreign):
        (Path(store.root) / name).write_bytes(b"half")
    store.sweep(roots=[], dry_run=True)
    assert (Path(store.root) / dead).exists()
    store.sweep(roots=[])
    assert not (Path(store.root) / dead).exists()
    assert (Path(store.root) / alive).exists() and (Path(store.root) / foreign).exists()


def store_temporary():
    from prime_io import _native

    return _native.temporary_name()


def test_sweep_never_touches_what_is_not_of_the_store(store):
    """Promise: other files, directories and links stay, and so does what links point to."""
    names(store, 0)
    root = Path(store.root)
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "keep.safetensors").write_bytes(b"x")
    (root / "notes.txt").write_text("mine")
    (root / "v0" / "sub").mkdir()
    (root / "v0" / "link.safetensors").symlink_to(outside / "keep.safetensors")
    (root / "v8").symlink_to(outside)
    report = store.sweep(roots=[])
    assert len(report.reclaimed) == 1 and not report.errors
    assert (outside / "keep.safetensors").exists() and (root / "notes.txt").exists()
    assert (root / "v0" / "sub").exists() and (root / "v0" / "link.safetensors").is_symlink()


# --- pins ---


def test_link_back_restores_what_was_reclaimed(store, tmp_path):
    """Promise: a pin gives a reclaimed file its name again, and anything else there gives way."""
    made = [store.write({"x": np.full(10, i)}, version=0)["x"] for i in range(4)]
    pins = tmp_path / "pins"
    (pins / "v0").mkdir(parents=True)
    for s in made:
        os.link(Path(store.root) / s.file, pins / s.file)
    listed = [(s.file, s.offset + 80, [s.checksum]) for s in made]
    store.reclaim([made[1].file, made[2].file])
    (Path(store.root) / made[2].file).write_bytes(b"something else")
    (pins / made[3].file).unlink()
    store.reclaim([made[3].file])
    results = store.link_back(pins, listed)
    assert results[:3] == ["present", "linked", "replaced"] and isinstance(results[3], FileNotFoundError)
    assert store.is_durable(made[1].file)
    for i, s in enumerate(made[:3]):
        assert store.read(s, verify=True).tolist() == [i] * 10


# --- optional packages ---


def run(code):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True
    )


def test_nothing_optional_is_imported():
    """Promise: numpy and msgspec are enough; PyTorch and ml_dtypes are not imported to look at an object."""
    run(
        "import sys, prime_io.store as s, numpy as np, tempfile;"
        "st = s.PayloadStore(tempfile.mkdtemp());"
        "x = st.write({'x': np.zeros((3, 2), 'u1')}, version=0)['x'];"
        "st.gather([x], 'x', 0, 3, out=bytearray(6));"
        "assert not {'torch', 'ml_dtypes', 'safetensors'} & set(sys.modules)"
    )


def test_without_ml_dtypes_and_torch():
    """Promise: bf16 comes as its bits without ml_dtypes, and a missing PyTorch is one clear sentence."""
    run(
        "import sys; sys.modules['ml_dtypes'] = sys.modules['torch'] = None\n"
        "import numpy as np\n"
        "from prime_io.tensors import as_torch, fill_item, from_buffer\n"
        "a = from_buffer(bytearray(b'\\x80\\x3f'), 'bfloat16', (1,))\n"
        "assert a.dtype == np.uint16 and fill_item(1.0, 'bfloat16') == b'\\x80\\x3f'\n"
        "try: as_torch(a, 'bfloat16')\n"
        "except ImportError as e: assert \"needs PyTorch: pip install 'prime-io[torch]'\" in str(e), e\n"
        "else: raise SystemExit(1)\n"
        "try: fill_item(1.0, 'float8_e5m2')\n"
        "except ValueError as e: assert 'pip install ml_dtypes' in str(e)\n"
        "else: raise SystemExit(1)\n"
    )


def test_to_bytes_shares_memory_where_it_can():
    """Promise: contiguous tensors are written from where they are, without a copy."""
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.shares_memory(np.asarray(to_bytes(a)[2]), a)
    torch = pytest.importorskip("torch")
    t = torch.arange(6, dtype=torch.bfloat16)
    assert np.shares_memory(np.asarray(to_bytes(t)[2]), t.view(torch.uint8).numpy())
    with pytest.raises(ValueError, match="too few"):
        from_buffer(bytearray(7), "float32", (2,))
    with pytest.raises(ValueError, match="differ in width"):
        as_torch(a, "bfloat16")
    with pytest.raises(ValueError, match="copy"):
        as_torch(a.T)


def test_a_store_is_used_from_a_forked_child(store):
    """Promise: nothing breaks after fork: a child reads and writes, the lock stays with the parent."""
    s = store.write({"x": np.arange(100_000)}, version=0)["x"]
    store.read(s)
    pid = os.fork()
    if pid == 0:
        try:
            ok = store.read(s)[99_999] == 99_999 and bool(store.write({"y": np.zeros(3)}, version=1))
        finally:
            os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
    with pytest.raises(BlockingIOError):
        PayloadStore(store.root, owner=True)
    assert store.versions() == [0, 1]


def test_segment_type_is_what_the_wire_gives(store):
    """Promise: a segment that went over the wire reads like the one that write returned."""
    s = store.write({"x": np.arange(5)}, version=0)["x"]
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(s), type=PayloadSegment)
    assert again == s and store.read(again).tolist() == [0, 1, 2, 3, 4]
