"""Writing payload files: large ones for as long as the machine lives, small ones for good."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from duel import Entry
from peers import Tensors, writers
from rows import CPUS, Rows

from prime_io import PayloadSegment, PayloadStore

# A warning of a peer is no failure of this project.
pytestmark = pytest.mark.filterwarnings("ignore")


class Ours:
    """A contestant that writes batches into a store and reclaims them."""

    def __init__(self, root: Path, tensors: Tensors, *, durable: bool) -> None:
        self.store = PayloadStore(root, owner=True)
        self._tensors, self._durable = tensors, durable
        self._batch = [{name: array} for name, array in zip(tensors.names, tensors.arrays, strict=True)]
        self._files: list[str] = []

    def run(self) -> Any:
        return self.store.write_many(self._batch, version=0, durable=self._durable)

    def check(self, made: Any) -> None:
        segments = [segment for one in made for segment in one.values()]
        assert all(isinstance(s, PayloadSegment) and s.checksum for s in segments)
        self._files = [segment.file for segment in segments]
        self._tensors.check(self.store.read_many(segments, verify=True))

    def after(self) -> None:
        assert all(isinstance(freed, int) and freed > 0 for freed in self.store.reclaim(self._files))

    def entry(self) -> Entry:
        return Entry(name="prime_io", run=self.run, check=self.check, after=self.after)


def test_warm(rows: Rows, disk: Path) -> None:
    """64 files of 12.6 MB into the page cache. The machine's limit: the same bytes by write(2), and by memcpy."""
    random, n = np.random.default_rng(0), rows.size(64, 16)
    names = [f"routed_experts_{i}" for i in range(n)]
    arrays = [random.integers(0, 128, (32_768, 48, 8), np.uint8) for _ in range(n)]
    tensors = Tensors(arrays, names, [], [])
    plain, own = disk / "plain", disk / "peers"
    for directory in (plain, own):
        directory.mkdir()
    sources = [torch.from_numpy(array) for array in arrays]
    reused = [torch.zeros_like(source) for source in sources]
    torch.set_num_threads(CPUS)

    def one(name: str, array: np.ndarray) -> None:
        file = os.open(plain / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        assert os.write(file, memoryview(array).cast("B")) == array.nbytes
        os.close(file)

    def write() -> None:
        with ThreadPoolExecutor(CPUS) as pool:
            list(pool.map(one, names, arrays))

    def memcpy() -> None:
        for into, source in zip(reused, sources, strict=True):
            into.copy_(source)

    def clear() -> None:
        for name in names:
            os.unlink(plain / name)

    ours, limit = Ours(disk / "store", tensors, durable=False), f"write(2), {CPUS} threads, no checksum"
    entries = [
        ours.entry(),
        *writers(tensors, own, rows.skip, only=("safetensors",) if rows.short else None),
        Entry(
            name=limit,
            run=write,
            check=lambda _: tensors.check([np.fromfile(plain / name, np.uint8) for name in names]),
            after=clear,
        ),
        Entry(name=f"memcpy, {CPUS} threads, reused", run=memcpy),
    ]
    volume = sum(array.nbytes for array in arrays) / 1e9
    times = rows.contest(f"publish: {n} x 12.6 MB, not durable", entries, rounds=5, volume=volume)
    if "safetensors.numpy.save_file" in times:
        rows.row("publish.warm", times, rival="safetensors.numpy.save_file", limit=limit)
    ours.store.close()


def test_durable(rows: Rows, disk: Path) -> None:
    """1,000 files of 64 KiB, each of which survives a power cut; one batch against one after the other."""
    random, n = np.random.default_rng(0), rows.size(1_000, 200)
    arrays = [random.integers(0, 256, (1024, 64), np.uint8) for _ in range(n)]
    names = [f"x{i}" for i in range(n)]
    tensors = Tensors(arrays, names, [], [])
    own = disk / "rival"
    own.mkdir()

    def one(name: str, array: np.ndarray) -> None:
        with open(own / f"{name}.tmp", "wb") as file:
            file.write(array.data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(own / f"{name}.tmp", own / name)
        directory = os.open(own, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def one_by_one() -> None:
        for name, array in zip(names, arrays, strict=True):
            one(name, array)

    def threads() -> None:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(one, names, arrays))

    def clear() -> None:
        shutil.rmtree(own)
        own.mkdir()

    def check(_: Any) -> None:
        tensors.check([np.fromfile(own / name, np.uint8) for name in names])

    ours, rival = Ours(disk / "durable", tensors, durable=True), "write, fsync, rename, fsync dir, one by one"
    entries = [
        ours.entry(),
        Entry(name=rival, run=one_by_one, check=check, after=clear),
        Entry(name="the same on 16 threads", run=threads, check=check, after=clear),
    ]
    title = f"publish: {n:,} x 64 KiB, durable"
    times = rows.contest(title, entries, rounds=3, volume=n / 1e3, unit="k files")
    rows.row("publish.durable", times, rival=rival)
    ours.store.close()
