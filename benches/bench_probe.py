"""Which files are there: many names, few names, sizes, and a filesystem that is far away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from duel import Entry
from rows import Rows
from slowfs import slowfs

from prime_io import PayloadStore

DIRECTORIES = 8
SIZE = 4096


class Names:
    """`n` names over `directories` version directories, every tenth of them missing."""

    def __init__(self, root: Path, n: int, *, directories: int = DIRECTORIES) -> None:
        self.root = root
        self.names = [f"v{i % directories}/{i * 2654435761 % 2**64:016x}.safetensors" for i in range(n)]
        self.there = [i % 10 != 0 for i in range(n)]
        self.directories = [f"v{k}" for k in range(directories)]
        with PayloadStore(root):
            pass
        for directory in self.directories:
            (root / directory).mkdir()
        for name, there in zip(self.names, self.there, strict=True):
            if there:
                handle = os.open(root / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
                os.ftruncate(handle, SIZE)
                os.close(handle)

    def check(self, answer: Any) -> None:
        present = answer.present if hasattr(answer, "present") else answer
        assert list(present) == self.there

    def check_sizes(self, answer: Any) -> None:
        assert list(answer) == [SIZE if there else -1 for there in self.there]


@pytest.fixture(scope="module")
def many(disk: Path, request: pytest.FixtureRequest) -> Iterator[Names]:
    yield Names(disk / "many", 20_000 if request.config.getoption("--short") else 100_000)


def test_names(rows: Rows, many: Names) -> None:
    """100,000 names given as Python strings. The machine's limit: reading the directories, and no more."""
    store, paths = PayloadStore(many.root), [f"{many.root}/{name}" for name in many.names]
    directories = [f"{many.root}/{name}" for name in many.directories]

    def scandir() -> list[bool]:
        there: set[str] = set()
        for directory in directories:
            with os.scandir(directory) as entries:
                there.update(entry.path for entry in entries)
        return [path in there for path in paths]

    entries = [
        Entry(name="prime_io", run=lambda: store.probe(many.names), check=many.check),
        *_methods(rows, store, many),
        Entry(name="os.path.exists loop", run=lambda: [os.path.exists(p) for p in paths], check=many.check),
        Entry(name="os.scandir into a set", run=scandir, check=many.check),
        Entry(name="os.listdir of the directories", run=lambda: [os.listdir(d) for d in directories]),
    ]
    n = len(paths)
    times = rows.contest(f"probe: {n:,} names", entries, rounds=7, volume=n / 1e3, unit="k names")
    limit = "os.listdir of the directories"
    rows.row("probe.exists", times, rival="os.path.exists loop", limit=limit)
    rows.row("probe.scandir", times, rival="os.scandir into a set", limit=limit)
    store.close()


def test_sizes(rows: Rows, many: Names) -> None:
    """The same with sizes. The machine has no cheaper way than a stat per name; ours is on threads."""
    store, paths = PayloadStore(many.root), [f"{many.root}/{name}" for name in many.names]

    def stats() -> list[int]:
        sizes = []
        for path in paths:
            try:
                sizes.append(os.stat(path).st_size)
            except FileNotFoundError:
                sizes.append(-1)
        return sizes

    entries = [
        Entry(
            name="prime_io",
            run=lambda: store.probe(many.names, sizes=True),
            check=lambda answer: many.check_sizes(answer.size),
        ),
        *_methods(rows, store, many, sizes=True),
        Entry(name="os.stat loop", run=stats, check=many.check_sizes),
    ]
    n = len(paths)
    times = rows.contest(f"probe: {n:,} sizes", entries, rounds=7, volume=n / 1e3, unit="k names")
    rows.row("probe.stat", times, rival="os.stat loop")
    store.close()


def test_few(rows: Rows, disk: Path) -> None:
    """10 names where 100,000 are: the directory is not read for them. A round asks 200 times."""
    there = Names(disk / "few", rows.size(100_000, 20_000), directories=1)
    names, expected, again = there.names[:10], there.there[:10], range(200)
    store, paths = PayloadStore(there.root), [f"{there.root}/{name}" for name in names]

    def check(answers: list[Any]) -> None:
        for answer in answers:
            assert list(getattr(answer, "present", answer)) == expected

    entries = [
        Entry(name="prime_io", run=lambda: [store.probe(names) for _ in again], check=check),
        Entry(
            name="os.path.exists loop",
            run=lambda: [[os.path.exists(p) for p in paths] for _ in again],
            check=check,
        ),
    ]
    times = rows.contest("probe: 10 names in a directory of 100,000, 200 times", entries, rounds=15)
    rows.row("probe.few", times, rival="os.path.exists loop", note="200 probes of 10 names")
    store.close()


def test_slow(rows: Rows, disk: Path) -> None:
    """Names 0.5 ms away. Nothing is cached: a path costs the loop a look-up per directory and a stat."""
    n = rows.size(10_000, 1_000)
    with slowfs(disk / "far") as (behind, slow):
        far = Names(behind / "store", n)
        root = slow / "store"
        store, paths = PayloadStore(root, create=False), [f"{root}/{name}" for name in far.names]
        entries = [
            Entry(name="prime_io", run=lambda: store.probe(far.names), check=far.check),
            *_methods(rows, store, far),
            Entry(
                name="prime_io, sizes",
                run=lambda: store.probe(far.names, sizes=True),
                check=lambda answer: far.check_sizes(answer.size),
            ),
            Entry(
                name="os.path.exists loop", run=lambda: [os.path.exists(p) for p in paths], check=far.check
            ),
        ]
        times = rows.contest(
            f"probe: {n:,} names, 0.5 ms per call",
            entries,
            rounds=rows.size(2, 1),
            volume=n / 1e3,
            unit="k names",
            warm_up=False,
        )
        rows.row("probe.slow", times, rival="os.path.exists loop")
        store.close()


def _methods(rows: Rows, store: PayloadStore, asked: Names, *, sizes: bool = False) -> Iterator[Entry]:
    """The ways that "auto" chooses from, each forced."""
    for method in ("scan", "stat", "uring"):
        try:
            store.native.probe(asked.names[:1], method=method)
        except (ValueError, OSError) as error:
            rows.skip(f"prime_io, method={method}: {error}")
            continue

        def run(method: str = method) -> Any:
            present, size, _ = store.native.probe(asked.names, sizes=sizes, method=method)
            return np.frombuffer(size, np.int64) if sizes else np.frombuffer(present, np.bool_)

        yield Entry(
            name=f"prime_io, method={method}", run=run, check=asked.check_sizes if sizes else asked.check
        )
