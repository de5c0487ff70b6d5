"""The loader on a CUDA device: how fast it copies, how much of it a step hides, whether every tensor is right.

    python benches/gpu_loader.py            # minutes; 2 GB of files below TMPDIR, removed at the end
    python benches/gpu_loader.py --short    # small sizes: its checks, no figures worth keeping

Prints Markdown. Exits with 1 if a tensor is not what was written, never for a missed aim. Without a CUDA device the
same flow runs on the CPU and checks the same; the figures that need a GPU are left out and said to be.
"""

from __future__ import annotations

import argparse
import math
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from duel import Entry, Times, duel
from rows import in_words
from training import EXPERTS, ROW, Checker, Run

from prime_io import LoaderStats, PayloadLoader
from prime_io.device import Slab, staging

STEP = 1.25
"""A step's length, in times that a micro-batch is read and copied in."""

COPY_AIM, HIDDEN_AIM = 0.95, 0.95
NOT_RUN = "not run: needs a GPU"

_STEPS = 4
_TIMED = 2
"""Of four steps: the second and the third."""


class Row(NamedTuple):
    """A line of the table, as text. `figures`: ours, rival, ratio."""

    work: str
    rival: str
    figures: tuple[str, str, str]
    aim: str


class Sizes(NamedTuple):
    """How much is done."""

    tokens: int
    """Of a sequence of the timed part."""
    sequences: int
    """Per step; four steps."""
    stress: tuple[int, int, int]
    """Steps, sequences per step, tokens per sequence."""
    rounds: int


FULL = Sizes(tokens=32_768, sequences=32, stress=(24, 16, 2_048), rounds=7)
SHORT = Sizes(tokens=2_048, sequences=4, stress=(4, 4, 1_024), rounds=1)


class Machine:
    """The device, and what a step on it is made of."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        size, dtype = (4096, torch.float16) if self.cuda else (64, torch.float32)
        self._a = torch.ones(size, size, dtype=dtype, device=self.device)
        self._out = torch.empty_like(self._a)

    def wait(self) -> None:
        """Until the device has done all that it was given, on all streams."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def pinned(self, values: np.ndarray) -> torch.Tensor:
        """A copy in pinned memory (where there is CUDA)."""
        made = torch.from_numpy(values)
        return made.pin_memory() if self.cuda else made.clone()

    def work(self, count: int) -> None:
        """Give the current stream `count` matmuls; does not wait for them."""
        for _ in range(count):
            torch.mm(self._a, self._a, out=self._out)

    def work_in(self, seconds: float) -> int:
        """How many matmuls take that long, at least one."""
        began, count = time.perf_counter(), 50
        while time.perf_counter() - began < 0.2:  # clocks rise, the library starts
            self.work(count)
            self.wait()
        began = time.perf_counter()
        self.work(count)
        self.wait()
        return max(1, round(seconds * count / (time.perf_counter() - began)))

    def row(self, work: str, rival: str, figures: tuple[str, str, str], aim: str = "") -> Row:
        """A row; on the CPU without its figures, which would be those of another thing."""
        return Row(work, rival, figures if self.cuda else (NOT_RUN, "", ""), aim)

    def words(self) -> str:
        """What it was run on."""
        if not self.cuda:
            return "No CUDA device: the same flow on the CPU. Tensors are checked; rows that need a GPU are not run."
        return (
            f"CUDA: {torch.cuda.get_device_name(self.device)}, {_smi(self.device)}, CUDA {torch.version.cuda}"
        )


def _smi(device: torch.device) -> str:
    """Driver and PCIe link by nvidia-smi, where it answers."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = str(device.index) if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"
    asked = "driver_version,pcie.link.gen.max,pcie.link.width.max"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader", "-i", which]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        driver, generation, width = (word.strip() for word in answer.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return "driver and PCIe not known (nvidia-smi did not answer)"
    return f"driver {driver}, PCIe {generation} x{width} at most"


def equal(tensors: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """AssertionError unless all are equal, on their device."""
    for i, (tensor, due) in enumerate(zip(tensors, expected, strict=True)):
        assert (tensor.dtype, tensor.device) == (due.dtype, due.device), (
            f"copy {i}: {tensor.dtype}, {tensor.device}"
        )
        assert torch.equal(tensor, due), f"copy {i} is not what was in host memory"


class Copies:
    """The loader's way from a slab to the device, `count` times in a row, with known bytes in the slabs.

    Slabs are taken and filled in `before`, where the loader would read into them: a copy's time is `send` to the
    end of the copy. The pool keeps all of them, so that none is pinned anew in a timed round.
    """

    def __init__(self, machine: Machine, contents: list[np.ndarray]) -> None:
        self._machine, self._contents = machine, contents
        most = max(1 << 20, contents[0].nbytes)
        self.staging = staging(machine.device, budget_bytes=2 * most * len(contents))
        self._slabs: list[tuple[Slab | None, np.ndarray]] = []

    def before(self) -> None:
        self._slabs.clear()
        for content in self._contents:
            slab = self.staging.take([("uint8", content.shape)])
            place = slab.arrays[0] if slab is not None else np.empty_like(content)
            place[...] = content
            self._slabs.append((slab, place))
        self._machine.wait()

    def run(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Copy them all; `dtype`: and widen on the device."""
        sent = [self.staging.send(slab, [place], ["uint8"]) for slab, place in self._slabs]
        tensors = [receive()[0] for receive in sent]
        if dtype is not None:
            tensors = [tensor.to(dtype) for tensor in tensors]
        self._machine.wait()
        return tensors


