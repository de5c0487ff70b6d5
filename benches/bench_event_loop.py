"""Rule 12: the event loop is not blocked while checkpointing, probing, reclaiming, spilling or writing.

Each scenario runs beside a ticker, checks what it did, and is followed by a rival: the same done with the
standard library (or safetensors) in `asyncio.to_thread`. Targets are printed, not asserted: a machine shared
with others shows its own lags, in the row of the process beside.
"""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from lag import Row, extra, measure, show
from load import SEGMENTS, TRACES, Life, make_sample
from safetensors.numpy import load_file, save_file

from prime_io import PayloadSegment, PayloadStore, QueuedTrace
from prime_io.restore import sink_state

Measured = Coroutine[Any, Any, list[Row]]
Bench = Callable[[str, Callable[[], Measured]], None]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], benchmark: Any) -> Bench:
    def run(title: str, measured: Callable[[], Measured]) -> None:
        rows = benchmark.pedantic(lambda: asyncio.run(measured()), rounds=1)
        benchmark.extra_info.update(extra(rows))
        show(capsys, title, rows)

    return run


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    made = Life(tmp_path)
    yield made
    made.close()


def test_idle(bench: Bench) -> None:
    """The control: nothing but the ticker."""

    async def measured() -> list[Row]:
        row, _ = await measure("idle", asyncio.sleep(3))
        return [row]

    bench("idle", measured)


@pytest.mark.parametrize("files", [1, SEGMENTS])
def test_checkpoint(life: Life, tmp_path: Path, bench: Bench, files: int) -> None:
    """4,000 queued traces: cut, pins, state, manifest, retention of the step before, sweep."""

    async def measured() -> list[Row]:
        await life.fill(TRACES, files=files, tokens=64)
        steps = 3

        async def ours() -> int:
            return [await life.checkpoint() for _ in range(steps)][-1]

        row, step = await measure(f"checkpoint x{steps}", ours())
        parts, pins = life.manager.load(step, store=life.store)
        queue = sink_state(parts, step=step)["queue"]
        traces = [msgspec.msgpack.decode(blob, type=QueuedTrace) for blob in queue]
        assert {t.trace_id for t in traces} == set(life.sink.queued_trace_ids())
        needed = {segment.file for trace in traces for segment in trace.segments()}
        assert set(pins.files) == needed and len(needed) == len(traces) * (files + 1)
        assert set(pins.link_back(pins.files, dry_run=True).values()) == {"present"}

        def pickled() -> None:
            for n in range(steps):
                directory = tmp_path / f"rival_{n}"
                directory.mkdir()
                names = {segment.file for trace in traces for segment in trace.segments()}
                for i, name in enumerate(sorted(names)):
                    os.link(f"{life.store.root}/{name}", directory / str(i))
                with open(directory / "state.pickle", "wb") as out:
                    out.write(pickle.dumps(traces))
                    out.flush()
                    os.fsync(out.fileno())
                again = pickle.loads((directory / "state.pickle").read_bytes()) if n == 0 else traces
                assert again == traces

        rival, _ = await measure(f"pickle + fsync + os.link x{steps}", asyncio.to_thread(pickled))
        return [row, rival]

    bench(f"checkpoint: {TRACES} traces, {SEGMENTS} segments in {files} file(s) each", measured)


def test_ship(life: Life, bench: Bench) -> None:
    """Batches of 512 traces, cut on the loop and published; their files are released as they are trained."""

    async def measured() -> list[Row]:
        await life.fill(TRACES, files=SEGMENTS, tokens=64)
        life.sink._queue._size = 512
        exchange = life.orchestrator._exchange

        async def ours() -> list[int]:
            steps = []
            while (batch := life.sink.take_batch()) is not None:
                await asyncio.to_thread(exchange.publish_batch, batch)
                await asyncio.sleep(0.05)
                life.sink.trained(batch.step - 1)
                steps.append(batch.step)
            life.sink.trained(steps[-1])
            await life.sink.drain()
            return steps

        row, steps = await measure("batches of 512 traces", ours())
        shipped = [exchange.read_batch(step) for step in steps]
        assert sum(len(batch.traces) for batch in shipped if batch) == TRACES // 512 * 512
        assert life.sink.counters["reclaimed"] == TRACES // 512 * 512 * (SEGMENTS + 1)
        return [row]

    bench("ship and train", measured)


def test_probe(tmp_path: Path, bench: Bench) -> None:
    """100,000 segments, each in a file of its own, every tenth of them gone."""

    async def measured() -> list[Row]:
        store = PayloadStore(tmp_path / "store", owner=True)
        segments = _files(store, 100_000, missing_every=10)

        async def ours() -> Any:
            return [await asyncio.to_thread(store.probe, segments) for _ in range(3)][-1]

        row, probe = await measure("probe x3", ours())
        assert probe.present.sum() == 90_000 and (probe.errno[::10] == errno.ENOENT).all()

        def stats() -> int:
            for _ in range(3):
                present = 0
                for segment in segments:
                    try:
                        found = os.stat(f"{store.root}/{segment.file}")
                    except FileNotFoundError:
                        continue
                    present += found.st_size >= segment.offset + segment.rows
            return present

        rival, present = await measure("os.stat loop x3", asyncio.to_thread(stats))
        assert present == 90_000
        store.close()
        return [row, rival]

    bench("probe: 100,000 files", measured)


