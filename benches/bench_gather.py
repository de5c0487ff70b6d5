"""Reading rows: whole traces, a trainer's micro-batch, many small segments, and a cold disk."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import first_use
import numpy as np
import pytest
import torch
from duel import Entry, fastest
from msgspec.structs import replace
from peers import Tensors, numpy_fromfile, readers
from rows import CPUS, Rows

from prime_io import PayloadSegment, PayloadStore
from prime_io.segment import clip, shift
from prime_io.store import Gather

# A warning of a peer is no failure of this project.
pytestmark = pytest.mark.filterwarnings("ignore")

ROW = (48, 8)  # layers, experts per token


class Traces:
    """Traces of routed experts, a payload file each, in the page cache."""

    def __init__(self, root: Path, n: int, tokens: int) -> None:
        random = np.random.default_rng(0)
        self.arrays = [random.integers(0, 128, (tokens, *ROW), np.uint8) for _ in range(n)]
        self.names = [f"routed_experts_{i}" for i in range(n)]
        self.root = root
        self.tokens = tokens
        with PayloadStore(root) as store:
            made = store.write_many(
                [{name: array} for name, array in zip(self.names, self.arrays, strict=True)], version=0
            )
            self.segments = [segment for one in made for segment in one.values()]
            assert not any(store.sync([segment.file for segment in self.segments]))
        paths = [f"{root}/{segment.file}" for segment in self.segments]
        self.tensors = Tensors(self.arrays, self.names, paths, [s.offset for s in self.segments])
        self.requests = [Gather(segments=[s], field=s.field, lo=0, hi=s.rows) for s in self.segments]
        self.gigabytes = sum(array.nbytes for array in self.arrays) / 1e9

    def check(self, answers: Any) -> None:
        self.tensors.check([rows for rows, _ in answers])


@pytest.fixture(scope="module")
def traces(disk: Path, request: pytest.FixtureRequest) -> Iterator[Traces]:
    yield Traces(disk / "traces", 16 if request.config.getoption("--short") else 64, 32_768)


def test_warm(rows: Rows, traces: Traces) -> None:
    """64 traces of 12.6 MB from the page cache. The machine's limit: memcpy of the same bytes."""
    torch.set_num_threads(CPUS)
    store = PayloadStore(traces.root)
    sources = [torch.from_numpy(array) for array in traces.arrays]
    reused = [torch.zeros_like(source) for source in sources]
    tensors, n = traces.tensors, traces.arrays[0].nbytes

    def memcpy() -> list[Any]:
        for into, source in zip(reused, sources, strict=True):
            into.copy_(source)
        return reused

    def copyto() -> list[Any]:
        with ThreadPoolExecutor(CPUS) as pool:
            list(pool.map(np.copyto, (into.numpy() for into in reused), traces.arrays))
        return reused

    def read() -> list[Any]:
        arrays = []
        for path, offset in zip(tensors.paths, tensors.offsets, strict=True):
            with open(path, "rb") as file:
                arrays.append(np.frombuffer(file.read(), np.uint8, n, offset))
        return arrays

    def preadv(threads: int) -> list[Any]:
        def one(path: str, offset: int, into: Any) -> None:
            view = memoryview(into.numpy()).cast("B")
            file = os.open(path, os.O_RDONLY)
            try:
                while len(view):
                    got = os.preadv(file, [view], offset)
                    view, offset = view[got:], offset + got
            finally:
                os.close(file)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(one, tensors.paths, tensors.offsets, reused))
        return reused

    # The first waits for both threads after each tensor, the second only at the end: it suffers less from others.
    copies = [f"torch copy_, {CPUS} threads, reused", f"np.copyto, {CPUS} threads, reused"]
    pools = {f"os.preadv, {n} threads, reused": n for n in sorted({CPUS, 8})}
    entries = [
        Entry(name="prime_io", run=lambda: store.gather_many(traces.requests), check=traces.check),
        Entry(
            name="prime_io, verify",
            run=lambda: store.gather_many(traces.requests, verify=True),
            check=traces.check,
        ),
        *_engines(rows, traces.root, lambda other: other.gather_many(traces.requests), traces.check),
        Entry(name=copies[0], run=memcpy, check=tensors.check),
        Entry(name=copies[1], run=copyto, check=tensors.check),
        Entry(name="open().read(), np.frombuffer", run=read, check=tensors.check),
        *(
            Entry(name=name, run=lambda threads=threads: preadv(threads), check=tensors.check)
            for name, threads in pools.items()
        ),
        numpy_fromfile(tensors, traces.root),
    ]
    title = f"gather: {len(sources)} traces x {n / 1e6:.1f} MB, warm"
    times = rows.contest(title, entries, rounds=9, volume=traces.gigabytes)
    limit = fastest(times, copies)
    rows.row("gather.memcpy", times, rival=limit, limit=limit, note="the faster of two ways to copy")
    rows.row("gather.read", times, rival="open().read(), np.frombuffer", limit=limit)
    rows.row("gather.preadv", times, rival=list(pools), limit=limit, note="the faster pool")
    rows.row("gather.verify", times, ours="prime_io, verify", rival="prime_io", limit=limit)
    store.close()


