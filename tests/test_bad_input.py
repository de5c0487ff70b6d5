"""Segments, headers and names come from other machines: each lie is one clear error, and costs nothing."""

from __future__ import annotations

import errno
import json
import os
import resource
import struct
import time
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from prime_io import _native
from prime_io.segment import PayloadSegment
from prime_io.store import CorruptPayloadError, Gather, PayloadStore

LIMIT = 64 << 20  # bytes of memory that a refusal may take


@pytest.fixture
def store(tmp_path):
    with PayloadStore(tmp_path / "store", owner=True) as store:
        store.write({"x": np.arange(10, dtype=np.int32)}, version=0)
        yield store


@contextmanager
def frugal():
    """What runs inside neither allocates much nor takes long."""
    tracemalloc.start()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    try:
        yield
    finally:
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert used < LIMIT
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 < LIMIT
    assert time.perf_counter() - began < 5


def good(store):
    return store.write({"x": np.arange(10, dtype=np.int32)}, version=0)["x"]


def still_works(store):
    assert store.read(good(store)).tolist() == list(range(10))


def put(store, content, *, size=None, name="bad.safetensors"):
    path = Path(store.root) / "v0" / name
    path.write_bytes(content)
    if size is not None:
        os.truncate(path, size)
    return f"v0/{name}"


def header(tensors, *, length=None):
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


def tensor(shape, end, *, dtype="U8", begin=0):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS = {
    "empty file": b"",
    "7 bytes": b"\0" * 7,
    "no JSON": header(b"not json"),
    "an array": header(b"[]"),
    "deep nesting": header(b'{"x":' + b"[" * 100_000),
    "header longer than the file": header({"x": tensor([1], 1)}, length=1 << 20),
    "100 MB header claim": struct.pack("<Q", 100_000_000) + b"{}",
    "header of 2**63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "header of 2**64 - 1 bytes": struct.pack("<Q", 2**64 - 1) + b"{}",
    "shape overflows": header({"x": tensor([2**32, 2**32], 0)}),
    "shape overflows to what fits": header({"x": tensor([2**63, 2], 0)}),
    "10**9 rows": header({"x": tensor([10**9], 10**9)}) + b"\0" * 100,
    "rows and bytes differ": header({"x": tensor([10**9], 100)}) + b"\0" * 100,
    "negative dimension": header({"x": tensor([-1], 1)}) + b"\0",
    "negative offset": header({"x": tensor([1], 0, begin=-1)}) + b"\0",
    "offset past the end": header({"x": tensor([1], 2**40 + 1, begin=2**40)}) + b"\0",
    "end before begin": header({"x": tensor([1], 0, begin=1)}) + b"\0",
    "fractional shape": header({"x": tensor([1.5], 1)}) + b"\0",
    "huge integer": header(b'{"x":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1]}}'),
    "overlap": header({"x": tensor([4], 4), "y": tensor([4], 6, begin=2)}) + b"\0" * 6,
    "hole": header({"x": tensor([1], 1), "y": tensor([1], 3, begin=2)}) + b"\0" * 3,
    "trailing bytes": header({"x": tensor([1], 1)}) + b"\0" * 2,
    "unknown dtype": header({"x": tensor([1], 1, dtype="U12")}) + b"\0",
    "big-endian dtype": header({"x": tensor([1], 2, dtype=">U2")}) + b"\0\0",
    "no shape": header({"x": {"dtype": "U8", "data_offsets": [0, 1]}}) + b"\0",
    "duplicate tensor": header(
        b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    )
    + b"\0",
    "duplicate metadata": header(b'{"__metadata__":{"a":"1","a":"2"}}'),
    "metadata of numbers": header(b'{"__metadata__":{"a":1}}'),
    "not UTF-8": header(b'{"\xff":1}'),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_lying_header_is_one_clear_error(store, name):
    """Promise: no header is believed beyond what its file backs."""
    file = put(store, HEADERS[name])
    with frugal(), pytest.raises(CorruptPayloadError) as e:
        store.segments(file)
    assert file in str(e.value)
    still_works(store)


def test_a_claimed_header_that_the_file_backs_with_nothing(store):
    """Promise: a 100 MB header of holes costs at most its own size, once, and is an error."""
    file = put(store, struct.pack("<Q", 99_999_000) + b"{", size=100_000_000)
    with pytest.raises(CorruptPayloadError):
        store.segments(file)
    still_works(store)


def test_a_truncated_file(store):
    """Promise: a file that lost its end is corrupt for those rows, short for a probe, and never padded."""
    s = good(store)
    os.truncate(Path(store.root) / s.file, s.offset + 39)
    with frugal():
        with pytest.raises(CorruptPayloadError, match=s.file):
            store.read(s)
        with pytest.raises(CorruptPayloadError):
            store.segments(s.file)
        got = store.probe([s])
    assert not got.present[0] and got.errno[0] == errno.ENODATA
    os.truncate(Path(store.root) / s.file, 0)
    with pytest.raises(CorruptPayloadError):
        store.read(s, verify=True)
    still_works(store)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 10**9},
        {"rows": 10**15},
        {"offset": 10**9},
        {"offset": 2**63 - 41},
        {"rows": 10**6, "shape": (10**6,)},
        {"shape": (10**12,)},
        {"dtype": "float64"},
    ],
    ids=str,
)
def test_a_segment_beyond_its_file_allocates_nothing(store, change):
    """Promise: nothing is allocated for a claim that the file cannot back."""
    s = msgspec.structs.replace(good(store), **change)
    with frugal(), pytest.raises(CorruptPayloadError) as e:
        store.read(s)
    assert s.file in str(e.value)
    got = store.probe([s])
    assert not got.present[0] and got.errno[0] == errno.ENODATA
    still_works(store)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": -1},
        {"offset": -1},
        {"offset": 2**63 - 1},
        {"rows": 2**63 - 1},
        {"rows": 2**64 - 1},
        {"shape": (2**40, 2**40)},
        {"shape": (-1,)},
        {"dtype": ">i4"},
        {"dtype": "uint12"},
    ],
    ids=str,
)
def test_a_segment_that_cannot_be_is_a_value_error(store, change):
    """Promise: overflowing, negative, unknown and big-endian claims never reach the file."""
    s = msgspec.structs.replace(good(store), **change)
    with frugal(), pytest.raises(ValueError) as e:
        store.read(s)
    assert s.file in str(e.value)
    got = store.probe([s])
    assert not got.present[0] and got.errno[0] == errno.EINVAL
    still_works(store)