def copy_rate(machine: Machine, sizes: Sizes) -> Iterator[Row]:
    """(a) Pinned copies, beside PyTorch's of as many bytes."""
    random = np.random.default_rng(1)
    micro_batch = sizes.tokens * math.prod(ROW)
    for nbytes, count in ((micro_batch, 16), (5 * micro_batch, 6)):
        contents = [random.integers(0, 256, nbytes, np.uint8) for _ in range(count)]
        expected = [torch.from_numpy(content).to(machine.device) for content in contents]
        pinned = [machine.pinned(content) for content in contents]
        copies = Copies(machine, contents)

        def refill(pinned: list[torch.Tensor] = pinned, contents: list[np.ndarray] = contents) -> None:
            for tensor, content in zip(pinned, contents, strict=True):
                tensor.numpy()[...] = content
            machine.wait()

        def to(pinned: list[torch.Tensor] = pinned) -> list[torch.Tensor]:
            tensors = [tensor.to(machine.device, non_blocking=True) for tensor in pinned]
            machine.wait()
            return tensors

        def check(tensors: list[torch.Tensor], expected: list[torch.Tensor] = expected) -> None:
            equal(tensors, expected)

        times = duel(
            [
                Entry(name="ours", before=copies.before, run=copies.run, check=check),
                Entry(name="to", before=refill, run=to, check=check),
            ],
            rounds=3 * sizes.rounds,
        )
        copies.staging.close()
        ours, rival = times["ours"], times["to"]
        volume = nbytes * count / 1e9
        yield machine.row(
            f"{count} pinned copies of {nbytes / 1e6:.1f} MB, slab to device",
            'torch `.to("cuda", non_blocking=True)` from pinned memory',
            (_rate(volume, ours), _rate(volume, rival), _ratio(rival, ours)),
            aim=f"{COPY_AIM}",
        )


def narrow(machine: Machine, sizes: Sizes) -> Iterator[Row]:
    """(c) The stored uint8 over PCIe and widened there, beside int32 over PCIe."""
    random, count, shape = np.random.default_rng(2), 4, (sizes.tokens, *ROW)
    contents = [random.integers(0, 128, shape, np.uint8) for _ in range(count)]
    wide = [content.astype(np.int32) for content in contents]
    expected = [torch.from_numpy(values).to(machine.device) for values in wide]
    pageable = [torch.from_numpy(values) for values in wide]
    pinned = [machine.pinned(values) for values in wide]
    copies = Copies(machine, contents)

    def send(tensors: list[torch.Tensor], *, non_blocking: bool) -> list[torch.Tensor]:
        made = [tensor.to(machine.device, non_blocking=non_blocking) for tensor in tensors]
        machine.wait()
        return made

    def cast() -> list[torch.Tensor]:
        return send([torch.from_numpy(content.astype(np.int32)) for content in contents], non_blocking=False)

    def check(tensors: list[torch.Tensor]) -> None:
        equal(tensors, expected)

    rivals: dict[str, Callable[[], list[torch.Tensor]]] = {
        "int32 from pinned memory": lambda: send(pinned, non_blocking=True),
        "int32 from pageable memory": lambda: send(pageable, non_blocking=False),
        "cast to int32 on the CPU, pageable": cast,
    }
    ours = Entry(name="ours", before=copies.before, run=lambda: copies.run(torch.int32), check=check)
    others = [Entry(name=name, before=machine.wait, run=run, check=check) for name, run in rivals.items()]
    times = duel([ours, *others], rounds=2 * sizes.rounds)
    copies.staging.close()
    small, large = sum(c.nbytes for c in contents), sum(w.nbytes for w in wide)
    for name in rivals:
        mine, other = times["ours"], times[name]
        yield machine.row(
            f"{count} x {shape} to int32 on the device: uint8 copied ({small / 1e6:.0f} MB), widened there",
            f"{name} ({large / 1e6:.0f} MB)",
            (in_words(mine.best), in_words(other.best), _ratio(other, mine)),
        )