def test_reclaim(life: Life, bench: Bench) -> None:
    """A batch that held 10,000 files was trained: released, unlinked, counted. Three times."""

    async def measured() -> list[Row]:
        sink, store = life.sink, life.store
        for step in (1, 2, 3):
            for segment in _files(store, 10_000, version=step):
                sink.ledger.ship(step, sink.ledger.hold([segment]))
        await asyncio.to_thread(os.sync)

        async def ours() -> None:
            for step in (1, 2, 3):
                sink.trained(step)
                await sink.drain()

        row, _ = await measure("reclaim x3", ours())
        assert sink.counters["reclaimed"] == 30_000 and len(sink.ledger) == 0
        assert not [file for file, *_, kind in store.native.scan() if kind == "payload"]

        doomed = [f"{store.root}/{s.file}" for v in (4, 5, 6) for s in _files(store, 10_000, version=v)]
        await asyncio.to_thread(os.sync)

        def unlink() -> None:
            for path in doomed:
                os.unlink(path)

        rival, _ = await measure("os.unlink loop x3", asyncio.to_thread(unlink))
        assert not os.path.exists(doomed[0]) and not os.path.exists(doomed[-1])
        return [row, rival]

    bench("reclaim: 10,000 files", measured)


def test_spill(life: Life, tmp_path: Path, bench: Bench) -> None:
    """40 episodes a second of 32,000 tokens, four columns each, for three seconds."""

    async def measured() -> list[Row]:
        episodes, rate, tokens = 120, 40, 32_000
        payloads = life.payloads(episodes, SEGMENTS)
        sample = make_sample(tokens)

        async def paced(one: Callable[[int], Awaitable[object]]) -> None:
            began = time.monotonic()
            tasks = []
            for i in range(episodes):
                await asyncio.sleep(max(0.0, began + i / rate - time.monotonic()))
                tasks.append(asyncio.ensure_future(one(i)))
            await asyncio.gather(*tasks)

        async def ours() -> None:
            await paced(lambda i: life.add(sample, payloads[i]))
            await life.sink.drain()

        row, _ = await measure("sink.add", ours())
        life.sink._queue._size = episodes
        batch = life.sink.take_batch()
        assert batch is not None
        for trace in batch.traces[:: episodes // 8]:
            columns = trace.samples[0].columns
            assert (life.store.read(columns["token_ids"], verify=True) == sample.token_ids).all()

        def savez(i: int) -> None:
            with open(tmp_path / f"{i}.npz", "wb") as out:
                np.savez(
                    out,
                    a=sample.token_ids,
                    b=sample.mask,
                    c=sample.logprobs,
                    d=sample.columns["temperatures"],
                )
                out.flush()
                os.fsync(out.fileno())

        rival, _ = await measure("np.savez + fsync", paced(lambda i: asyncio.to_thread(savez, i)))
        with np.load(tmp_path / "0.npz") as back:
            assert (back["a"] == sample.token_ids).all()
        return [row, rival]

    bench("spill: 40 episodes a second of 32,000 tokens", measured)


def test_write(tmp_path: Path, bench: Bench) -> None:
    """One payload of 1 GiB."""

    async def measured() -> list[Row]:
        store = PayloadStore(tmp_path / "store", owner=True)
        rows = np.arange(1 << 28, dtype=np.uint32).reshape(-1, 1024)
        row, made = await measure("store.write", asyncio.to_thread(store.write, {"x": rows}, version=0))
        back = store.read(made["x"], verify=True)
        assert (back[::997] == rows[::997]).all()
        del back
        store.reclaim([made["x"].file])
        path = tmp_path / "rival.safetensors"
        rival, _ = await measure("safetensors save_file", asyncio.to_thread(save_file, {"x": rows}, path))
        assert (load_file(path)["x"][::997] == rows[::997]).all()
        path.unlink()
        store.close()
        return [row, rival]

    bench("write: 1 GiB", measured)


def _files(
    store: PayloadStore, n: int, *, version: int = 1, missing_every: int | None = None
) -> list[PayloadSegment]:
    """Segments of small files made without a header: neither probe nor reclaim looks inside."""
    directory = Path(store.root) / f"v{version}"
    directory.mkdir()
    segments = []
    for i in range(n):
        name = f"v{version}/{i:016x}.safetensors"
        if missing_every is None or i % missing_every:
            handle = os.open(directory.parent / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            os.ftruncate(handle, 4096)
            os.close(handle)
        segments.append(PayloadSegment("x", name, 1024, 0, 2048, "uint8", (), "0123456789abcdef"))
    return segments