def test_shapes_that_no_row_backs_allocate_nothing(store):
    """Promise: a segment that is hidden, elsewhere or empty cannot blow up the result."""
    s = good(store)
    huge = msgspec.structs.replace(s, shape=(10**12,), rows=1)
    real = store.write({"x": np.ones((10, 2), np.int32)}, version=0)["x"]
    with frugal():
        rows, _ = store.gather([huge, real], "x", 0, 10)
        assert rows.shape == (10, 2)
        for unbacked in (msgspec.structs.replace(huge, rows=0), msgspec.structs.replace(huge, pos=50)):
            rows, _ = store.gather([unbacked, real], "x", 0, 10)
            assert rows.shape == (10, 2)
            with pytest.raises(ValueError, match="claims rows"):
                store.gather([unbacked], "x", 0, 10)
    still_works(store)


def test_impossible_windows(store):
    """Promise: the caller's own window is checked too."""
    s = good(store)
    for lo, hi in [(-1, 3), (5, 4), (0, 2**63), (0, 2**70)]:
        with frugal(), pytest.raises(ValueError):
            store.gather([s], "x", lo, hi)
    with frugal(), pytest.raises((ValueError, MemoryError)):
        store.gather([s], "x", 0, 2**62)
    still_works(store)


def test_counts_that_ask_for_more_than_there_is(store):
    """Promise: lying counts never read past their values or blow up a result."""
    for counts in ([1, 2, 2], [-1, 1, 1], [2**62, 2**62, 0], [2**63 - 1] * 3):
        made = store.write({"r.counts": np.array(counts), "r.values": np.zeros((4, 2))}, version=0)
        with frugal(), pytest.raises(CorruptPayloadError, match="counts ask for"):
            store.gather_ragged(made.values(), "r", 0, 3)
    still_works(store)


NAMES = [
    "../outside/x.safetensors",
    "v0/../../outside/x.safetensors",
    "/etc/passwd",
    "",
    ".",
    "..",
    "v0/",
    "v0//x",
    "v0/.",
    "v0/a b",
    "v0/x\0y",
    "v0/" + "x" * 300,
    "v0/.tmp-1-2-3-4",
    "STORE/x",
]
MISSING = ["v0/.tmp-1-2-3-4", "STORE/x"]  # names that could be a file's, of which there is none


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_elsewhere(store, name):
    """Promise: no name from data opens, measures or removes anything outside the version directories."""
    outside = Path(store.root).parent / "outside" / "x.safetensors"
    outside.parent.mkdir()
    outside.write_bytes((Path(store.root) / good(store).file).read_bytes())
    before = outside.stat()
    s = PayloadSegment("x", name, 0, 0, 1, "uint8", ())
    with frugal():
        for call in (lambda: store.read(s), lambda: store.segments(name)):
            with pytest.raises((ValueError, OSError)):
                call()
        got = store.probe([s, name])
        assert not got.present.any() and got.errno.all()
        for result in (*store.reclaim([name]), *store.sync([name])):
            assert isinstance(result, Exception) or (name in MISSING and result == -1)
    after = outside.stat()
    assert (after.st_ino, after.st_size, after.st_nlink) == (before.st_ino, before.st_size, before.st_nlink)
    assert (Path(store.root) / "STORE").exists()
    still_works(store)


