"""What a call may take besides time: memory, descriptors, and the interpreter from other threads.

Memory and descriptors are measured in fresh processes, which this file starts itself with.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from prime_io import PayloadStore
from prime_io.store import Gather

MIB = 1 << 20
SPARE_MIB = 16


def test_memory(rows: Any, disk: Path) -> None:
    """Peak memory of a gather of 64 traces: its result, and less than 16 MiB beside it."""
    n = rows.size(64, 24)
    with PayloadStore(disk / "memory") as store:
        array = np.random.default_rng(0).integers(0, 128, (32_768, 48, 8), np.uint8)
        for _ in range(n):
            store.write({"x": array}, version=0)
    found = rows.measure(lambda: _fresh("memory", disk / "memory"))
    over = found["peak_mib"] - found["result_mib"]
    assert found["result_mib"] == n * array.nbytes / MIB
    rows.fact(
        "bounds.memory",
        ours=f"{over:.1f} MiB",
        allowed=f"{SPARE_MIB} MiB",
        ratio=SPARE_MIB / max(over, 0.1),
        note=f"its result has {found['result_mib']:.0f} MiB; up to {found['threads']} threads",
    )


def test_files(rows: Any, disk: Path) -> None:
    """With 64 descriptors at most, 500 files are probed and gathered."""
    with PayloadStore(disk / "files") as store:
        made = store.write_many([{"x": np.full((4, 16), i % 251, np.uint8)} for i in range(500)], version=0)
        assert not any(isinstance(one, Exception) for one in made)
    found = rows.measure(lambda: _fresh("files", disk / "files"))
    good = found["present"] == 500 and found["right"] == 500
    rows.fact("bounds.files", ours="works" if good else "fails", allowed="64", ratio=float(good))


def test_ticks(rows: Any, disk: Path) -> None:
    """A thread that wakes every millisecond, beside each verb: how often it ran, and how long it once did not.

    Each verb is called again and again, so a call that kept the interpreter would leave a tick per call, a few per
    cent. What is lost above that is lost to the scheduler, with every CPU busy on native threads, and to what the
    calls do in Python: a thread that wants the interpreter waits up to 5 ms for it.
    """
    root = disk / "ticks"
    store = PayloadStore(root, owner=True)
    arrays = [np.full((16_384, 48, 8), i, np.uint8) for i in range(64)]
    made = store.write_many([{"x": array} for array in arrays], version=0)
    segments = [one["x"] for one in made if not isinstance(one, Exception)]
    requests = [Gather(segments=[s], field="x", lo=0, hi=s.rows) for s in segments]
    names = [f"v7/{i:016x}.safetensors" for i in range(100_000)]
    (root / "v7").mkdir()
    for name in names[:50_000]:
        os.close(os.open(root / name, os.O_CREAT | os.O_WRONLY, 0o644))
    batch = [{"x": array} for array in arrays]

    def again(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            end = time.monotonic() + rows.size(2.0, 0.5)
            while time.monotonic() < end:
                call()

        return run

    def write() -> None:
        store.reclaim([one["x"].file for one in store.write_many(batch, version=1) if isinstance(one, dict)])

    verbs = {
        "probe": again(lambda: store.probe(names)),
        "probe, sizes": again(lambda: store.probe(names, sizes=True)),
        "gather": again(lambda: store.gather_many(requests)),
        "gather, verify": again(lambda: store.gather_many(requests, verify=True)),
        "publish, reclaim": again(write),
        "reclaim": lambda: store.reclaim(names),
    }
    idle = [_ticks(lambda: time.sleep(1))]
    found = rows.measure(lambda: {name: _ticks(run) for name, run in verbs.items()})
    idle.append(_ticks(lambda: time.sleep(1)))
    rate, stop = max(rate for rate, _ in idle), max(stop for _, stop in idle)
    worst = min(found, key=lambda name: found[name][0])
    each = [f"{name} {100 * r / rate:.0f} % ({1e3 * longest:.0f} ms)" for name, (r, longest) in found.items()]
    rows.fact(
        "bounds.ticks",
        ours=f"{found[worst][0]:.0f}/s",
        allowed=f"{rate:.0f}/s",
        ratio=found[worst][0] / rate,
        note=f"{', '.join(each)}; in brackets the longest stop, {1e3 * stop:.0f} ms when idle",
    )
    store.close()


def _ticks(work: Callable[[], object]) -> tuple[float, float]:
    """Wake-ups per second of another thread while `work` runs, and its longest time between two, in seconds."""
    stop, times = threading.Event(), []

    def tick() -> None:
        while not stop.is_set():
            times.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    stop.set()
    thread.join()
    return len(times) / seconds, max(np.diff([start, *times, start + seconds]))


# --- in the fresh process


def _fresh(what: str, root: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, what, str(root)], check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout))


def _status(key: str) -> int:
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(f"{key}:"))
    return int(line.split()[1])


def _memory(store: PayloadStore) -> dict[str, float]:
    files = [file for file, *_ in store.native.scan()]
    segments = [store.segments(file)["x"] for file in files]
    requests = [Gather(segments=[s], field="x", lo=0, hi=s.rows) for s in segments]
    store.gather_many(
        [Gather(segments=[segments[0]], field="x", lo=0, hi=16)]
    )  # code and buffers are there now
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = _status("VmRSS")
    threads, stop = [1], threading.Event()

    def watch() -> None:
        while not stop.wait(0.001):
            threads.append(_status("Threads") - 1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    answers = store.gather_many(requests)
    stop.set()
    watcher.join()
    peak = _status("VmHWM") - before
    result = sum(answer[0].nbytes for answer in answers if not isinstance(answer, Exception))
    assert all((a[0] == answers[0][0]).all() for a in answers)  # type: ignore[index]
    return {"peak_mib": peak / 1024, "result_mib": result / MIB, "threads": max(threads)}


def _files(store: PayloadStore) -> dict[str, int]:
    files = [file for file, *_ in store.native.scan()]
    segments = [store.segments(file)["x"] for file in files]
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    requests = [Gather(segments=[s], field="x", lo=0, hi=4) for s in segments]
    answers = store.gather_many(requests, verify=True)
    right = sum(not isinstance(a, Exception) and len(np.unique(a[0])) == 1 for a in answers)
    return {"present": int(store.probe(segments).present.sum()), "right": right}


if __name__ == "__main__":
    with PayloadStore(sys.argv[2], create=False) as opened:
        print(json.dumps({"memory": _memory, "files": _files}[sys.argv[1]](opened)))
