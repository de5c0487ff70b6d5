"""A trainer's time between its steps: the loader, which reads ahead, beside reading each micro-batch before its step.

The files are in the page cache. A step sleeps, as a process does whose GPU works, for 1.25 times what the loader's
thread takes to read one micro-batch; that is measured first. What the trainer does not spend in steps it waits.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from duel import Entry
from rows import Rows, in_words
from training import EXPERTS, ROW, Checker, Run

from prime_io.packing import Packed
from prime_io.stepplan import StepPlan

STEP = 1.25
"""A step's length, in reads of a micro-batch."""

ALLOWED = 0.05
"""The share of a trainer's time that it may wait."""

OURS, LIMIT = "prime_io", "the steps alone"
RIVAL, NARROW = "pread, cast to int32, then step", "pread, narrow, reused, then step"


class Spent(NamedTuple):
    """Where the time of a whole run went, in seconds."""

    wall_s: float
    stepped_s: float
    waited_s: float
    """What the trainer waited by its own account: `LoaderStats`, or the time between steps."""
    micro_batches: int

    @property
    def share(self) -> float:
        return self.waited_s / self.wall_s


class Steps:
    """Calls a trainer's step and counts its time."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        self._began = time.perf_counter()
        self._stepped_s, self._count = 0.0, 0

    def __call__(self) -> None:
        began = time.perf_counter()
        self._step()
        self._stepped_s += time.perf_counter() - began
        self._count += 1

    def spent(self, waited_s: float | None = None) -> Spent:
        wall = time.perf_counter() - self._began
        between = wall - self._stepped_s
        return Spent(wall, self._stepped_s, between if waited_s is None else waited_s, self._count)


@pytest.fixture(scope="module")
def run(disk: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    short = request.config.getoption("--short")
    made = Run(disk / "run", steps=2 if short else 6, sequences=16 if short else 32, seq_len=32_768)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("loader.waiting", {}),
        ("loader.unverified", {"verify": False}),
        ("loader.int32", {"dtype": "int32"}),
    ],
)
def test_sleeping(rows: Rows, run: Run, key: str, options: dict[str, Any]) -> None:
    """A step that leaves the CPUs alone, with checksums and without, and with the engine widening for it."""
    check_all(run, **options)
    read_s = read_time(run, **options)
    kind = ", ".join(f"{name}={value}" for name, value in options.items()) or "default"
    contest(rows, run, key, lambda: time.sleep(STEP * read_s), read_s, f"sleeping step, {kind}", **options)


def test_working(rows: Rows, run: Run) -> None:
    """A step that computes on one thread of the CPUs that also read: no target, there is less to hide behind."""
    read_s = read_time(run)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    a = torch.rand(256, 256)
    times = []
    for _ in range(50):
        began = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - began)
    count = max(1, round(STEP * read_s / min(times)))

    def step() -> None:
        for _ in range(count):
            a @ a

    contest(rows, run, "loader.cpu", step, read_s, f"{count} matmuls as the step")
    torch.set_num_threads(threads)


def contest(
    rows: Rows, run: Run, key: str, step: Callable[[], object], read_s: float, title: str, **options: Any
) -> None:
    spent: dict[str, list[Spent]] = {name: [] for name in (OURS, RIVAL, NARROW, LIMIT)}

    def entry(name: str, work: Callable[[Steps], Spent]) -> Entry:
        def check(result: Spent) -> None:
            assert result.micro_batches == run.n_sequences
            spent[name].append(result)

        return Entry(name=name, run=lambda: work(Steps(step)), check=check)

    reused = np.zeros((run.seq_len, *ROW), np.uint8)
    times = rows.contest(
        f"loader: {run.n_sequences} micro-batches of {run.seq_len:,} tokens, {title}",
        [
            entry(OURS, lambda steps: ours(run, steps, **options)),
            entry(RIVAL, lambda steps: synchronous(run, steps, widened)),
            entry(NARROW, lambda steps: synchronous(run, steps, lambda length: reused[:length])),
            entry(LIMIT, lambda steps: alone(run, steps)),
        ],
        rounds=3,
        volume=run.nbytes / 1e9,
    )
    timed = {name: all_rounds[1:] for name, all_rounds in spent.items()}  # the first round is the warm-up
    shares = {name: sorted(one.share for one in some) for name, some in timed.items()}
    mine, theirs = shares[OURS], shares[RIVAL]
    between = min(1 - one.stepped_s / one.wall_s for one in timed[OURS])
    rows.fact(
        key,
        ours=f"{mine[0]:.1%} of its time",
        allowed=f"{ALLOWED:.0%}; {theirs[0]:.0%} there",
        ratio=ALLOWED / mine[0],
        note=f"worst round {mine[-1]:.1%}; all but its steps {between:.1%}; a read took {in_words(read_s)}",
    )
    if key == "loader.waiting":
        rows.row("loader.time", times, rival=RIVAL, limit=LIMIT)
        rows.row("loader.narrow", times, rival=NARROW, limit=LIMIT)


def ours(run: Run, steps: Steps, **options: Any) -> Spent:
    with run.loader(**options) as loader:
        for step in loader:
            for micro_batch in step:
                steps()
                del micro_batch
            loader.done(step.number)
        stats = loader.stats()
    assert stats.masked_samples == 0 and stats.nbytes >= run.nbytes
    return steps.spent(stats.waited_s + stats.agreed_s)


def read_time(run: Run, **options: Any) -> float:
    """Seconds that the loader's thread reads, per micro-batch, when nothing holds it up: the median of three runs."""
    took = []
    for _ in range(3):
        gc.collect()
        with run.loader(**options) as loader:
            for step in loader:
                for micro_batch in step:
                    del micro_batch
                loader.done(step.number)
            took.append(loader.stats().read_s / run.n_sequences)
    return sorted(took)[1]