def test_the_stores_own_files_are_no_payloads(store):
    """Bug: reclaim(["STORE"]) removed the store's identity; link back and pin took such names too."""
    own = ["STORE", "LOCK", "x/STORE", "v1/x/STORE", "v01/x"]
    pins = [(name, 0, []) for name in own]
    commit = _native.Commit(os.fspath(Path(store.root).parent / "checkpoints"), 1, "orchestrator")
    for door in (store, store.native):
        assert all(isinstance(r, ValueError) for r in door.reclaim(own))
        assert all(isinstance(r, ValueError) for r in door.link_back(store.root, pins))
    assert all(isinstance(r, ValueError) for r in commit.pin(store.native, own))
    commit.abort()
    assert (Path(store.root) / "STORE").exists() and (Path(store.root) / "LOCK").exists()


def test_links_are_never_followed(store):
    """Promise: a symbolic link is an error, as a file and as a directory on the way, and stays as it is."""
    root = Path(store.root)
    outside = root.parent / "outside"
    outside.mkdir()
    s = good(store)
    (outside / "x.safetensors").write_bytes((root / s.file).read_bytes())
    (root / "v0" / "link.safetensors").symlink_to(outside / "x.safetensors")
    (root / "v1").symlink_to(outside)
    (root / "v0" / "inside.safetensors").symlink_to(root / s.file)
    for name in ("v0/link.safetensors", "v1/x.safetensors", "v0/inside.safetensors"):
        linked = msgspec.structs.replace(s, file=name)
        with frugal():
            for call in (lambda n=linked: store.read(n), lambda n=name: store.segments(n)):
                with pytest.raises(OSError) as e:
                    call()
                assert not isinstance(e.value, FileNotFoundError) and e.value.errno
            got = store.probe([linked, name])
            assert not got.present.any()
            assert not (got.errno == errno.ENOENT).any() and got.errno.all()
    store.reclaim(["v1/x.safetensors"])
    assert (outside / "x.safetensors").exists()
    still_works(store)


def test_what_is_no_regular_file(store):
    """Promise: a directory or a FIFO in a file's place is an error at once; nothing waits for a writer."""
    s = good(store)
    root = Path(store.root)
    (root / "v0" / "dir.safetensors").mkdir()
    os.mkfifo(root / "v0" / "fifo.safetensors")
    for name in ("v0/dir.safetensors", "v0/fifo.safetensors"):
        odd = msgspec.structs.replace(s, file=name)
        with frugal():
            for call in (lambda o=odd: store.read(o), lambda n=name: store.segments(n)):
                with pytest.raises((OSError, ValueError)) as e:
                    call()
                assert not isinstance(e.value, FileNotFoundError) and name in str(e.value)
            got = store.probe([odd, name])
        assert not got.present.any() and got.errno.tolist() == [errno.EINVAL] * 2
    still_works(store)


def as_nobody(call):
    """Run `call` in a child that is not root; whether it returned True."""
    pid = os.fork()
    if pid == 0:
        ok = False
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            ok = call()
        finally:
            os._exit(0 if ok is True else 1)
    return os.waitpid(pid, 0)[1] == 0


def test_what_may_not_be_read_is_never_called_missing(store):
    """Promise: EACCES is an error; it is never reported as missing, so no work is dropped for it."""
    s = good(store)
    os.chmod(store.root, 0o755)

    def refused(call):
        try:
            call()
        except PermissionError as e:
            return e.errno == errno.EACCES
        return False

    assert as_nobody(lambda: store.read(s).tolist() == list(range(10)))
    os.chmod(Path(store.root) / s.file, 0)
    assert as_nobody(lambda: refused(lambda: store.read(s)) and refused(lambda: store.segments(s.file)))
    os.chmod(Path(store.root) / "v0", 0)
    try:
        assert as_nobody(lambda: refused(lambda: store.read(s)))
        assert as_nobody(lambda: store.probe([s, "v0/x"]).errno.tolist() == [errno.EACCES] * 2)
    finally:
        os.chmod(Path(store.root) / "v0", 0o755)


def test_a_bad_request_leaves_its_batch_alone(store):
    """Promise: in a batch each lie is its own item's error."""
    s = good(store)
    lies = [{"rows": 10**12}, {"rows": -1}, {"file": "../x"}, {"file": "v0/gone"}, {"dtype": "?"}]
    requests = [
        Gather(segments=[msgspec.structs.replace(s, **lie)], field="x", lo=0, hi=10)
        for lie in ({}, *lies, {})
    ]
    with frugal():
        results = store.gather_many(requests)
    assert [isinstance(r, Exception) for r in results] == [False, *[True] * len(lies), False]
    assert results[0][0].tolist() == results[-1][0].tolist() == list(range(10))
