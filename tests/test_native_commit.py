"""The native engine on checkpoints: commit a component, pin payloads, link them back."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from native import gather, publish
from prime_io._native import Commit, CorruptPayloadError, Store, xxh3


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"), owner=True)


def test_a_component_is_visible_once_finished(store: Store, tmp_path: Path) -> None:
    # Promise: nothing under the final name before finish; pins are links; state files are hashed.
    segment = publish(store, x=np.arange(9, dtype=np.uint16))["x"]
    size = os.path.getsize(f"{store.root}/{segment.file}")
    checkpoints = tmp_path / "checkpoints"
    commit = Commit(str(checkpoints), 5, "orchestrator")
    pinned, gone = commit.pin(store, [segment.file, "v1/gone"])
    assert pinned == (size, "link") and type(gone) is FileNotFoundError
    assert commit.write("state.msgpack", bytearray(b"abc")) == (3, xxh3(b"abc"))
    done = checkpoints / "step_5" / "orchestrator"
    assert not done.exists()
    commit.finish(b"{}")
    assert (done / "manifest.json").read_bytes() == b"{}" and (done / "state.msgpack").read_bytes() == b"abc"
    assert os.path.samefile(done / "payloads" / segment.file, f"{store.root}/{segment.file}")
    with pytest.raises(FileExistsError):
        Commit(str(checkpoints), 5, "orchestrator").finish(b"{}")
    assert sorted(os.listdir(checkpoints)) == ["step_5"]
    commit.abort()
    assert done.exists()


def test_an_aborted_component_leaves_nothing(tmp_path: Path) -> None:
    # Promise: abort and drop remove what was made; a negative step is the caller's mistake.
    checkpoints = tmp_path / "checkpoints"
    one = Commit(str(checkpoints), 1, "a")
    one.write("x", b"1")
    one.abort()
    one.abort()
    two = Commit(str(checkpoints), 1, "a")
    del two
    assert os.listdir(checkpoints) == []
    with pytest.raises(ValueError, match="step is negative"):
        Commit(str(checkpoints), -1, "a")


def test_an_existing_directory_is_adopted(tmp_path: Path) -> None:
    # Promise: a trainer's own directory becomes the component, every file hashed.
    own = tmp_path / "checkpoints" / "work"
    (own / "sub").mkdir(parents=True)
    (own / "sub" / "w.bin").write_bytes(b"weights")
    commit = Commit(str(tmp_path / "checkpoints"), 2, "trainer", adopt=str(own))
    assert commit.files() == [("sub/w.bin", 7, xxh3(b"weights"))]
    commit.finish(memoryview(b"{}"))
    done = tmp_path / "checkpoints" / "step_2" / "trainer"
    assert (done / "sub" / "w.bin").read_bytes() == b"weights" and not own.exists()


def test_pins_are_linked_back(store: Store, tmp_path: Path) -> None:
    # Promise: a released file comes back under its name; a torn pin never does.
    array = np.arange(3000, dtype=np.uint32)
    segment = publish(store, x=array)["x"]
    size = os.path.getsize(f"{store.root}/{segment.file}")
    commit = Commit(str(tmp_path / "checkpoints"), 1, "orchestrator")
    commit.pin(store, [segment.file])
    commit.finish(b"{}")
    pins = str(tmp_path / "checkpoints/step_1/orchestrator/payloads")
    pin = (segment.file, size, [segment.checksum])
    assert store.link_back(pins, [pin]) == ["present"]
    store.reclaim([segment.file])
    assert store.link_back(pins, [pin]) == ["linked"]
    rows, _ = gather(store, [segment], 0, 3000, verify=True)
    assert (rows == array).all()
    wrong, other, gone = store.link_back(
        pins,
        [(segment.file, size + 1, []), (segment.file, size, ["0" * 16]), ("v1/gone", 1, [])],
    )
    assert type(wrong) is type(other) is CorruptPayloadError and type(gone) is FileNotFoundError
    # A checkpoint without pins has no directory of them: what is there is present all the same.
    present, gone = store.link_back(pins + "/none", [pin, ("v1/gone", 1, [])])
    assert present == "present" and type(gone) is FileNotFoundError
    with pytest.raises(ValueError, match="negative"):
        store.link_back(pins, [(segment.file, -1, [])])
