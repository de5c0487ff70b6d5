"""The native engine on names rather than rows: probe, reclaim, scan, retire, sync, small files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from native import publish
from prime_io import PayloadSegment
from prime_io._native import Commit, Root, Store, xxh3


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"), owner=True)


def small(store: Store, version: int = 1) -> str:
    return publish(store, version, x=np.arange(5, dtype=np.uint8))["x"].file


def probe(
    store: Store, asked: list[str | PayloadSegment], **kw: object
) -> tuple[list[int], list[int], list[int]]:
    present, sizes, errors = store.probe(asked, **kw)
    assert isinstance(present, bytearray) and isinstance(sizes, bytearray)
    columns = (present, np.uint8), (sizes, np.int64), (errors, np.int32)
    return tuple(np.frombuffer(data, dtype).tolist() for data, dtype in columns)


def test_all_ways_to_probe_agree(store: Store) -> None:
    # Promise: auto, scan, stat and io_uring answer alike, whatever is asked and however much of it.
    good = [small(store, version) for version in (1, 1, 2)]
    os.mkfifo(f"{store.root}/v1/fifo")
    os.mkdir(f"{store.root}/v1/dir")
    os.symlink(Path(good[0]).name, f"{store.root}/v1/link")
    odd = ["v1/fifo", "v1/dir", "v1/link", "v1/gone", "v9/gone", "../x", "/etc/passwd", "", "v1/.tmp-x"]
    files = [*good, *odd, good[0]]
    size = os.path.getsize(f"{store.root}/{good[0]}")
    expect = [0, 0, 0, *[errno.EINVAL] * 2, errno.ELOOP, *[errno.ENOENT] * 2, *[errno.EINVAL] * 4, 0]
    for method in ("auto", "scan", "stat", "uring"):
        present, sizes, errors = probe(store, files, method=method)
        assert errors == expect and present == [e == 0 for e in expect] and set(sizes) == {-1}
        _, sizes, errors = probe(store, files, method=method, sizes=True)
        assert errors == expect and [sizes[0], sizes[3]] == [size, -1]
        needs = [size, size + 1, 0, *[0] * 9, size + 1]
        claims = [PayloadSegment("x", f, 0, 0, n, "uint8", ()) for f, n in zip(files, needs, strict=True)]
        present, sizes, errors = probe(store, claims, method=method)
        assert [errors[i] for i in (0, 1, 2, 12)] == [0, errno.ENODATA, 0, errno.ENODATA]
        assert present[:3] == [1, 0, 1] and sizes[1] == size
        assert probe(store, files * 50, method=method)[2] == expect * 50
        assert probe(store, [], method=method) == ([], [], [])


def test_probe_refuses_nonsense(store: Store) -> None:
    # Promise: the caller's mistakes raise at once.
    with pytest.raises(ValueError):
        store.probe(["v1/a", "v1/b"], method="guess")
    for wrong in ("v1/a", ["v1/a", 3], [None]):
        with pytest.raises(TypeError):
            store.probe(wrong)  # type: ignore[arg-type]


def test_probe_of_segments_that_cannot_be(store: Store) -> None:
    # Promise: what no file could hold is an answer, EINVAL, and its neighbours are answered.
    file = small(store)
    good = PayloadSegment("x", file, 0, 0, 1, "uint8", ())
    impossible = [
        replace(good, offset=-1),
        replace(good, rows=-1),
        replace(good, rows=2**62, shape=(4,)),
        replace(good, offset=2**63),
        replace(good, pos=2**63 - 1),
        replace(good, dtype="uint7"),
        replace(good, shape=(-1,)),
        replace(good, shape=[1]),
        replace(good, file=7),
        replace(good, file="v1/\udcff"),
    ]
    present, _, errors = probe(store, [good, *impossible, replace(good, pos=-3)])
    assert errors == [0, *[errno.EINVAL] * len(impossible), 0] and sum(present) == 2


def test_only_the_owner_reclaims(store: Store) -> None:
    # Promise: one process deletes; missing is fine; nothing outside is touched.
    file = small(store)
    size = os.path.getsize(f"{store.root}/{file}")
    with pytest.raises(PermissionError):
        Store(store.root).reclaim([file])
    with pytest.raises(PermissionError):
        Store(store.root).retire(1)
    outside = Path(store.root).parent / "outside"
    outside.touch()
    os.symlink(outside, f"{store.root}/v1/link")
    first, again, bad, link = store.reclaim([file, "v1/gone", "../outside", "v1/link"])
    assert (first, again) == (size, -1) and isinstance(bad, ValueError) and isinstance(link, OSError)
    assert outside.exists() and not os.path.exists(f"{store.root}/{file}")


def test_many_files_of_some_directories_answer_in_order(store: Store, tmp_path: Path) -> None:
    # Promise: pins and reclaims of more files than a thread takes at a time, missing and bad ones among them,
    # answer in the order of the question, in every directory.
    made = [publish(store, i % 3, x=np.zeros(i + 1, np.uint8))["x"].file for i in range(300)]
    sizes = [os.path.getsize(f"{store.root}/{file}") for file in made]
    ask = [
        name
        for i, file in enumerate(made)
        for name in ((file, f"v1/no{i}", "../x") if i % 7 == 0 else (file,))
    ]
    want = [n for i, size in enumerate(sizes) for n in ((size, -1, None) if i % 7 == 0 else (size,))]
    commit = Commit(str(tmp_path / "checkpoints"), 1, "orchestrator")
    for answer, size in zip(commit.pin(store, ask), want, strict=True):
        if size is not None and size >= 0:
            assert answer == (size, "link")
        else:
            assert isinstance(answer, FileNotFoundError if size == -1 else ValueError)
    commit.abort()
    for answer, size in zip(store.reclaim(ask), want, strict=True):
        assert isinstance(answer, ValueError) if size is None else answer == size
    assert store.scan() == []


def test_scan_and_retire(store: Store) -> None:
    # Promise: scan tells ours from temporaries and strangers; retire removes one version.
    one, two = small(store, 1), small(store, 12)
    Path(store.root, "v1/notes.txt").write_text("mine")
    found = {file: (size, kind) for file, size, _, kind in store.scan()}
    size = os.path.getsize(f"{store.root}/{one}")
    assert found == {one: (size, "payload"), two: (size, "payload"), "v1/notes.txt": (4, "foreign")}
    mtimes = {file: mtime for file, _, mtime, _ in store.scan()}
    assert mtimes[one] == os.stat(f"{store.root}/{one}").st_mtime_ns
    assert store.versions() == [1, 12]
    assert store.retire(12) and not store.retire(12) and store.versions() == [1]
    assert (store.empty_trash(), store.empty_trash()) == (1, 0)
    with pytest.raises(ValueError, match="negative"):
        store.retire(-1)


def test_sync_answers_per_file(store: Store) -> None:
    # Promise: None or the OSError of each file.
    done, gone = store.sync([small(store), "v1/gone"])
    assert done is None and type(gone) is FileNotFoundError and gone.filename == "v1/gone"


def test_small_files(tmp_path: Path) -> None:
    # Promise: atomic writes, exclusive names, bounded reads, durable renames; types of errors.
    with pytest.raises(FileNotFoundError):
        Root(str(tmp_path / "run"))
    root = Root(str(tmp_path / "run"), create=True)
    root.write("a/b/c.json", b"{}")
    root.write("a/b/c.json", np.arange(3, dtype=np.uint8), durable=False)
    assert root.read("a/b/c.json") == b"\x00\x01\x02"
    with pytest.raises(ValueError):
        root.read("a/b/c.json", limit=2)
    with pytest.raises(FileExistsError) as caught:
        root.write("a/b/c.json", b"", exclusive=True)
    assert caught.value.filename == "a/b/c.json"
    assert root.list() == [("a", True)] and root.list("a/b") == [("c.json", False)] and root.list("x") == []
    root.rename("a/b", "moved/here")
    assert root.hash(["moved/here/c.json"]) == [(3, xxh3(b"\x00\x01\x02"))]
    [gone] = root.hash(["a/b/c.json"])
    assert type(gone) is FileNotFoundError
    with pytest.raises(FileExistsError):
        root.write("x", b"") or root.rename("x", "moved/here")
    root.remove("moved")
    root.remove("moved")
    for name in ["../x", "/x", "a/../x", ".hidden", ""]:
        with pytest.raises(ValueError):
            root.write(name, b"")
    assert [name for name, _ in root.list()] in (["a", "x"], ["x", "a"])
