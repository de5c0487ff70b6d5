"""A disk that is full: the error says so and names the file, and nothing of it is left behind."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from prime_io import _native
from prime_io.store import PayloadStore

ROOM = 4 << 20
TOO_MUCH = np.ones(8 << 20, np.uint8)


@pytest.fixture(params=["bytes", "inodes"])
def full(request, tmp_path):
    """A small filesystem of its own, and how it runs full: of bytes, or of names for files."""
    mount = tmp_path / "disk"
    mount.mkdir()
    options = f"size={ROOM},nr_inodes={10_000 if request.param == 'bytes' else 12}"
    if not shutil.which("mount"):
        pytest.skip("mounting a small tmpfs takes mount(8)")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", mount], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"mounting a small tmpfs takes root: {done.stderr.strip()}")
    try:
        yield mount, request.param
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def files(mount):
    return sorted(str(p.relative_to(mount)) for p in mount.rglob("*") if p.is_file())


def exhaust(mount):
    """Take every inode that is left; returns the files that did."""
    taken = []
    try:
        while True:
            taken.append(mount / f"taken-{len(taken)}")
            taken[-1].touch()
    except OSError as e:
        assert e.errno == errno.ENOSPC
    return taken[:-1]


def check(error, path):
    assert type(error) is OSError and error.errno == errno.ENOSPC
    assert error.filename == path or (path.endswith("*") and error.filename.startswith(path[:-1]))
    assert "No space left" in str(error)


def test_a_payload_that_does_not_fit(full):
    """Promise: publish, one or many, durable or not: ENOSPC with the file's name, no temporary, and it goes on."""
    mount, lack = full
    with PayloadStore(mount / "store", owner=True) as store:
        kept = store.write({"x": np.arange(5)}, version=1)["x"]
        taken = exhaust(mount) if lack == "inodes" else []
        before = files(mount)
        tensors = {"x": TOO_MUCH if lack == "bytes" else np.arange(3)}
        for durable in (False, True):
            with pytest.raises(OSError) as e:
                store.write(tensors, version=1, durable=durable)
            check(e.value, "v1/*")
            results = store.write_many([tensors] * 3, version=1, durable=durable)
            assert len({error.filename for error in results}) == 3
            for error in results:
                check(error, "v1/*")
        assert files(mount) == before
        if taken:
            with pytest.raises(OSError) as e:
                store.write(tensors, version=2)
            check(e.value, "v2")
        for path in taken:
            path.unlink()
        again = store.write({"x": np.arange(6)}, version=1)["x"]
        assert len(store.read(kept, verify=True)) == 5 and len(store.read(again, verify=True)) == 6


def test_a_stream_that_does_not_fit(full):
    """Promise: an append or a close without space removes the file; the writer takes nothing more."""
    mount, lack = full
    with PayloadStore(mount / "store", owner=True) as store:
        store.write({"x": np.arange(5)}, version=1)
        before = files(mount)
        writer = store.writer(version=1)
        if lack == "bytes":
            assert writer.append("x", TOO_MUCH[: 1 << 20]).pos == 0
            taken = []
        else:
            taken = exhaust(mount)
        with pytest.raises(OSError) as e:
            writer.append("x", TOO_MUCH)
        check(e.value, "v1/*")
        with pytest.raises(ValueError, match="void"):
            writer.close()
        for path in taken:
            path.unlink()
        assert files(mount) == before
        if lack == "bytes":
            # Room for the rows but not for the header, which comes last.
            writer = store.writer(version=1)
            writer.append("x", np.arange(100))
            with open(mount / "filler", "wb", buffering=0) as filler, pytest.raises(OSError):
                while filler.write(bytes(4096)):
                    pass
            with pytest.raises(OSError) as e:
                writer.close()
            check(e.value, "v1/*")
            os.unlink(mount / "filler")
        assert files(mount) == before
        with store.writer(version=1) as writer:
            segment = writer.append("x", np.arange(100))
        assert len(store.read(segment, verify=True)) == 100


def test_a_small_file_that_does_not_fit(full):
    """Promise: Root.write leaves what was there, and no temporary."""
    mount, lack = full
    root = _native.Root(os.fspath(mount / "run"), create=True)
    root.write("a/state", b"old")
    taken = exhaust(mount) if lack == "inodes" else []
    before = files(mount)
    data = TOO_MUCH if lack == "bytes" else b"new"
    for durable in (False, True):
        for name in ("a/state", "a/fresh"):
            with pytest.raises(OSError) as e:
                root.write(name, data, durable=durable)
            check(e.value, name)
        with pytest.raises(OSError) as e:
            root.write("a/only", data, durable=durable, exclusive=True)
        check(e.value, "a/only")
    assert files(mount) == before and root.read("a/state") == b"old"
    for path in taken:
        path.unlink()
    root.write("a/state", b"new")
    assert root.read("a/state") == b"new"
    assert not [p for p in Path(mount).rglob(".tmp*")]