def widened(length: int) -> np.ndarray:
    """The array that a micro-batch of today is cast into."""
    return np.full((length, *ROW), 0, np.int32)


def synchronous(
    run: Run,
    steps: Steps,
    destination: Callable[[int], np.ndarray],
    check: Callable[[StepPlan, Packed, np.ndarray], object] = lambda *_: None,
) -> Spent:
    """Read the experts of a micro-batch (its small columns are left out), then step, one after the other."""
    for plan in run.plans():
        for packed in plan.packed:
            result = destination(packed.length)
            for slot in packed.slots:
                for part in plan.own(slot, EXPERTS):
                    file = os.open(f"{run.store.root}/{part.file}", os.O_RDONLY)
                    data = os.pread(file, part.rows * ROW[0] * ROW[1], part.offset)
                    os.close(file)
                    at = slot.start + part.pos
                    result[at : at + part.rows] = np.frombuffer(data, np.uint8).reshape(-1, *ROW)
            check(plan, packed, result)
            steps()
    return steps.spent()


def alone(run: Run, steps: Steps) -> Spent:
    """No reading at all."""
    for _ in range(run.n_sequences):
        steps()
    return steps.spent()


def check_all(run: Run, **options: Any) -> None:
    """Ours and the rivals once, untimed: every item of every micro-batch is what was written."""
    dtype = torch.int32 if options.get("dtype") == "int32" else torch.uint8
    checker = Checker(run, torch.device("cpu"), dtype=dtype)
    with run.loader(**options) as loader:
        for step in loader:
            for micro_batch in step:
                checker.add(micro_batch)
            loader.done(step.number)
    assert checker.finish() == run.n_sequences

    def check(plan: StepPlan, packed: Packed, result: np.ndarray) -> None:
        for slot in packed.slots:
            own = run.experts(plan.items[slot.sample].trace_id, slot.n_tokens)
            assert np.array_equal(result[slot.start : slot.start + len(own)], own)

    reused = np.zeros((run.seq_len, *ROW), np.uint8)
    for destination in (widened, lambda length: reused[:length]):
        synchronous(run, Steps(lambda: None), destination, check)