class Trained(NamedTuple):
    """What a run of the loader came to."""

    stats: LoaderStats
    timed_s: float
    """From the end of the first step to the end of the last but one."""


def train(machine: Machine, loader: PayloadLoader, count: int, *, each: bool) -> Trained:
    """Take every micro-batch and give the device `count` matmuls after it. The device is waited for at the end of
    each step, or after each micro-batch too.

    As much is read ahead at the end of the timed part as at its beginning, so as much as it trains is read in it.
    """
    ends: list[float] = []
    for step in loader:
        for micro_batch in step:
            machine.work(count)
            del micro_batch
            if each:
                machine.wait()
        machine.wait()
        loader.done(step.number)
        ends.append(time.perf_counter())
    return Trained(loader.stats(), ends[-2] - ends[0])


def overlap(machine: Machine, run: Run, sizes: Sizes) -> Iterator[Row]:
    """(b) How much of reading and copying a compute-bound step hides. The rows are widened on the device.

    Of a loader that is under way: it pins its slabs and gets its device memory in the first step.
    """
    opened: list[PayloadLoader] = []

    def begin() -> None:
        opened.append(run.loader(device=machine.device, dtype="int32"))
        machine.wait()

    def check(trained: Trained) -> None:
        assert (trained.stats.micro_batches, trained.stats.masked_samples) == (run.n_sequences, 0)

    def entry(name: str, count: int, *, each: bool) -> Entry:
        return Entry(
            name=name,
            before=begin,
            run=lambda: train(machine, opened[0], count, each=each),
            seconds=lambda trained: trained.timed_s,
            check=check,
            after=lambda: opened.pop().close(),
        )

    def compute(count: int, *, each: bool) -> None:
        for _ in range(_TIMED):
            for _ in range(run.sequences):
                machine.work(count)
                if each:
                    machine.wait()
            machine.wait()

    n, gigabytes = _TIMED * run.sequences, run.nbytes * _TIMED / run.steps / 1e9
    alone = entry("alone", 0, each=False)
    count = machine.work_in(STEP * duel([alone], rounds=3)["alone"].best / n)
    entries = [alone]
    for each in (False, True):
        entries += [
            entry(f"both {each}", count, each=each),
            Entry(
                name=f"compute {each}", before=machine.wait, run=lambda each=each: compute(count, each=each)
            ),
        ]
    times = duel(entries, rounds=sizes.rounds)
    for each, when in ((False, "waits for the device once a step"), (True, "waits after each micro-batch")):
        both, steps, apart = times[f"both {each}"], times[f"compute {each}"], times["alone"]
        hidden = 1 - (both.best - steps.best) / apart.best
        of_medians = 1 - (both.median - steps.median) / apart.median
        yield machine.row(
            f"{n} micro-batches from files to the device beside a step of {count} matmuls; {when}",
            "the matmuls alone; reading and copying alone",
            (
                in_words(both.best),
                f"{in_words(steps.best)} ({steps.best / apart.best:.2f} x); {in_words(apart.best)} "
                f"({gigabytes / apart.best:.1f} GB/s)",
                f"{hidden:.1%} hidden ({of_medians:.1%})",
            ),
            aim=f"{HIDDEN_AIM:.0%}",
        )


def whole_run(machine: Machine, run: Run, dtype: str | None) -> str:
    """(d) Every item of every micro-batch of the timed run, on the device."""
    checker = Checker(run, machine.device, dtype=getattr(torch, dtype or "uint8"))
    with run.loader(device=machine.device, dtype=dtype) as loader:
        for step in loader:
            for micro_batch in step:
                checker.add(micro_batch)
            loader.done(step.number)
    return f"{checker.finish()} micro-batches of {run.seq_len:,} rows, experts as {dtype or 'stored'}"


