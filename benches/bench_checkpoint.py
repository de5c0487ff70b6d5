"""A checkpoint's two halves: the state of a queue, and the pins on its files."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import load
import msgspec
import numpy as np
import pytest
import torch
from duel import Entry
from load import Life, make_sample
from rows import Rows

from prime_io import PayloadSegment, PolicySpan, QueuedTrace, Snapshot
from prime_io.cut import Cut
from prime_io.restore import sink_state
from prime_io.types import StoredSample

TRACES, SEGMENTS = 512, 4


def test_state(rows: Rows, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 queued traces with 2,048 payload segments: from the queue to a committed, durable state, without pins.

    Ours is a whole commit: state, manifest, every directory fsynced; the row of pins also finds what to pin. The
    rival pickles the same traces by torch.save and makes that durable: fsync, rename, fsync of the directory.
    """
    monkeypatch.setattr(load, "SEGMENTS", SEGMENTS)
    life = Life(disk / "state")

    async def fill() -> None:
        payloads = await asyncio.to_thread(life.payloads, TRACES, SEGMENTS)
        sample = make_sample(64)
        for payload in payloads:
            await life.add(sample, payload)
        await life.sink.drain()

    asyncio.run(fill())
    steps = itertools.count(1)
    traces = [msgspec.msgpack.decode(b, type=QueuedTrace) for b in life.orchestrator.snapshot_state().queue]
    assert sum(len(sample.payload) for trace in traces for sample in trace.samples) == TRACES * SEGMENTS
    plain = [msgspec.to_builtins(trace) for trace in traces]
    own = disk / "torch"
    own.mkdir()

    def ours() -> Any:
        state = life.orchestrator.snapshot_state().state()
        report = asyncio.run(life.manager.save(Snapshot(next(steps), state, ()), store=life.store))
        assert report is not None
        return report.step

    def check(step: int) -> None:
        parts, _ = life.manager.load(step, store=life.store)
        queue = sink_state(parts, step=step)["queue"]
        assert [msgspec.msgpack.decode(blob, type=QueuedTrace) for blob in queue] == traces

    def save(state: object) -> None:
        with open(own / "state.tmp", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(own / "state.tmp", own / "state.pt")
        directory = os.open(own, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def check_torch(_: Any) -> None:
        assert torch.load(own / "state.pt", weights_only=False) in (traces, plain)

    rival, dicts = "torch.save, fsync, rename, fsync", "the same, of plain dicts and lists"
    entries = [
        Entry(name="prime_io", run=ours, check=check),
        Entry(name=rival, run=lambda: save(traces), check=check_torch),
        Entry(name=dicts, run=lambda: save(plain), check=check_torch),
    ]
    times = rows.contest(f"checkpoint: the state of {TRACES} traces", entries, rounds=15)
    rows.row("checkpoint.state", times, rival=[rival, dicts], note="the faster form of the state")
    life.close()
    shutil.rmtree(disk / "state")


def test_pins(rows: Rows, disk: Path) -> None:
    """512 payload files, written and not yet synced: linked into a committed checkpoint, bytes and names durable.

    Ours is a whole save with an empty state, and looks through a queue of encoded traces for what to pin; the
    rival has a list, links and fsyncs file by file, then the directory.
    """
    life = Life(disk / "pins")
    steps = itertools.count(1)
    rows_of = np.random.default_rng(0).integers(0, 256, (1024, 64), np.uint8)
    segments: list[PayloadSegment] = []
    queue: list[msgspec.Raw] = []
    own = disk / "links"

    def queued(segment: PayloadSegment) -> msgspec.Raw:
        columns = {name: segment for name in ("token_ids", "mask", "logprobs", "advantages", "temperatures")}
        sample = StoredSample(1024, columns, [segment])
        name, policy = segment.file, PolicySpan(0, 1)
        trace = QueuedTrace(name, name, "math", "math-0", policy, 0, 0, 1024, 1.0, [sample])
        return msgspec.Raw(msgspec.msgpack.encode(trace))

    def fill() -> None:
        made = life.store.write_many([{"x": rows_of}] * TRACES, version=0)
        segments[:] = [one["x"] for one in made if not isinstance(one, Exception)]
        queue[:] = map(queued, segments)
        assert len(queue) == TRACES

    def ours() -> Any:
        found = Cut(next(steps), {}, queue, []).snapshot()
        snapshot = Snapshot(found.step, {}, found.segments, found.spills)
        report = asyncio.run(life.manager.save(snapshot, store=life.store))
        assert report is not None and report.copied == 0
        return report

    def check(report: Any) -> None:
        assert report.pinned == TRACES and all(life.store.is_durable(s.file) for s in segments)
        pins = report.path / "payloads"
        assert all(os.stat(pins / s.file).st_nlink == 2 for s in segments)

    def loop() -> None:
        own.mkdir()
        for segment in segments:
            target = own / segment.file.replace("/", "_")
            os.link(f"{life.store.root}/{segment.file}", target)
            file = os.open(target, os.O_RDONLY)
            os.fsync(file)
            os.close(file)
        directory = os.open(own, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def check_loop(_: Any) -> None:
        assert len(os.listdir(own)) == TRACES
        shutil.rmtree(own)

    def after() -> None:
        life.store.reclaim([s.file for s in segments])

    rival = "os.link + fsync loop"
    entries = [
        Entry(name="prime_io", before=fill, run=ours, check=check, after=after),
        Entry(name=rival, before=fill, run=loop, check=check_loop, after=after),
    ]
    times = rows.contest(f"checkpoint: {TRACES} pins of files of 64 KiB", entries, rounds=5)
    rows.row("checkpoint.pins", times, rival=rival, note="a whole save with an empty state")
    life.close()
    shutil.rmtree(disk / "pins")
