"""Every engine gives the same rows and the same errors, cold and warm, allowed and blocked."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.mounts import mounts_below, need_root

from prime_io import engine_report
from prime_io._native import CorruptPayloadError, engine_counts, try_uring, xxh3
from prime_io.segment import PayloadSegment, clip
from prime_io.store import Gather, PayloadStore

ENGINES = ("threads", "uring", "auto")


def uring_or_skip() -> None:
    try:
        try_uring()
    except OSError as e:
        pytest.skip(f"no io_uring here: {e.strerror}")


def forget(root: Path, files: set[str]) -> None:
    """Make the page cache drop files."""
    for file in files:
        fd = os.open(root / file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def payload(store: PayloadStore, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, PayloadSegment]]:
    """Three tensors of one file: the first starts on a page, the others anywhere."""
    rng = np.random.default_rng(seed)
    tensors = {
        "wide": rng.integers(0, 2**31, (300_000, 3), dtype=np.int64),
        "odd": rng.integers(0, 256, (700_001, 7), dtype=np.uint8),
        "small": rng.integers(0, 2**16, (5, 3), dtype=np.uint16),
    }
    return tensors, store.write(tensors, version=1)


def asked(segments: dict[str, PayloadSegment]) -> list[Gather]:
    """Whole and clipped, equal, widened and narrow, into pooled memory and into arrays that start anywhere."""
    wide, odd, small = (segments[name] for name in ("wide", "odd", "small"))
    out = np.zeros(odd.rows * 7 + 16, np.uint8)[3:]
    return [
        Gather(segments=[wide], field="wide", lo=0, hi=wide.rows),
        Gather(segments=clip([wide], 77_777, 233_333), field="wide", lo=70_000, hi=240_000, fill=7),
        Gather(segments=[odd], field="odd", lo=0, hi=odd.rows, out=out[: odd.rows * 7].reshape(-1, 7)),
        Gather(segments=[odd], field="odd", lo=1, hi=odd.rows - 1, dtype="int16"),
        Gather(segments=[odd], field="odd", lo=0, hi=1000, out=np.zeros((1000, 9), np.uint8), fill="spread"),
        Gather(segments=[small], field="small", lo=0, hi=9, dtype="int32", fill=3),
    ]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("cold", [False, True])
def test_every_engine_gives_the_same_rows(tmp_path: Path, cold: bool, verify: bool) -> None:
    # Promise: what reads, and whether the page cache has it, changes nothing but the time.
    uring_or_skip()
    with PayloadStore(tmp_path) as store:
        tensors, segments = payload(store)
    found: dict[str, list[Any]] = {}
    for engine in ENGINES:
        with PayloadStore(tmp_path, engine=engine) as store:
            if cold:
                forget(tmp_path, {s.file for s in segments.values()})
            before = engine_counts()
            found[engine] = list(store.gather_many(asked(segments), verify=verify))
            ran = {k: n - before[k] for k, n in engine_counts().items()}
            assert ran["uring"] == (engine == "uring" or (engine == "auto" and cold))
            assert ran["threads"] == 1 - ran["uring"] and not ran["blocked"]
            assert not ran["direct"] or (cold and ran["uring"])
    rows = [r[0] for r in found["threads"]]
    assert (rows[0] == tensors["wide"]).all() and (rows[2] == tensors["odd"]).all()
    assert (rows[1][7_777:163_333] == tensors["wide"][77_777:233_333]).all() and (rows[1][:7_777] == 7).all()
    assert (rows[3] == tensors["odd"][1:-1]).all() and (rows[4][:, :7] == tensors["odd"][:1000]).all()
    assert (rows[5][:5] == tensors["small"]).all() and (rows[5][5:] == 3).all()
    for engine in ("uring", "auto"):
        for one, other in zip(found["threads"], found[engine], strict=True):
            assert all((a == b).all() and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


def told(result: object) -> tuple[object, ...]:
    assert isinstance(result, Exception)
    code, name = (result.errno, result.filename) if isinstance(result, OSError) else (None, None)
    return type(result), code, name, str(result)


@pytest.mark.parametrize("cold", [False, True])
def test_every_engine_gives_the_same_errors(tmp_path: Path, cold: bool) -> None:
    # Promise: type, errno, file name and words of an error do not tell which engine met it.
    uring_or_skip()
    with PayloadStore(tmp_path) as store:
        _, good = payload(store)
        _, torn = payload(store)
        _, short = payload(store)
        _, gone = payload(store)
    with open(tmp_path / torn["odd"].file, "r+b") as f:
        f.seek(torn["odd"].offset + 1_234_567)
        byte = f.read(1)
        f.seek(-1, 1)
        f.write(bytes([byte[0] ^ 1]))
    os.truncate(tmp_path / short["odd"].file, short["odd"].offset + 1_000_000)
    os.unlink(tmp_path / gone["odd"].file)
    batch = [Gather(segments=[s["odd"]], field="odd", lo=0, hi=700_001) for s in (torn, short, good, gone)]
    found = {}
    for engine in ENGINES:
        with PayloadStore(tmp_path, engine=engine) as store:
            if cold:
                forget(tmp_path, {s["odd"].file for s in (torn, short, good)})
            results = store.gather_many(batch, verify=True)
            assert not isinstance(results[2], Exception)
            found[engine] = [told(results[i]) for i in (0, 1, 3)]
    assert [e[0] for e in found["threads"]] == [CorruptPayloadError, CorruptPayloadError, FileNotFoundError]
    assert found["uring"] == found["threads"] == found["auto"]


def blocked(code: int) -> None:
    """A seccomp filter under which io_uring_setup fails, as in containers; for this process and its threads."""
    load, equal, give, allow = 0x20, 0x15, 0x06, 0x7FFF0000
    number = 425
    program = [(load, 0, 0, 0), (equal, 0, 1, number), (give, 0, 0, 0x00050000 | code), (give, 0, 0, allow)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))

    class Program(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    filter_ = Program(len(program), ctypes.addressof(text))
    no_new_privs, set_seccomp, by_filter = 38, 22, 2
    assert libc.prctl(no_new_privs, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, by_filter, ctypes.byref(filter_)) == 0, os.strerror(ctypes.get_errno())


def without_locked_memory() -> None:
    """RLIMIT_MEMLOCK 0 and none of root's ways around it."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)


