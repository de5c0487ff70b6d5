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

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Literal

import msgspec
import torch

from . import _native
from .device import staging
from .exchange import Exchange
from .failure import Failure, Findings, Lost, first_failure
from .fetch import Fetched, FetchError, fetch
from .microbatch import MicroBatch
from .packing import CORE
from .ranks import Ranks, Said
from .readahead import Job, ReadAhead
from .segment import FieldSpec
from .stepplan import StepPlan
from .store import PayloadStore
from .types import TrainBatch

__all__ = ["LoaderStats", "PayloadLoader", "Step"]

log = logging.getLogger("prime_io")

_POLL_S: Final = 0.01
"""How often rank 0 looks for a batch, seconds."""
_BEAT_S: Final = 0.25
"""How often ranks that wait for a batch hear of each other, seconds."""
_BATCH, _END, _FAILURE = b"B", b"E", b"F"


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


class _Upcoming:
    """The next batch: announced to all ranks, being looked at here, agreed."""

    def __init__(self, batch: TrainBatch) -> None:
        self.batch = batch
        self.looked = threading.Event()
        self.plan: StepPlan | None = None
        self.findings = Findings()
        self.indices: list[int] = []
        self.agreed = False
        self.error: Exception | None = None


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
        columns = dict(columns or {})
        _check(fields, columns, seq_len, multiple, lookahead, budget_bytes, on_missing)
        self._store, self._exchange = store, exchange
        self._fields, self._columns = dict(fields), columns
        self._seq_len, self._multiple = seq_len, multiple
        self._verify, self._on_missing, self._reader_name = verify, on_missing, reader
        self._owns_ranks = ranks is None
        self._ranks = Ranks() if ranks is None else ranks
        self._next = start
        self._open: Step | None = None
        self._upcoming: _Upcoming | None = None
        self._ended = False
        self._share = (0, 1)
        self._planned = 0  # micro-batches of all steps so far
        self._failed: Exception | None = None
        self._steps = self._micro_batches = self._samples = self._masked = self._nbytes = 0
        self._agreed_s = 0.0
        self._staging = staging(torch.device(device), budget_bytes=budget_bytes)
        self._reads: ReadAhead[Fetched] = ReadAhead(budget_bytes=budget_bytes, lookahead=lookahead)
        if multiple % self._ranks.cp_size:
            raise ValueError(f"multiple is {multiple}: cp size {self._ranks.cp_size} must divide it")
        self._check_alike()

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
            raise ValueError(
                f"step {number}: {step.count - step.taken} micro-batches are left; iterate them all"
            )
        self._tell(at="done")
        failure = None
        if self._ranks.rank == 0:
            try:
                self._exchange.acknowledge(number, self._reader_name)
            except OSError as error:
                failure = Failure.of(error, "acknowledge")
        self._tell(at="acknowledged", failure=failure)
        self._open = None

    # -- steps

    def _next_step(self) -> Step | None:
        self._check_usable()
        if self._open is not None:
            raise RuntimeError(f"step {self._open.number} is not done: call done({self._open.number}) first")
        began = time.perf_counter()
        while self._upcoming is None and not self._ended:
            if self._ranks.rank == 0:
                self._tell(at="waiting for the batch", announce=True, wait_s=_BEAT_S)
            else:
                self._tell(at="waiting for the batch")
        upcoming = self._upcoming
        if upcoming is None:
            return None
        while not upcoming.agreed:
            upcoming.looked.wait()
            self._tell(at="looked")
        self._agreed_s += time.perf_counter() - began
        if upcoming.error is not None:
            self._failed = upcoming.error
            raise upcoming.error
        plan = upcoming.plan
        assert plan is not None, "it is agreed and no error"
        self._upcoming, self._next = None, self._next + 1
        self._open = Step(plan, len(upcoming.indices), self._take)
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
            fetched = self._reads.take()
        except FetchError as error:
            failure = error.failure
        except Exception as error:
            failure = Failure.of(error)
        began = time.perf_counter()
        self._tell(at=f"micro-batch {step.taken}", failure=failure, announce=True)
        self._agreed_s += time.perf_counter() - began
        step.taken += 1
        self._micro_batches += 1
        self._nbytes += fetched.nbytes
        return fetched.receive()

    def _check_usable(self) -> None:
        self._reads.check()
        if self._failed is not None:
            raise RuntimeError(f"the loader cannot go on after: {self._failed}")

    # -- agreeing

    def _tell(
        self, *, at: str, failure: Failure | None = None, announce: bool = False, wait_s: float = 0.0
    ) -> None:
        """Meet the other ranks: raise what failed on any, learn of the next batch, agree on it once all looked."""
        message = b""
        if (
            announce
            and failure is None
            and self._ranks.rank == 0
            and self._upcoming is None
            and not self._ended
        ):
            try:
                message = self._look_for_batch(wait_s)
            except (OSError, ValueError) as error:
                failure = Failure.of(error, "read the batch")
        if failure is not None:
            message = _FAILURE + msgspec.msgpack.encode(failure)
        number = self._next if self._open is None else self._open.number
        ready = self._upcoming is not None and not self._upcoming.agreed and self._upcoming.looked.is_set()
        try:
            said = self._ranks.tell(message, step=number, at=at, ready=ready)
            self._raise(said, f"step {number}, {at}")
            if said[0].message[:1] == _END:
                self._ended = True
            elif said[0].message[:1] == _BATCH:
                self._announced(msgspec.msgpack.decode(said[0].message[1:], type=TrainBatch))
            elif all(s.ready for s in said):
                self._agree(number)
        except Exception as error:
            self._failed = error
            raise

    def _look_for_batch(self, wait_s: float) -> bytes:
        end = time.monotonic() + wait_s
        while True:
            batch, is_last = self._exchange.look_for(self._next)
            if batch is not None:
                return _BATCH + msgspec.msgpack.encode(batch)
            if is_last:
                return _END
            if time.monotonic() >= end:
                return b""
            time.sleep(_POLL_S)

    def _raise(self, said: list[Said], where: str) -> None:
        failures = [
            (rank, msgspec.msgpack.decode(s.message[1:], type=Failure))
            for rank, s in enumerate(said)
            if s.message[:1] == _FAILURE
        ]
        error = first_failure(failures, where)
        if error is not None:
            raise error

    def _announced(self, batch: TrainBatch) -> None:
        """Look at a batch in the background: plan it, probe what this rank will read."""
        upcoming = self._upcoming = _Upcoming(batch)
        ranks = self._ranks

        def look() -> None:
            try:
                if batch.lineage != self._exchange.lineage.id:
                    raise ValueError(f"batch {batch.step} is of lineage {batch.lineage}, not this one")
                upcoming.plan = StepPlan(
                    batch,
                    fields=self._fields,
                    columns=self._columns,
                    seq_len=self._seq_len,
                    multiple=self._multiple,
                    dp=(ranks.dp_rank, ranks.dp_size),
                    cp=(ranks.cp_rank, ranks.cp_size),
                )
                upcoming.findings = Findings(upcoming.plan.probe(self._store))
            except Exception as error:
                upcoming.findings = Findings([], Failure.of(error))
            finally:
                upcoming.looked.set()

        self._reads.soon(look)

    def _agree(self, number: int) -> None:
        """All ranks have looked: leave out alike what any of them found lost, and begin to read."""
        upcoming = self._upcoming
        assert upcoming is not None, "all ranks have the same next batch"
        mine = msgspec.msgpack.encode(upcoming.findings)
        said = self._ranks.tell(mine, step=number, at="findings")
        every = [msgspec.msgpack.decode(s.message, type=Findings) for s in said]
        where = f"step {upcoming.batch.step}"
        error = first_failure([(r, f.failure) for r, f in enumerate(every) if f.failure], where)
        plan = upcoming.plan
        if error is None and plan is not None:
            lost = {(one.sample, one.field): one for findings in every for one in findings.lost}
            error = self._leave_out(plan, [lost[key] for key in sorted(lost)])
        upcoming.error = error
        upcoming.agreed = True
        if error is None and plan is not None:
            first, every_nth = self._share
            upcoming.indices = [
                i for i in range(len(plan.packed)) if (self._planned + i) % every_nth == first
            ]
            self._planned += len(plan.packed)
            self._reads.add(self._job(plan, i) for i in upcoming.indices)

    def _leave_out(self, plan: StepPlan, lost: list[Lost]) -> Exception | None:
        texts = [f"trace {plan.items[one.sample].trace_id}, field {one.field!r}: {one.why()}" for one in lost]
        required = [i for i, one in enumerate(lost) if plan.specs[one.field].required]
        if required and self._on_missing == "raise":
            return lost[required[0]].exception(f"step {plan.batch.step}, {texts[required[0]]}")
        try:
            plan.agree(lost)
        except ValueError as error:
            return error
        if lost:
            log.warning(
                "step %d: %d of %d samples masked, %d optional fields left out: %s",
                plan.batch.step,
                len(plan.masked),
                len(plan.items),
                len(lost) - len(required),
                "; ".join(f"{text} ({one.file})" for text, one in zip(texts, lost, strict=True)),
            )
        return None

    def _job(self, plan: StepPlan, index: int) -> Job[Fetched]:
        return Job(
            plan.nbytes(plan.packed[index], wide=not self._staging.widens_late),
            lambda: fetch(plan, index, store=self._store, staging=self._staging, verify=self._verify),
        )

    def _check_alike(self) -> None:
        """ValueError on all ranks unless they were made alike."""
        settings: list[Any] = [self._fields, self._columns, self._seq_len, self._multiple, self._next]
        settings += [
            self._verify,
            self._on_missing,
            self._reader_name,
            self._exchange.lineage.id,
            self._store.uuid,
        ]
        mine = _native.xxh3(msgspec.json.encode(settings)).encode()
        said = self._ranks.tell(mine, step=self._next, at="settings")
        if others := [rank for rank, s in enumerate(said) if s.message != mine]:
            raise ValueError(
                f"rank {self._ranks.rank} and ranks {others} were given other arguments, another store, or another "
                "lineage: all ranks must be made alike, after the same prepare_resume"
            )


def _check(
    fields: Mapping[str, FieldSpec],
    columns: Mapping[str, FieldSpec],
    seq_len: int,
    multiple: int,
    lookahead: int,
    budget_bytes: int,
    on_missing: str,
) -> None:
    if on_missing not in ("mask", "raise"):
        raise ValueError(f'on_missing is {on_missing!r}; use "mask" or "raise"')
    if lookahead < 1 or budget_bytes < 1:
        raise ValueError(f"lookahead ({lookahead}) and budget_bytes ({budget_bytes}) must be positive")
    if multiple < 1 or seq_len < 1 or seq_len % multiple:
        raise ValueError(f"seq_len {seq_len} must be a positive multiple of multiple {multiple}")
    if both := fields.keys() & CORE.keys():
        raise ValueError(f"{sorted(both)} are columns, which are always read: give their specs as columns")
    for name, spec in columns.items():
        if spec.align != "token" or spec.ragged:
            raise ValueError(
                f"column {name!r} is one row per token: only shift, fill and dtype can be chosen"
            )
    if "mask" in columns and columns["mask"].fill != 0:
        raise ValueError("padding and lost samples are never trained: the fill of mask is 0")