def test_first(rows: Rows, traces: Traces) -> None:
    """The same, as the first call of a process."""
    ours, rival = "prime_io, first call", "np.fromfile, first call"
    contestants = {ours: "prime_io", rival: "np.fromfile"}
    entries = [
        first_use.entry(name, how, str(traces.root), traces.segments, traces.arrays)
        for name, how in contestants.items()
    ]
    title = f"gather: {len(traces.arrays)} traces, the first call of a process"
    times = rows.contest(title, entries, rounds=7, volume=traces.gigabytes)
    rows.row("gather.first", times, ours=ours, rival=rival)


def test_peers(rows: Rows, traces: Traces, disk: Path) -> None:
    """24 of them by other libraries, for whose rows there is no target."""
    if rows.short:
        pytest.skip("no target is about it: left out of the short form")
    store, own = PayloadStore(traces.root), disk / "peers"
    own.mkdir()
    some = Tensors(*(part[:24] for part in traces.tensors))
    entries = [
        Entry(
            name="prime_io",
            run=lambda: store.gather_many(traces.requests[:24]),
            check=lambda answers: some.check([rows for rows, _ in answers]),
        ),
        *readers(some, own, rows.skip),
    ]
    volume = sum(array.nbytes for array in some.arrays) / 1e9
    rows.contest("gather: 24 traces x 12.6 MB by other libraries, warm", entries, rounds=3, volume=volume)
    store.close()
    shutil.rmtree(own)


