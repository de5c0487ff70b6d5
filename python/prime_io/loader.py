"""The trainer's side: batches by handle come in, micro-batches as tensors go out, read ahead in the background.

    with PayloadLoader(store, exchange, fields, seq_len=8192, start=step + 1, device="cuda") as loader:
        for step in loader:
            for micro_batch in step:
                ...
            loader.done(step.number)

Every rank runs the same loop. What they must agree on (which batch, which samples are lost, whether a read failed)
they tell each other at the beginning of a step and at each micro-batch, on the caller's thread; see `ranks.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Final, Literal

import msgspec
import torch

from .batches import Batches, Settings
from .device import staging
from .exchange import Exchange
from .failure import Failure
from .fetch import Fetched, FetchError, fetch
from .microbatch import MicroBatch
from .ranks import Ranks
from .readahead import Job, ReadAhead
from .segment import FieldSpec
from .stepplan import StepPlan
from .store import PayloadStore
from .types import TrainBatch

__all__ = ["LoaderStats", "PayloadLoader", "Step"]


class LoaderStats(msgspec.Struct, frozen=True):
    """What a loader has done so far on this rank."""

    steps: int
    micro_batches: int
    samples: int
    """Of all ranks."""
    masked_samples: int
    """Of all ranks: how many of those samples were masked, since files of theirs were lost."""
    nbytes: int
    """Bytes handed out, as they were read."""
    read_s: float
    """Seconds that the background thread read."""
    waited_s: float
    """Seconds that the trainer waited for a read."""
    agreed_s: float
    """Seconds that it waited for other ranks and for batches."""
    peak_bytes: int
    """The most bytes read or being read that were not handed out."""
    pool_hits: int
    """How often a pinned slab was reused, and how often one was made; 0 on the CPU, where the store has the pool."""
    pool_misses: int

    @property
    def gb_per_s(self) -> float:
        """Rate of the reads, in 1e9 bytes per second."""
        return self.nbytes / self.read_s / 1e9 if self.read_s else 0.0


class Step:
    """A batch, as this rank trains it: iterate it once, all of it, then call `PayloadLoader.done(number)`."""

    def __init__(self, plan: StepPlan, count: int, take: Callable[[Step], MicroBatch]) -> None:
        self.number: Final = plan.batch.step
        """The step: the batch makes version `number` of the weights."""
        self.batch: Final[TrainBatch] = plan.batch
        self.masked: Final = tuple(dict.fromkeys(plan.items[i].trace_id for i in sorted(plan.masked)))
        """The traces with a sample that every rank masks, since files of it are lost."""
        self.count: Final = count
        """How many micro-batches this rank gets, as every other."""
        self.taken = 0
        """How many it has got."""
        self._take = take

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[MicroBatch]:
        while self.taken < self.count:
            yield self._take(self)


class PayloadLoader:
    """Iterates the steps of this lineage from `start` on, until the orchestrator says stop.

    `fields`: the payload fields to read, by name. `columns`: specs for per-token columns (`token_ids`, `mask`,
    `logprobs`, `advantages` and the samples' own) that differ from one row per token, such as
    `{"mask": FieldSpec(shift=1)}` for label-aligned ones.

    Samples are packed into sequences of at most `seq_len` rows, padded to a `multiple`, which the context-parallel
    size must divide; see `packing.pack`. A micro-batch is one sequence.

    One background thread reads up to `lookahead` micro-batches ahead, across steps, as long as what it has read
    and not handed out is within `budget_bytes`; a micro-batch larger than that is read alone. On a CUDA device it
    reads into pinned slabs (as many bytes idle again at most), copies the stored dtypes on a stream of its own and
    widens (`FieldSpec.dtype`) on the device. On the CPU tensors own what they view for as long as they live.

    `verify` checks the XXH3 of every block that is read. `on_missing`: samples whose files are gone or too short
    before the step are masked alike on all ranks and logged, or "raise" FileNotFoundError or CorruptPayloadError on
    all. What cannot be read later raises on all ranks at the same micro-batch: CorruptPayloadError or the OSError.

    `reader` is the name under which `done` acknowledges. `ranks`: this process's place; default: data parallel over
    all of `torch.distributed`, if that is initialised. Construct it on all ranks at the same point.

    A context manager. Use it from one thread, in the process that made it.
    """

    def __init__(
        self,
        store: PayloadStore,
        exchange: Exchange,
        fields: Mapping[str, FieldSpec],
        *,
        seq_len: int,
        start: int,
        multiple: int = 1,
        columns: Mapping[str, FieldSpec] | None = None,
        device: torch.device | str = "cpu",
        lookahead: int = 4,
        budget_bytes: int = 1 << 30,
        verify: bool = True,
        on_missing: Literal["mask", "raise"] = "mask",
        reader: str = "trainer",
        ranks: Ranks | None = None,
    ) -> None:
        if lookahead < 1 or budget_bytes < 1:
            raise ValueError(f"lookahead ({lookahead}) and budget_bytes ({budget_bytes}) must be positive")
        settings = Settings(
            fields=dict(fields),
            columns=dict(columns or {}),
            seq_len=seq_len,
            multiple=multiple,
            start=start,
            verify=verify,
            on_missing=on_missing,
            reader=reader,
        )
        self._store, self._exchange = store, exchange
        self._verify, self._reader = verify, reader
        self._owns_ranks = ranks is None
        self._ranks = Ranks() if ranks is None else ranks
        if multiple % self._ranks.cp_size:
            raise ValueError(f"multiple is {multiple}: cp size {self._ranks.cp_size} must divide it")
        self._staging = staging(torch.device(device), budget_bytes=budget_bytes)
        self._reads: ReadAhead[Fetched] = ReadAhead(budget_bytes=budget_bytes, lookahead=lookahead)
        self._batches = Batches(
            store, exchange, self._ranks, settings, soon=self._reads.soon, begin=self._begin
        )
        self._open: Step | None = None
        self._share = (0, 1)
        self._planned = 0  # micro-batches of all steps so far
        self._steps = self._micro_batches = self._samples = self._masked = self._nbytes = 0
        self._agreed_s = 0.0

    def __enter__(self) -> PayloadLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error nothing waits for a read that may take long: its thread ends by itself.
        self.close(wait=kind is None)

    def close(self, *, wait: bool = True) -> None:
        """End the background thread (`wait` for the read it is in) and free what was read ahead. Idempotent."""
        self._reads.close(wait=wait)
        if wait:
            self._staging.close()
        if self._owns_ranks:
            self._ranks.close()

    def stats(self) -> LoaderStats:
        """Counters since the loader was made."""
        return LoaderStats(
            steps=self._steps,
            micro_batches=self._micro_batches,
            samples=self._samples,
            masked_samples=self._masked,
            nbytes=self._nbytes,
            read_s=self._reads.read_s,
            waited_s=self._reads.waited_s,
            agreed_s=self._agreed_s,
            peak_bytes=self._reads.peak_bytes,
            pool_hits=self._staging.hits,
            pool_misses=self._staging.misses,
        )

    def __iter__(self) -> Iterator[Step]:
        """The steps, from the next one on. Each must be `done` before the next is asked for."""
        while (step := self._next_step()) is not None:
            yield step

    def shared(self, worker: int, workers: int) -> Iterator[MicroBatch]:
        """The micro-batches of all steps, of which this process reads every `workers`-th from the `worker`-th on.

        For `PayloadDataset`: nothing is acknowledged. Not to be mixed with the steps.
        """
        self._share = (worker, workers)
        while (step := self._next_step()) is not None:
            yield from step
            self._open = None

    def done(self, number: int) -> None:
        """Say that this rank has finished a step; once all have, acknowledge it. Deletes nothing.

        The orchestrator may reclaim the batch's files from then on: call it after the weights are published and a
        checkpoint step is committed. ValueError if that step is not the open one, or has micro-batches left.
        Errors of `Ranks.tell`; OSError on all ranks if the acknowledgement cannot be published.
        """
        self._check_usable()
        step = self._open
        if step is None or step.number != number:
            raise ValueError(f"step {number} is not open: {step.number if step else 'none'} is")
        if step.taken < step.count:
            left = step.count - step.taken
            raise ValueError(f"step {number}: {left} micro-batches are left; iterate them all")
        self._batches.meet(number, "done")
        # All have finished. That it is published is told too: if it cannot be, no rank goes on.
        failure = None
        if self._ranks.rank == 0:
            try:
                self._exchange.acknowledge(number, self._reader)
            except OSError as error:
                failure = Failure.of(error, "acknowledge")
        self._batches.meet(number, "acknowledged", failure=failure)
        self._open = None

    def _next_step(self) -> Step | None:
        self._check_usable()
        if self._open is not None:
            raise RuntimeError(f"step {self._open.number} is not done: call done({self._open.number}) first")
        began = time.perf_counter()
        plan = self._batches.next()
        self._agreed_s += time.perf_counter() - began
        if plan is None:
            return None
        self._open = Step(plan, len(self._mine(plan, self._planned - len(plan.packed))), self._take)
        self._steps += 1
        self._samples += len(plan.items)
        self._masked += len(plan.masked)
        return self._open

    def _take(self, step: Step) -> MicroBatch:
        """The next micro-batch of the open step; every rank is at the same one."""
        self._check_usable()
        if step is not self._open:
            raise ValueError(f"step {step.number} is over")
        failure = None
        try:
            try:
                fetched = self._reads.take()
            except FetchError as error:
                failure = error.failure
            except Exception as error:
                failure = Failure.of(error)
            began = time.perf_counter()
            self._batches.meet(step.number, f"micro-batch {step.taken}", failure=failure, look=True)
        except BaseException as error:
            # A signal handler may raise anywhere here: what was taken would be missing from the step.
            self._batches.fail(error)
            raise
        self._agreed_s += time.perf_counter() - began
        step.taken += 1
        self._micro_batches += 1
        self._nbytes += fetched.nbytes
        return fetched.receive()

    def _begin(self, plan: StepPlan) -> None:
        """Read a step's micro-batches after all that is being read."""
        self._reads.add([self._job(plan, i) for i in self._mine(plan, self._planned)])
        self._planned += len(plan.packed)

    def _mine(self, plan: StepPlan, before: int) -> list[int]:
        """Which sequences of a step this process reads; `before` is the number of those of earlier steps."""
        first, every_nth = self._share
        return [i for i in range(len(plan.packed)) if (before + i) % every_nth == first]

    def _job(self, plan: StepPlan, index: int) -> Job[Fetched]:
        return Job(
            plan.nbytes(plan.packed[index], wide=not self._staging.widens_late),
            lambda: fetch(plan, index, store=self._store, staging=self._staging, verify=self._verify),
        )

    def _check_usable(self) -> None:
        self._reads.check()
        self._batches.check()