def stress(machine: Machine, run: Run, dtype: str | None, *, own_stream: bool) -> str:
    """(d) The same with few small slabs, a consumer whose stream is far behind, and other copies in the way.

    Each micro-batch is compared after matmuls that its stream has still before it, and dropped at once: if a slab
    or its bytes on the device were used again too early, the comparison would see it. `own_stream`: on a stream
    that is not the default one.
    """
    count = machine.work_in(2e-3) if machine.cuda else 1
    bulk = machine.pinned(np.zeros(32 << 20 if machine.cuda else 1 << 10, np.uint8))
    target = torch.empty_like(bulk, device=machine.device)
    machine.wait()
    consumer = _stream(machine) if own_stream else nullcontext()
    others = _stream(machine)
    # Room for two micro-batches as they are read.
    itemsize = 4 if dtype == "int32" and not machine.cuda else 1
    budget = 3 * run.seq_len * math.prod(ROW) * itemsize
    try:
        with consumer:
            checker = Checker(run, machine.device, dtype=getattr(torch, dtype or "uint8"))
            with run.loader(device=machine.device, dtype=dtype, budget_bytes=budget, lookahead=3) as loader:
                for step in loader:
                    for micro_batch in step:
                        with others:
                            target.copy_(bulk, non_blocking=True)
                        machine.work(count)
                        checker.add(micro_batch)
                        del micro_batch
                    loader.done(step.number)
                stats = loader.stats()
            compared = checker.finish()
    finally:
        machine.wait()  # the memory of the other copies may go only after them
    assert stats.peak_bytes <= budget, f"{stats.peak_bytes} bytes were held, more than the budget of {budget}"
    if machine.cuda:
        assert stats.pool_hits > 0, "no slab was used twice: nothing was put to the test"
    return (
        f"{compared} micro-batches of {run.seq_len:,} rows, experts as {dtype or 'stored'}, "
        f"{'a stream of its own' if own_stream else 'the default stream'}, "
        f"slabs reused {stats.pool_hits} times, made {stats.pool_misses}"
    )


def _stream(machine: Machine) -> AbstractContextManager[Any]:
    """What makes a new stream the current one, again and again; nothing on the CPU."""
    return torch.cuda.stream(torch.cuda.Stream(machine.device)) if machine.cuda else nullcontext()


def _rate(gigabytes: float, times: Times) -> str:
    return f"{gigabytes / times.best:.1f} GB/s"


def _ratio(rival: Times, ours: Times) -> str:
    return f"{rival.best / ours.best:.2f} ({rival.median / ours.median:.2f})"


def main() -> int:
    """Run all of it; the exit status."""
    arguments = argparse.ArgumentParser(description="The loader on a CUDA device, or its checks on the CPU.")
    arguments.add_argument("--short", action="store_true", help="small sizes")
    sizes = SHORT if arguments.parse_args().short else FULL
    began = time.perf_counter()
    machine = Machine()
    if not machine.cuda:
        sizes = sizes._replace(rounds=1)  # only the checks count
    print(machine.words())
    print(
        f"PyTorch {torch.__version__}, Python {platform.python_version()}, Linux {platform.release()}\n",
        flush=True,
    )
    failures: list[str] = []
    rows: list[Row] = []
    right: list[str] = []

    def attempt(name: str, part: Callable[[], object]) -> None:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            part()
        except AssertionError as error:
            failures.append(f"{name}: {error}")

    with tempfile.TemporaryDirectory(prefix="gpu_loader-") as directory:
        timed = Run(Path(directory) / "timed", steps=_STEPS, sequences=sizes.sequences, seq_len=sizes.tokens)
        steps, sequences, tokens = sizes.stress
        small = Run(Path(directory) / "stress", steps=steps, sequences=sequences, seq_len=tokens)
        for dtype in (None, "int32"):
            attempt(
                f"{EXPERTS} as {dtype}", lambda dtype=dtype: right.append(whole_run(machine, timed, dtype))
            )
            for own in (False, True):
                attempt(
                    f"stress, {EXPERTS} as {dtype}, own stream {own}",
                    lambda dtype=dtype, own=own: right.append(stress(machine, small, dtype, own_stream=own)),
                )
        attempt("copy rate", lambda: rows.extend(copy_rate(machine, sizes)))
        attempt("overlap", lambda: rows.extend(overlap(machine, timed, sizes)))
        attempt("narrow and wide", lambda: rows.extend(narrow(machine, sizes)))
        for run in (timed, small):
            run.close()

    print("| work | against | ours | rival | ratio (medians) | aim |\n|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join((row.work, row.rival, *row.figures, row.aim))} |")
    print("\nEvery item equal to what was written, on the device:\n")
    for line in right:
        print(f"- {line}")
    for line in failures:
        print(f"- WRONG: {line}")
    print(f"\n{time.perf_counter() - began:.0f} s in all.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
