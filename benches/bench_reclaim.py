"""Names of payload files: second ones made (pins), first ones taken away (reclaim), whole versions retired."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from duel import Entry
from rows import Rows, mount_of
from slowfs import slowfs

from prime_io import PayloadStore, _native

SIZE = 4096


class Files:
    """A store of `n` files over `directories` version directories, reached by `seen` and prepared behind it.

    `behind` is the same directory where a call takes no time, for what is not measured. A second link of each file
    in `bank` brings its name back after a round.
    """

    def __init__(self, behind: Path, seen: Path, n: int, *, directories: int) -> None:
        self.behind, self.seen = behind, seen
        self.names = [f"v{i % directories}/{i:016x}.safetensors" for i in range(n)]
        self.directories = [f"v{k}" for k in range(directories)]
        with PayloadStore(behind / "store"):
            pass
        (behind / "checkpoints").mkdir()
        for directory in self.directories:
            (behind / "store" / directory).mkdir()
            (behind / "bank" / directory).mkdir(parents=True)
        for name in self.names:
            file = os.open(behind / "store" / name, os.O_CREAT | os.O_WRONLY, 0o644)
            os.write(file, bytes(SIZE))
            os.close(file)
            os.link(behind / "store" / name, behind / "bank" / name)
        self.store = PayloadStore(seen / "store", create=False, owner=True)
        self._commit: _native.Commit | None = None

    def restore(self) -> None:
        for name in self.names:
            if not os.path.exists(self.behind / "store" / name):
                os.link(self.behind / "bank" / name, self.behind / "store" / name)

    # --- links

    def pin(self) -> Any:
        """As a checkpoint pins files whose bytes are durable."""
        self._commit = _native.Commit(str(self.seen / "checkpoints"), 1, "orchestrator")
        return self._commit.pin(self.store.native, self.names)

    def check_pins(self, made: Any) -> None:
        assert made == [(SIZE, "link")] * len(self.names)

    def unpin(self) -> None:
        assert self._commit is not None
        shutil.rmtree(next(path for path in (self.behind / "checkpoints").iterdir()))
        self._commit = None

    def link(self) -> None:
        """The same by a loop."""
        root = self.seen / "checkpoints" / "pins"
        root.mkdir()
        for directory in self.directories:
            (root / directory).mkdir()
        for name in self.names:
            os.link(f"{self.seen}/store/{name}", f"{root}/{name}")

    def check_links(self, _: Any) -> None:
        pins = self.behind / "checkpoints" / "pins"
        assert all(os.stat(pins / name).st_nlink == 3 for name in self.names)

    def unlink_pins(self) -> None:
        shutil.rmtree(self.behind / "checkpoints" / "pins")

    # --- unlinks

    def reclaim(self) -> Any:
        return self.store.reclaim(self.names)

    def unlink(self) -> None:
        for name in self.names:
            os.unlink(f"{self.seen}/store/{name}")

    def check_gone(self, freed: Any) -> None:
        assert freed is None or all(isinstance(size, int) and size >= 0 for size in freed), freed[:3]
        assert not any(os.listdir(self.behind / "store" / directory) for directory in self.directories)

    def links(self) -> Sequence[Entry]:
        return (
            Entry(name="prime_io", run=self.pin, check=self.check_pins, after=self.unpin),
            Entry(name="os.link loop", run=self.link, check=self.check_links, after=self.unlink_pins),
        )

    def unlinks(self) -> Sequence[Entry]:
        return (
            Entry(name="prime_io", run=self.reclaim, check=self.check_gone, before=self.restore),
            Entry(name="os.unlink loop", run=self.unlink, check=self.check_gone, before=self.restore),
        )


def test_link(rows: Rows, disk: Path) -> None:
    """10,000 links into one directory. The kernel locks it: what threads win elsewhere they cannot win here."""
    files = Files(disk / "link", disk / "link", rows.size(10_000, 5_000), directories=1)
    n = len(files.names)
    times = rows.contest(
        f"link: {n:,} in one directory", files.links(), rounds=9, volume=n / 1e3, unit="k links"
    )
    rows.row("reclaim.link", times, rival="os.link loop")


def test_unlink(rows: Rows, disk: Path) -> None:
    """10,000 names out of one directory; ours says how many bytes each file had."""
    files = Files(disk / "unlink", disk / "unlink", rows.size(10_000, 5_000), directories=1)
    n = len(files.names)
    title = f"unlink: {n:,} in one directory"
    times = rows.contest(title, files.unlinks(), rounds=9, volume=n / 1e3, unit="k names")
    rows.row("reclaim.unlink", times, rival="os.unlink loop")


def test_slow_link(rows: Rows, disk: Path) -> None:
    """Links over 16 directories where each call takes 0.5 ms."""
    with slowfs(disk / "slow_link") as (behind, slow):
        files = Files(behind, slow, rows.size(10_000, 640), directories=16)
        title = f"link: {len(files.names):,} over 16 directories, 0.5 ms per call"
        times = rows.contest(title, files.links(), rounds=1, warm_up=False)
        rows.row("reclaim.slow_link", times, rival="os.link loop", note="one round")
        files.store.close()


def test_slow_unlink(rows: Rows, disk: Path) -> None:
    """Unlinks over 16 directories where each call takes 0.5 ms."""
    with slowfs(disk / "slow_unlink") as (behind, slow):
        files = Files(behind, slow, rows.size(10_000, 640), directories=16)
        title = f"unlink: {len(files.names):,} over 16 directories, 0.5 ms per call"
        times = rows.contest(title, files.unlinks(), rounds=1, warm_up=False)
        rows.row("reclaim.slow_unlink", times, rival="os.unlink loop", note="one round")
        files.store.close()


def test_retire(rows: Rows, disk: Path) -> None:
    """A version of 10,000 files of 4 KiB, all at once: until the call returns, and until nothing of it is left.

    On a filesystem mounted with `discard` the files have no blocks: freeing 10,000 extents keeps such a disk busy for
    seconds after whoever did it, and the next contestant pays.
    """
    root, n = disk / "retire", rows.size(10_000, 5_000)
    store = PayloadStore(root, owner=True)
    blocks = "discard" not in mount_of(root)[1].split(",")

    def fill() -> None:
        (root / "v1").mkdir()
        for i in range(n):
            file = os.open(root / "v1" / f"{i:016x}.safetensors", os.O_CREAT | os.O_WRONLY, 0o644)
            if blocks:
                os.write(file, bytes(SIZE))
            else:
                os.ftruncate(file, SIZE)
            os.close(file)
        _settle(root / "v1")

    def retire() -> bool:
        return store.retire(1)

    def both() -> int:
        retire()
        return store.empty_trash()

    def gone(result: Any) -> None:
        assert not (root / "v1").exists() and result in (None, True, n)

    ours, free, rival = "prime_io, until it returns", "prime_io, until all is gone", "shutil.rmtree"
    entries = [
        Entry(name=ours, before=fill, run=retire, check=gone, after=store.empty_trash),
        Entry(name=free, before=fill, run=both, check=gone),
        Entry(name=rival, before=fill, run=lambda: shutil.rmtree(root / "v1"), check=gone),
    ]
    times = rows.contest(f"retire: {n:,} files of 4 KiB", entries, rounds=5)
    note = "" if blocks else "mounted with discard: files without blocks"
    rows.row("reclaim.retire", times, ours=ours, rival=rival, note=note)
    rows.row("reclaim.free", times, ours=free, rival=rival, note=note)
    store.close()


def _settle(directory: Path) -> None:
    """Have the journal take what was done in a directory, so that nobody pays for it later."""
    file = os.open(directory, os.O_RDONLY)
    os.fsync(file)
    os.close(file)