def test_micro_batch(rows: Rows, traces: Traces) -> None:
    """65,536 tokens packed from 16 traces: four turns of each, clipped, moved to their place, and padding.

    The rival makes the same rows as frameworks make them: an int32 array full of the fill, each turn read into
    bytes and cast into it. Against the narrow result the dtypes differ: there the widening is left to the device.
    """
    store, width, turns = PayloadStore(traces.root), 4096, 4
    n = 16 * width
    parts: list[PayloadSegment] = []
    for i, whole in enumerate(traces.segments[:16]):
        one = replace(whole, field="routed_experts")
        for turn in range(turns):  # a turn is 1,000 rows of the trace; 24 rows of padding follow it
            lo = 5_000 * turn + 37 * i
            place = i * width + turn * (width // turns)
            parts += shift(clip([one], lo, lo + 1_000), place - lo)
    expected = np.zeros((n, *ROW), np.int32)
    for i, part in enumerate(parts):
        lo = 5_000 * (i % turns) + 37 * (i // turns)
        expected[part.pos : part.pos + part.rows] = traces.arrays[i // turns][lo : lo + 1_000]

    def others() -> Any:
        result = np.full((n, *ROW), 0, np.int32)
        for part in parts:
            file = os.open(f"{traces.root}/{part.file}", os.O_RDONLY)
            data = os.pread(file, part.rows * ROW[0] * ROW[1], part.offset)
            os.close(file)
            result[part.pos : part.pos + part.rows] = np.frombuffer(data, np.uint8).reshape(-1, *ROW)
        return result

    def gather(dtype: str | None = None) -> Any:
        return store.gather(parts, "routed_experts", 0, n, dtype=dtype)[0]

    def check(result: Any) -> None:
        assert np.array_equal(result, expected)

    rival = "np.full(int32), pread, cast"
    entries = [
        Entry(name="prime_io", run=gather, check=check),
        Entry(name="prime_io, int32", run=lambda: gather("int32"), check=check),
        Entry(name=rival, run=others, check=check),
        Entry(name="memcpy of the narrow bytes", run=_memcpy(n * ROW[0] * ROW[1])),
        Entry(name="memcpy of the int32 bytes", run=_memcpy(4 * n * ROW[0] * ROW[1])),
    ]
    times = rows.contest(f"gather: a micro-batch of {n:,} tokens", entries, rounds=15)
    rows.row("gather.micro", times, rival=rival, limit="memcpy of the narrow bytes", note="u8 against int32")
    rows.row("gather.micro32", times, ours="prime_io, int32", rival=rival, limit="memcpy of the int32 bytes")
    store.close()


@pytest.mark.parametrize("row", ["files", "few_files", "scattered"])
def test_small(rows: Rows, disk: Path, row: str) -> None:
    """20,000 segments of 4 KiB into one destination: each in a file of its own; 100 turns of a trace in each of 200
    files, one after the other; and those in an order that lets no two be read as one."""
    n, size = rows.size(20_000, 5_000), 4096
    files = n if row == "files" else n // 100
    root = disk / f"small_{row}"
    random = np.random.default_rng(1)
    content = random.integers(0, 256, (n, size), np.uint8)
    store = PayloadStore(root)
    per_file = n // files
    made = store.write_many(
        [{"x": content[i * per_file : (i + 1) * per_file]} for i in range(files)], version=0
    )
    order = np.arange(n) if row == "few_files" else random.permutation(n)
    parts: list[PayloadSegment] = []
    for i, one in enumerate(made):
        assert not isinstance(one, Exception)
        whole = one["x"]
        for k in range(per_file):
            place = int(order[i * per_file + k])
            parts.append(replace(whole, offset=whole.offset + k * size, pos=place, rows=1, checksum=""))
    expected = np.empty_like(content)
    expected[order] = content
    paths = [f"{root}/{part.file}" for part in parts]
    reused = np.zeros_like(content)

    def loop() -> Any:
        view = memoryview(reused).cast("B")
        for path, part in zip(paths, parts, strict=True):
            file = os.open(path, os.O_RDONLY)
            view[part.pos * size : (part.pos + 1) * size] = os.pread(file, size, part.offset)
            os.close(file)
        return reused

    def check(result: Any) -> None:
        assert np.array_equal(result, expected)

    def gather(other: PayloadStore) -> Any:
        return other.gather(parts, "x", 0, n)[0]

    rival, limit = "open/pread/close loop, reused", "memcpy of the same bytes"
    entries = [
        Entry(name="prime_io", run=lambda: gather(store), check=check),
        *_engines(rows, root, gather, check),
        Entry(name=rival, run=loop, check=check),
        Entry(name=limit, run=_memcpy(n * size)),
    ]
    times = rows.contest(
        f"gather: {n:,} segments of 4 KiB in {files:,} files ({row})",
        entries,
        rounds=7,
        volume=n / 1e3,
        unit="k segments",
    )
    rows.row(f"gather.{row}", times, rival=rival, limit=limit)
    store.close()
    shutil.rmtree(root)


FIO = {
    "fio, io_uring, direct, 32 deep": "--ioengine=io_uring --iodepth=32 --direct=1",
    "fio, 8 threads, direct": "--ioengine=psync --direct=1",
    "fio, 8 threads, buffered": "--ioengine=psync --direct=0",
}


def test_cold(rows: Rows, disk: Path) -> None:
    """4 GiB in 16 files, whose cached pages are dropped before every round. The destination is reused.

    The machine's limit is the best fio job on the same files. What the hypervisor caches stays cached, for all.
    """
    count, size = 16, rows.size(256 << 20, 16 << 20)
    root = disk / "cold"
    store = PayloadStore(root)
    random = np.random.default_rng(2)
    block = random.integers(0, 256, (size // 4096, 4096), np.uint8)
    segments = []
    for i in range(count):
        block[:, 0] = i
        segments.append(store.write({"x": block}, version=0, durable=True)["x"])
    paths = [f"{root}/{segment.file}" for segment in segments]
    reused = np.zeros((count, size // 4096, 4096), np.uint8)
    requests = [
        Gather(segments=[s], field="x", lo=0, hi=s.rows, out=reused[i]) for i, s in enumerate(segments)
    ]

    def drop() -> None:
        reused[:, ::97] = 0
        for path in paths:
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # all of them: these are written back
            os.close(file)

    def check(_: Any) -> None:
        for i in range(count):
            assert (reused[i, :, 0] == i).all() and np.array_equal(reused[i, :, 1:], block[:, 1:])

    def preadv() -> None:
        def one(path: str, offset: int, into: Any) -> None:
            view = memoryview(into).cast("B")
            file = os.open(path, os.O_RDONLY)
            while len(view):
                got = os.preadv(file, [view[: 8 << 20]], offset)
                view, offset = view[got:], offset + got
            os.close(file)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, paths, [s.offset for s in segments], reused))

    entries = [
        Entry(name="prime_io", before=drop, run=lambda: store.gather_many(requests), check=check),
        *_engines(rows, root, lambda other: other.gather_many(requests), check, before=drop),
        Entry(name="os.preadv, 8 threads, reused", before=drop, run=preadv, check=check),
    ]
    jobs = list(FIO) if shutil.which("fio") else []
    if not jobs:
        rows.skip("fio is not installed: the row of the cold gather is left out")
    entries += [
        Entry(name=name, before=drop, run=lambda name=name: _fio(name, paths), seconds=float) for name in jobs
    ]
    gigabytes = count * size / 1e9
    times = rows.contest(
        f"gather: {gigabytes:.1f} GB, cold", entries, rounds=3, volume=gigabytes, warm_up=False
    )
    if jobs:
        rows.row("gather.cold", times, rival=jobs, limit=min(jobs, key=lambda job: times[job].best))
    store.close()
    shutil.rmtree(root)


def _fio(name: str, paths: list[str]) -> float:
    """The seconds that a fio job of every file takes, each read once. A wave of eight jobs, or one job deep."""
    options = ["--rw=read", "--bs=1M", "--readonly", "--thread", "--output-format=json", *FIO[name].split()]
    if "psync" in FIO[name]:
        jobs = [[f"--name=j{i}", f"--filename={':'.join(paths[i::8])}"] for i in range(8)]
    else:
        jobs = [["--name=j", f"--filename={':'.join(paths)}"]]
    done = subprocess.run(
        ["fio", *(word for job in jobs for word in (*job, *options))],
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    assert all(job["error"] == 0 for job in found)
    blocks = sum(os.path.getsize(path) >> 20 for path in paths)  # it leaves the last part of a block out
    assert sum(job["read"]["io_bytes"] for job in found) >= blocks << 20
    return max(job["read"]["runtime"] for job in found) / 1e3


def _memcpy(nbytes: int) -> Callable[[], object]:
    source, into = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return lambda: into.copy_(source)


def _engines(
    rows: Rows,
    root: Path,
    run: Callable[[PayloadStore], Any],
    check: Callable[[Any], object],
    before: Callable[[], object] = lambda: None,
) -> Iterator[Entry]:
    """The engines that "auto" chooses from, each forced; where the store has the choice."""
    if "engine" not in inspect.signature(PayloadStore).parameters:
        rows.skip("this version has one engine")
        return
    for engine in ("threads", "uring"):
        options: dict[str, Any] = {"engine": engine}
        try:
            store = PayloadStore(root, **options)
        except OSError as error:
            rows.skip(f"prime_io, engine={engine}: {error}")
            continue
        yield Entry(
            name=f"prime_io, engine={engine}", run=lambda store=store: run(store), check=check, before=before
        )