def child(root: Path, how: str, *, code: int = 0) -> dict[str, Any]:
    """Gather cold files in a process of its own; what it read (as hashes), and what it says of engines."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_engine", str(root), how, str(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def in_child(root: Path, how: str, code: int) -> dict[str, Any]:
    if how == "seccomp":
        blocked(code)
    elif how == "memlock":
        without_locked_memory()
    elif how == "descriptors":
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    segments = msgspec.json.decode((root / "segments.json").read_bytes(), type=list[PayloadSegment])
    answer: dict[str, Any] = {"rows": {}}
    forced: list[Any] = [0, ""]
    for engine in ("auto", "threads", "uring"):
        forget(root, {s.file for s in segments})
        try:
            store = PayloadStore(root, create=False, engine=engine)
        except OSError as e:
            forced = [e.errno, str(e.strerror)]
            continue
        with store:
            batch = [Gather(segments=[s], field="odd", lo=0, hi=s.rows, dtype="uint16") for s in segments]
            results = store.gather_many(batch, verify=True)
            answer["rows"][engine] = [xxh3(r[0]) if isinstance(r, tuple) else str(r) for r in results]
    report = engine_report()
    waves = [report.thread_waves, report.uring_waves, report.blocked_waves]
    return {**answer, "forced": forced, "errno": report.errno, "waves": waves, "text": str(report)}


@pytest.fixture
def cold_store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    with PayloadStore(root) as store:
        written = [payload(store, seed)[1]["odd"] for seed in range(3)]
    (root / "segments.json").write_bytes(msgspec.json.encode(written))
    for directory, _, files in os.walk(tmp_path):
        os.chmod(directory, 0o755)
        for file in files:
            os.chmod(os.path.join(directory, file), 0o644)
    return root


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_a_blocked_ring_falls_back_and_is_told(cold_store: Path, code: int) -> None:
    # Promise: where a container blocks io_uring, auto reads the same by threads without a word, the report says
    # why, and a forced "uring" is refused at construction with what to do.
    free, held = child(cold_store, "free"), child(cold_store, "seccomp", code=code)
    assert held["rows"]["auto"] == held["rows"]["threads"] and len(held["rows"]["auto"]) == 3
    assert "uring" not in held["rows"] and held["forced"][0] == code and 'engine="auto"' in held["forced"][1]
    assert held["errno"] == code and held["waves"][1] == 0 and held["waves"][2] == 1
    assert "by threads (1 for want of a ring)" in held["text"]
    if free["errno"] == 0:
        assert free["waves"] == [1, 2, 0] and free["rows"]["uring"] == free["rows"]["threads"]
        assert "io_uring when cold" in free["text"]


def test_no_locked_memory_changes_no_result(cold_store: Path) -> None:
    # Promise: RLIMIT_MEMLOCK 0, which kernels before 5.12 hold against rings, costs speed at most.
    need_root()  # to become somebody without capabilities
    for directory in [cold_store, *cold_store.parents][:-2]:
        if not os.stat(directory).st_mode & 0o001:
            os.chmod(directory, 0o755)
    found = child(cold_store, "memlock")
    assert found["rows"]["auto"] == found["rows"]["threads"] and len(found["rows"]["auto"]) == 3
    assert found["errno"] in (0, errno.ENOMEM, errno.EPERM)
    assert ("uring" in found["rows"]) == (found["errno"] == 0)


def test_the_sysctl_that_disables_io_uring(cold_store: Path) -> None:
    # Promise: kernel.io_uring_disabled is one more way of being blocked.
    need_root()
    switch = Path("/proc/sys/kernel/io_uring_disabled")
    if not switch.exists():
        pytest.skip("this kernel has no io_uring_disabled")
    before = switch.read_text()
    try:
        switch.write_text("2")
        found = child(cold_store, "free")
    finally:
        switch.write_text(before)
    assert found["rows"]["auto"] == found["rows"]["threads"]
    assert (found["errno"], found["forced"][0]) == (errno.EPERM, errno.EPERM)


def test_few_descriptors_are_enough(tmp_path: Path) -> None:
    # Promise: 150 files under `ulimit -n 64`, on each engine.
    uring_or_skip()
    root = tmp_path / "store"
    with PayloadStore(root) as store:
        tensors = [{"odd": np.full((4000, 7), i, np.uint8)} for i in range(150)]
        written = [r["odd"] for r in store.write_many(tensors, version=1) if isinstance(r, dict)]
    (root / "segments.json").write_bytes(msgspec.json.encode(written))
    found = child(root, "descriptors")
    expect = [xxh3(np.full((4000, 7), i, np.uint16)) for i in range(150)]
    assert all(found["rows"][engine] == expect for engine in ENGINES)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "fuse"])
def test_other_filesystems_read_the_same(tmp_path: Path, kind: str) -> None:
    # Promise: reads go around the page cache where that is known to be cold, never where nobody can tell (tmpfs,
    # a server's files); the rows are the same.
    uring_or_skip()
    with mounts_below(tmp_path) as mounts:
        if kind == "tmpfs":
            where = mounts.tmpfs("size=64m")
        elif kind == "fuse":
            where = mounts.without_links("EPERM")
        else:
            where = mounts.image("ext4", 64 << 20)
        with PayloadStore(where) as store:
            tensors, segments = payload(store)
        for engine in ENGINES:
            with PayloadStore(where, engine=engine) as store:
                forget(where, {segments["wide"].file})
                before = engine_counts()
                assert (store.read(segments["wide"], verify=True) == tensors["wide"]).all()
                ran = {k: n - before[k] for k, n in engine_counts().items()}
                assert ran["direct"] == (kind == "ext4" and engine != "threads")
                results = store.gather_many(asked(segments), verify=True)
                assert not any(isinstance(r, Exception) for r in results)
                assert (results[2][0] == tensors["odd"]).all()


def test_a_read_that_is_refused_is_done_again(tmp_path: Path) -> None:
    # Promise: EINVAL at the first read of a ring, as from filesystems that took O_DIRECT and do not mean it, is
    # answered by plain reads.
    uring_or_skip()
    with mounts_below(tmp_path) as mounts:
        where = mounts.refusing_reads()
        with PayloadStore(where) as store:
            tensors, segments = payload(store)
        with PayloadStore(where, engine="uring") as store:
            assert (store.read(segments["wide"]) == tensors["wide"]).all()


if __name__ == "__main__":
    print(json.dumps(in_child(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
