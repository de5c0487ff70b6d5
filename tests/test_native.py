"""The native store: publish, header, gather, probe, reclaim, lock; errors; memory."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from native import Segment, gather, publish, raw, request
from prime_io import _native
from prime_io._native import CorruptPayloadError, Store

DTYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def random_array(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    if dtype == "bool":
        data &= 1
    return data.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_round_trips(store: Store, dtype: str) -> None:
    # Promise: what was published is gathered, bit for bit, for every type of safetensors.
    array = random_array(dtype, (13, 3, 2))
    segment = publish(store, x=array)["x"]
    rows, valid = gather(store, [segment], 2, 11, verify=True)
    assert raw(rows).tobytes() == raw(array[2:11]).tobytes()
    assert valid.all() and valid.shape == (9,)
    [(size, [(name, found, shape, offset, count, checksum)], metadata)] = store.header([segment.file])
    assert (name, found, shape, offset) == ("x", dtype, (13, 3, 2), segment.offset)
    assert (count, checksum) == (array.nbytes, segment.checksum)
    assert size == os.path.getsize(f"{store.root}/{segment.file}")
    assert metadata["policy_version"] == "1"


def test_the_reference_library_opens_published_files(store: Store) -> None:
    # Promise: a payload file is a valid safetensors file, its data section page-aligned.
    arrays = {d: random_array(d, (5, 7)) for d in DTYPES if "float8" not in d and d != "bfloat16"}
    segments = publish(store, 4, **arrays)
    path = f"{store.root}/{segments['uint8'].file}"
    assert Path(segments["uint8"].file).parts[0] == "v4"
    found = safetensors.numpy.load_file(path)
    for name, array in arrays.items():
        assert found[name].tobytes() == array.tobytes() and found[name].dtype == array.dtype
    assert (8 + int.from_bytes(Path(path).read_bytes()[:8], "little")) % 4096 == 0


def test_files_of_the_reference_library_are_gathered(store: Store) -> None:
    # Promise: any safetensors file in the store can be read, also without checksums.
    array = random_array("float32", (6, 4))
    os.makedirs(f"{store.root}/v0")
    safetensors.numpy.save_file({"x": array, "y": array[0]}, f"{store.root}/v0/theirs.safetensors")
    [(_, tensors, _)] = store.header(["v0/theirs.safetensors"])
    [(_, dtype, _, offset, _, checksum)] = [t for t in tensors if t[0] == "x"]
    segment = Segment("v0/theirs.safetensors", offset, 0, 6, dtype, (4,), checksum)
    assert checksum == ""
    rows, _ = gather(store, [segment], 0, 6, verify=True)
    assert rows.tobytes() == array.tobytes()


def test_same_input_same_bytes(store: Store) -> None:
    # Promise: the layout is a function of the input.
    arrays = {"b": random_array("uint8", (3,)), "a": random_array("float64", (2, 2))}
    one, two = publish(store, **arrays)["a"], publish(store, **arrays)["a"]
    assert one.file != two.file and one.checksum == two.checksum
    assert Path(store.root, one.file).read_bytes() == Path(store.root, two.file).read_bytes()


def test_later_segments_win_and_gaps_are_filled(store: Store) -> None:
    # Promise: widening, narrower rows, later wins, fill, valid.
    old = publish(store, x=np.full((10, 2), 7, np.uint8))["x"]
    new = publish(store, x=np.full((4, 3), 700, np.uint16))["x"]
    segments = [replace(old, pos=2), replace(new, pos=6)]
    rows, valid = gather(store, segments, 0, 14, dtype="uint16", shape=(3,), fill=np.uint16(9).tobytes())
    expect = np.full((14, 3), 9, np.uint16)
    expect[2:12, :2] = 7
    expect[6:10] = 700
    assert (rows == expect).all() and (valid == (np.arange(14) >= 2) & (np.arange(14) < 12)).all()
    rows, _ = gather(store, segments, 12, 14, dtype="uint16", shape=(3,), fill=None)
    assert (rows == [[0, 1, 2], [0, 1, 2]]).all()


def test_destinations_are_written_in_place(store: Store) -> None:
    # Promise: with out and valid nothing is allocated and nothing is returned.
    array = random_array("int32", (9, 5))
    segment = publish(store, x=array)["x"]
    out, valid = np.empty((9, 5), np.int32), bytearray(b"\xff" * 9)
    assert store.gather([request([segment], 0, 9, out=out, valid=valid)]) == [(None, None)]
    assert (out == array).all() and valid == b"\x01" * 9


def test_destinations_that_cannot_work_are_refused(store: Store) -> None:
    # Promise: read-only, strided, short, long, overlapping, no buffer: refused before any I/O.
    gone = Segment("v1/gone", 0, 0, 4, "int32", (2,))
    good = np.empty((4, 2), np.int32)
    fixed = np.empty((4, 2), np.int32)
    fixed.flags.writeable = False
    for out, why in [
        (fixed, "read-only"),
        (bytes(32), "read-only"),
        (np.empty((8, 2), np.int32)[::2], "contiguous"),
        (np.asfortranarray(good), "contiguous"),
        (np.empty((4, 3), np.int32), "48 bytes"),
        (bytearray(31), "31 bytes"),
    ]:
        with pytest.raises(ValueError, match=why):
            store.gather([request([gone], 0, 4, out=out)])
    with pytest.raises(ValueError, match="valid has 5 bytes"):
        store.gather([request([gone], 0, 4, valid=bytearray(5))])
    with pytest.raises(TypeError):
        store.gather([request([gone], 0, 4, out=[1, 2])])
    with pytest.raises(ValueError, match="share memory"):
        store.gather([request([gone], 0, 4, out=good), request([gone], 0, 2, out=good[1:3])])
    [(one, _), (two, _)] = store.gather([request([], 0, 2, out=bytearray(2)), request([], 0, 0)])
    assert one is None and len(two) == 0


def test_results_and_exceptions_come_per_item(store: Store) -> None:
    # Promise: one bad item is an exception instance in its place; the others are served.
    array = random_array("uint8", (4, 2))
    segment = publish(store, x=array)["x"]
    bad = replace(segment, file="v1/gone.safetensors")
    good, missing, again = store.gather([request([s], 0, 4) for s in (segment, bad, segment)])
    assert bytes(good[0]) == bytes(again[0]) == array.tobytes()
    assert type(missing) is FileNotFoundError
    assert (missing.errno, missing.filename) == (errno.ENOENT, "v1/gone.safetensors")
    assert "gather" in str(missing)
    [header] = store.header(["v9/gone"])
    assert type(header) is FileNotFoundError and header.filename == "v9/gone"
    done, wrong = store.publish([(1, [("a", "uint8", (2,), b"ab")]), (1, [("a", "uint8", (3,), b"ab")])])
    assert isinstance(done, tuple) and type(wrong) is ValueError


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"offset": -1}, "offset is negative"),
        ({"pos": -1}, "pos is negative"),
        ({"rows": 1 << 64}, "rows is larger than 64 bits"),
        ({"rows": 1 << 63}, "overflow"),
        ({"offset": (1 << 64) - 1}, "overflow"),
        ({"pos": (1 << 64) - 1}, "overflow"),
        ({"shape": (-2,)}, "shape is negative"),
        ({"shape": 2}, "shape is not a tuple"),
        ({"shape": (3,)}, "do not fit"),
        ({"shape": (1, 2)}, "do not fit"),
        ({"rows": "4"}, "rows is not an integer"),
        ({"rows": 4.0}, "rows is not an integer"),
        ({"file": 3}, "file is not a string"),
        ({"file": "../x"}, "dot"),
        ({"file": "v1/../../x"}, "dot"),
        ({"file": "/etc/passwd"}, "absolute"),
        ({"file": ""}, "empty"),
        ({"file": "v1/a\x00b"}, "may hold only"),
        ({"dtype": "float32"}, "does not widen"),
        ({"dtype": "object"}, "object"),
        ({"dtype": ">u2"}, "little-endian"),
    ],
)
def test_lying_segments_are_value_errors(store: Store, change: dict[str, object], why: str) -> None:
    # Promise: a claim that can never work names the segment and what is wrong, and stays in its item.
    segment = publish(store, x=np.zeros((4, 2), np.uint8))["x"]
    lie = replace(segment, **change)
    kw = {"dtype": "uint8", "shape": (2,)}
    wrong, good = store.gather([request([segment, lie], 0, 4, **kw), request([segment], 0, 4, **kw)])
    assert type(wrong) is ValueError and "segment 1" in str(wrong) and why in str(wrong)
    assert isinstance(good, tuple)


def test_bad_arguments_are_refused(store: Store) -> None:
    # Promise: the caller's own mistakes raise, clearly, before anything is read.
    for kw, why in [
        ({"lo": -1}, "lo is negative"),
        ({"lo": 5}, "less than lo"),
        ({"hi": 1 << 64}, "larger than 64 bits"),
        ({"hi": 1 << 62}, "larger than memory"),
        ({"dtype": "str", "fill": b"0"}, "uint16"),
        ({"shape": (1 << 40, 1 << 40)}, "larger than memory"),
        ({"shape": (-1,)}, "shape is negative"),
    ]:
        kw = {"lo": 0, "hi": 4, "dtype": "uint8", "shape": (2,)} | kw
        with pytest.raises(ValueError, match=why):
            store.gather([request([], **kw)])
    [fill, spread] = store.gather([request([], 0, 4, fill=b"12"), request([], 0, 4, dtype="bool", fill=None)])
    assert "fill of 2 bytes" in str(fill) and "distinct ids" in str(spread)
    for nonsense in [3, [3], [()]]:
        with pytest.raises((TypeError, ValueError)):
            store.gather(nonsense)


def test_what_is_no_regular_file(store: Store) -> None:
    # Promise: FIFOs, directories and symlinks are never read, and never block.
    publish(store, x=np.zeros(3, np.uint8))
    outside = Path(store.root).parent / "outside"
    outside.write_bytes(bytes(100))
    os.mkfifo(f"{store.root}/v1/fifo")
    os.mkdir(f"{store.root}/v1/dir")
    os.symlink(outside, f"{store.root}/v1/link")
    os.symlink(outside.parent, f"{store.root}/v2")
    names = ["v1/fifo", "v1/dir", "v1/link", "v2/outside"]
    results = store.gather([request([Segment(name, 0, 0, 3, "uint8", ())], 0, 3) for name in names])
    assert [r.errno for r in results[:3]] == [errno.EINVAL, errno.EISDIR, errno.ELOOP]
    assert results[3].errno in (errno.ELOOP, errno.ENOTDIR)
    assert [type(r) for r in store.header(names)] == [type(r) for r in results]


def test_truncated_files_are_corrupt(store: Store) -> None:
    # Promise: a file shorter than its segment says is CorruptPayloadError, a ValueError that names it.
    segment = publish(store, x=random_array("uint8", (5000, 3)))["x"]
    path = f"{store.root}/{segment.file}"
    os.truncate(path, os.path.getsize(path) - 1)
    with pytest.raises(CorruptPayloadError, match=segment.file):
        gather(store, [segment], 0, 10)
    [header] = store.header([segment.file])
    assert isinstance(header, CorruptPayloadError) and isinstance(header, ValueError)
    huge = replace(segment, rows=1 << 40, shape=(1 << 20,))
    with pytest.raises(CorruptPayloadError, match="bytes"):
        gather(store, [huge], 0, 1 << 40)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        (1 << 63).to_bytes(8, "little") + b"{}",
        (99_000_000).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}" + b"tail",
    ],
)
def test_lying_headers_are_corrupt(store: Store, data: bytes) -> None:
    # Promise: headers are bounded and checked, nobody vouches for them.
    os.makedirs(f"{store.root}/v1")
    Path(store.root, "v1/x").write_bytes(data)
    [header] = store.header(["v1/x"])
    assert type(header) is CorruptPayloadError and "v1/x" in str(header)


def test_verify_finds_a_flipped_byte_and_a_swapped_file(store: Store) -> None:
    # Promise: verify=True notices changed bytes in touched blocks, and another file under the name.
    array = random_array("uint8", (3000, 1024))
    segment = publish(store, x=array)["x"]
    other = publish(store, x=array[::-1])["x"]
    path = Path(store.root, segment.file)
    clean = path.read_bytes()
    torn = bytearray(clean)
    torn[segment.offset + 1500 * 1024] ^= 1
    path.write_bytes(torn)
    gather(store, [segment], 0, 3000)
    gather(store, [segment], 0, 1024, verify=True)
    for lo, hi in [(0, 3000), (1024, 1025), (1900, 2100)]:
        with pytest.raises(CorruptPayloadError, match='"x"'):
            gather(store, [segment], lo, hi, verify=True)
    path.write_bytes(clean)
    rows, _ = gather(store, [segment], 0, 3000, verify=True)
    assert (rows == array).all()
    path.write_bytes(Path(store.root, other.file).read_bytes())
    with pytest.raises(CorruptPayloadError, match='"x"'):
        gather(store, [segment], 0, 1, verify=True)
    safetensors.numpy.save_file({"x": array}, path)
    with pytest.raises(CorruptPayloadError):
        gather(store, [segment], 0, 1, verify=True)


def test_other_threads_run_during_a_gather(store: Store) -> None:
    # Promise: the GIL is released for the whole of the I/O.
    segment = publish(store, x=np.ones((96 << 20,), np.uint8))["x"]
    switch = sys.getswitchinterval()
    counts: list[float] = []
    running, done = threading.Event(), threading.Event()

    def tick() -> None:
        running.set()
        while not done.is_set():
            counts.append(time.perf_counter())
            time.sleep(0.001)

    sys.setswitchinterval(10)  # nobody is forced to give the GIL up
    ticker = threading.Thread(target=tick)
    try:
        ticker.start()
        running.wait()
        start = time.perf_counter()
        store.gather([request([segment], 0, segment.rows)] * 3, verify=True)
        stop = time.perf_counter()
    finally:
        done.set()
        sys.setswitchinterval(switch)
        ticker.join()
    during = sum(start < at < stop for at in counts)
    assert during >= 5, "with the GIL held for the call, and 10 s between switches, there would be none"


def test_a_signal_ends_a_long_gather(store: Store) -> None:
    # Promise: Ctrl-C is seen within some 50 ms; the exception comes after the work has ended.
    segment = publish(store, x=np.ones((64 << 20,), np.uint8))["x"]
    requests = [request([segment], 0, 1 << 16)] * 20_000
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    calls = 0
    with pytest.raises(KeyboardInterrupt):
        for _ in range(100):
            store.gather(requests, verify=True)
            calls += 1
    assert calls < 100
    timer.join()


def test_slabs_outlive_their_store(tmp_path: Path) -> None:
    # Promise: an array stays whole after close, gc, and the reuse of the pool by others.
    store = Store(str(tmp_path / "store"))
    array = random_array("uint16", (300, 1000))
    segment = publish(store, x=array)["x"]
    alive = []
    for i in range(12):
        rows, valid = gather(store, [segment], 0, 300)
        if i % 3 == 0:
            alive.append((rows[::2], valid))
        del rows, valid
    store.close()
    del store
    gc.collect()
    for rows, valid in alive:
        assert (rows == array[::2]).all() and valid.all()
    rows[:] = 1  # writable
    del alive


def test_memory_returns_to_the_pool_with_its_last_view(store: Store) -> None:
    # Promise: a dead result's pages serve the next; a view of a part keeps the whole.
    segment = publish(store, x=np.ones((1 << 20,), np.uint8))["x"]
    rows, _ = gather(store, [segment], 0, 1 << 20)
    address = rows.ctypes.data
    part = memoryview(rows)[10:20]
    del rows
    other, _ = gather(store, [segment], 0, 1 << 20)
    assert other.ctypes.data != address and part[0] == 1
    del part
    again, _ = gather(store, [segment], 0, 1 << 20)
    assert again.ctypes.data == address
    [(slab, _)] = store.gather([request([segment], 0, 16)])
    view = memoryview(slab)
    assert (len(slab), view.nbytes, view.readonly, view.format, view.ndim) == (16, 16, False, "B", 1)


def test_a_closed_store_says_so(store: Store) -> None:
    # Promise: close is idempotent; later calls raise ValueError.
    store.close()
    store.close()
    for call in [lambda: store.gather([]), lambda: store.publish([]), lambda: store.header([])]:
        with pytest.raises(ValueError, match="closed"):
            call()
    assert store.owner is False and store.root


def test_a_forked_child_works(store: Store) -> None:
    # Promise: nothing global breaks after fork: the child reads, writes and gathers.
    array = random_array("uint8", (1 << 20, 2))
    segment = publish(store, x=array)["x"]
    gather(store, [segment], 0, 1 << 20)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            rows, _ = gather(store, [segment], 0, 1 << 20, verify=True)
            code = 0 if (rows == array).all() and publish(store, x=array) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_few_descriptors_suffice(store: Store) -> None:
    # Promise: a batch over thousands of files works under ulimit -n 64.
    files = [publish(store, x=np.full((1, 2), i % 251, np.uint8))["x"] for i in range(300)]
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from native import Segment, gather, request
from prime_io._native import Store
store = Store({store.root!r}, create=False)
segments = {files!r}
for verify in (False, True):
    results = store.gather([request([s], 0, 1) for s in segments], verify=verify)
    assert all(bytes(r[0]) == bytes([i % 251] * 2) for i, r in enumerate(results)), results
    from dataclasses import replace
    rows, valid = gather(store, [replace(s, pos=i) for i, s in enumerate(segments)], 0, 300, verify=verify)
    assert (rows[:, 0] == [i % 251 for i in range(300)]).all() and valid.all()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


def test_reads_beyond_two_gigabytes_are_exact(store: Store) -> None:
    # Promise: more bytes than one read call moves, from beyond 2 GiB, arrive exactly.
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory < 6 << 30:
        pytest.skip("needs 6 GiB of free memory")
    os.makedirs(f"{store.root}/v1")
    size = (2 << 30) + (5 << 20)
    marks = [0, 1 << 30, 0x7FFF_EFFF, 0x7FFF_F000, (2 << 30) - 1, 2 << 30, size - 1]
    with open(f"{store.root}/v1/big", "wb") as file:
        file.truncate(100 + size)
        for i, at in enumerate(marks):
            file.seek(100 + at)
            file.write(bytes([i + 1]))
    segment = Segment("v1/big", 100, 0, size, "uint8", ())
    rows, _ = gather(store, [segment], 0, size)
    assert np.flatnonzero(rows).tolist() == marks and [rows[m] for m in marks] == [1, 2, 3, 4, 5, 6, 7]


def test_only_one_owner(tmp_path: Path) -> None:
    # Promise: one lock per store, within a process and between processes; close gives it up.
    root = str(tmp_path / "store")
    store = Store(root, owner=True)
    assert store.owner and not Store(root).owner
    with pytest.raises(BlockingIOError) as caught:
        Store(root, owner=True)
    assert caught.value.errno == errno.EAGAIN and caught.value.filename == root
    code = f"from prime_io._native import Store; Store({root!r}, owner=True)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert other.returncode == 1 and "BlockingIOError" in other.stderr
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not store.owner else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    store.close()
    assert Store(root, owner=True).owner


def test_stores_know_their_run(tmp_path: Path) -> None:
    # Promise: no store is made unasked; another run's store is refused.
    root = str(tmp_path / "store")
    with pytest.raises(FileNotFoundError) as caught:
        Store(root, create=False)
    assert caught.value.filename == root
    made = Store(root, run_id="a")
    found = Store(root, create=False)
    assert found.uuid == made.uuid and len(found.uuid) == 32 and found.run_id == "a"
    with pytest.raises(ValueError, match="two runs"):
        Store(root, run_id="b")


def test_hashes_and_names() -> None:
    # Promise: xxh3 is XXH3-64; a temporary of a live process is never dead.
    assert _native.xxh3(b"") == "2d06800538d394c2"
    assert _native.xxh3(memoryview(b"abc")) == _native.xxh3(b"abc") != _native.xxh3(b"abd")
    name = _native.temporary_name()
    assert name.startswith(".tmp-") and not _native.owner_is_dead(name)
