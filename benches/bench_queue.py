"""A queue of 4,000 traces of 120,000 tokens: what the orchestrator keeps in memory, and what a checkpoint costs.

What is real: the store, every payload and spill file with its name, header, pin and fdatasync, sink, ledger,
scoring, cut, save. What is not: only the first 128 traces have spill files of 120,000 tokens, those of the others
hold 16 while their segments state 120,000 (the columns of all would be 6.2 GB); payload segments hold 16 rows
of 1 byte. Nothing measured here reads a token: memory, state and pins are per segment, and the pages of the
files were written back before. Each layout runs in a fresh process.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from load import SEGMENTS, TRACES, Life, make_sample

from prime_io import Episode, PayloadSegment, PayloadStore, QueuedTrace, Sample, columns
from prime_io.restore import sink_state
from prime_io.types import StoredEpisode

TOKENS, WHOLE_GROUPS, SPILLED_TOKENS = 120_000, 16, 16
MEMORY_MIB, SECONDS, WRITTEN_MB = 50, 1.0, 50


@pytest.mark.parametrize("files", [1, SEGMENTS])
def test_queue(capsys: pytest.CaptureFixture[str], benchmark: Any, tmp_path: Path, files: int) -> None:
    """The queue by handle, in memory and in a checkpoint."""

    def run() -> dict[str, Any]:
        out = subprocess.run(
            [sys.executable, __file__, str(tmp_path), str(files)], check=True, stdout=subprocess.PIPE
        ).stdout
        return dict(json.loads(out))

    found = benchmark.pedantic(run, rounds=1)
    benchmark.extra_info.update(found)
    rival = _rival(tmp_path)
    load = " ".join(Path("/proc/loadavg").read_text().split()[:3])
    with capsys.disabled():
        print(
            f"\nqueue: {TRACES} traces of {TOKENS} tokens, {SEGMENTS} segments in {files} file(s) each  [load {load}]"
        )
        _line("memory above the empty sink", found["memory_mib"], MEMORY_MIB, "MiB")
        for took in found["seconds"]:
            _line("checkpoint, cut to durable", took, SECONDS, "s")
        print(f"  {'of it CPU, all threads':31s} {found['cpu_seconds'][0]:9.2f} s")
        print(f"  {'of it the cut, on the loop':31s} {1e3 * found['cut_seconds']:9.2f} ms")
        print(f"  {'only the links, by os.link':31s} {found['link_seconds']:9.2f} s, {found['pins']} of them")
        _line("state and manifest", found["written_mb"], WRITTEN_MB, "MB")
        print(f"  {'state and manifest per trace':31s} {1e6 * found['written_mb'] / TRACES:9.0f} B")
        print(
            f"  rival, arrays in the queue and one pickle: {rival['memory_mib'] / rival['traces'] * TRACES:.0f} MiB, "
            f"{rival['written_mb'] / rival['traces'] * TRACES:.0f} MB in "
            f"{rival['seconds'] / rival['traces'] * TRACES:.1f} s (measured with {rival['traces']} traces, scaled)"
        )


def _line(what: str, value: float, target: float, unit: str) -> None:
    print(
        f"  {what:31s} {value:9.2f} {unit}  {'PASS' if value < target else 'over'} (target < {target:g} {unit})"
    )


def _rival(tmp_path: Path, traces: int = 40) -> dict[str, float]:
    """A queue of samples with their columns, pickled whole."""
    gc.collect()
    before = _rss()
    queue = [make_sample(TOKENS) for _ in range(traces)]
    for sample in queue:
        sample.payload = []  # none of the heavy fields, to be kind
    after = _rss()
    start = time.monotonic()
    with open(tmp_path / "rival.pickle", "wb") as out:
        out.write(pickle.dumps(queue))
        out.flush()
        os.fsync(out.fileno())
    seconds = time.monotonic() - start
    back = pickle.loads((tmp_path / "rival.pickle").read_bytes())
    assert all((a.token_ids == b.token_ids).all() for a, b in zip(queue, back, strict=True))
    written = (tmp_path / "rival.pickle").stat().st_size
    return {"traces": traces, "memory_mib": after - before, "written_mb": written / 1e6, "seconds": seconds}


def _rss() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


# -- in the fresh process


def _spill_little(episode: Episode, *, store: PayloadStore) -> StoredEpisode:
    """As `columns.spill`, but only the first tokens are written; the segments state them all."""
    if int(episode.id.split(".")[0].removeprefix("math-")) < WHOLE_GROUPS:
        return _spill(episode, store=store)
    [trace] = episode.traces
    [sample] = trace.samples
    n = SPILLED_TOKENS
    little = Sample(
        sample.token_ids[:n],
        sample.mask[:n],
        sample.logprobs[:n],
        sample.payload,
        {name: column[:n] for name, column in sample.columns.items()},
    )
    trace = msgspec.structs.replace(trace, samples=[little])
    stored = _spill(msgspec.structs.replace(episode, traces=[trace]), store=store)
    [made] = stored.traces
    [part] = made.samples

    def state_all(segment: PayloadSegment) -> PayloadSegment:
        return msgspec.structs.replace(segment, rows=TOKENS)

    stated = {name: state_all(segment) for name, segment in part.columns.items()}
    part = msgspec.structs.replace(part, n_tokens=TOKENS, columns=stated)
    return msgspec.structs.replace(stored, traces=[msgspec.structs.replace(made, samples=[part])])


_spill = columns.spill


async def _measure(run: Path, files: int) -> dict[str, Any]:
    columns.spill = _spill_little
    life = Life(run)
    sample = make_sample(TOKENS)
    # One group goes through and out again: threads, buffers and code are there in the empty sink too.
    for payload in life.payloads(8, files):
        await life.add(sample, payload)
    life.sink._queue._size = 8
    await life.checkpoint()
    life.sink.trained(1)
    await life.sink.drain()
    assert len(life.sink.ledger) == 0
    gc.collect()
    empty = _rss()

    # The payloads are written as workers do, elsewhere: what that takes is not the orchestrator's.
    written = run / "payloads.msgpack"
    pid = os.fork()
    if pid == 0:
        written.write_bytes(msgspec.msgpack.encode(life.payloads(TRACES, files)))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    for payload in _read(written):
        await life.add(sample, payload)
    assert life.sink.queued == TRACES
    await life.sink.drain()
    gc.collect()
    memory = _rss() - empty
    os.sync()

    seconds, cpu, cuts = [], [], []
    for _ in range(3):
        life.progress.step += 1  # a step each, the queue whole: no batch is taken
        before, used = time.monotonic(), time.process_time()
        life.orchestrator._cut()
        cuts.append(time.monotonic() - before)
        while life.sink.ledger._snapshots:
            await asyncio.sleep(0.001)
        seconds.append(time.monotonic() - before)
        cpu.append(time.process_time() - used)
        await asyncio.gather(*life.orchestrator._saves)
        assert life.orchestrator._sweeping is not None
        await life.orchestrator._sweeping
        os.sync()
    step = life.progress.step - 1

    parts, pins = life.manager.load(step, store=life.store)
    traces = [msgspec.msgpack.decode(b, type=QueuedTrace) for b in sink_state(parts, step=step)["queue"]]
    assert len(traces) == TRACES and all(trace.n_tokens == TOKENS for trace in traces)
    assert len(pins.files) == TRACES * (files + 1)
    assert set(pins.files) == {segment.file for trace in traces for segment in trace.segments()}
    assert set(pins.link_back(pins.files, dry_run=True).values()) == {"present"}
    whole = [t for t in traces if int(t.group_id.removeprefix("math-")) < WHOLE_GROUPS]
    assert len(whole) > 50
    for trace in whole[:8]:
        assert (
            life.store.read(trace.samples[0].columns["token_ids"], verify=True) == np.arange(TOKENS)
        ).all()

    directory = run / "links"
    directory.mkdir()
    start = time.monotonic()
    for i, file in enumerate(pins.files):
        os.link(f"{life.store.root}/{file}", directory / str(i))
    links = time.monotonic() - start

    component = run / f"checkpoints/step_{step}/orchestrator"
    pinned = [path for path in component.rglob("*") if path.is_file() and path.stat().st_nlink > 1]
    own = [path for path in component.rglob("*") if path.is_file() and path.stat().st_nlink == 1]
    assert len(pinned) == len(pins.files)
    life.close()
    return {
        "memory_mib": memory,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "cut_seconds": max(cuts),
        "link_seconds": links,
        "pins": len(pins.files),
        "written_mb": sum(path.stat().st_size for path in own) / 1e6,
    }


def _read(path: Path) -> Any:
    """One trace's segments at a time."""
    decoder = msgspec.msgpack.Decoder(list[PayloadSegment])
    for raw in msgspec.msgpack.decode(path.read_bytes(), type=list[msgspec.Raw]):
        yield decoder.decode(raw)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as root:
        print(json.dumps(asyncio.run(_measure(Path(root), int(sys.argv[2])))))
