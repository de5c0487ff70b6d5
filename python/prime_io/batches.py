"""Which batch is next, and what of it is lost: found by some ranks, known to all.

Rank 0 announces a batch; every rank plans it and probes what it will read, in the background; when all have
looked, they tell each other what they found. Announcing and telling ride on the meetings that the loader holds
anyway, so that the next batch is agreed while the present step still goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from . import _native
from .exchange import Exchange, check_reader
from .failure import Failure, Findings, Lost, first_failure
from .packing import CORE
from .ranks import Ranks
from .segment import FieldSpec
from .stepplan import StepPlan
from .store import PayloadStore
from .types import TrainBatch

log = logging.getLogger("prime_io")

_POLL_S: Final = 0.01
"""How often rank 0 looks for a batch, seconds."""
_BEAT_S: Final = 0.25
"""How often ranks that wait for a batch hear of each other, seconds."""
_BATCH, _END, _FAILURE = b"B", b"E", b"F"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks must have alike. ValueError for what cannot work."""

    fields: dict[str, FieldSpec]
    columns: dict[str, FieldSpec]
    seq_len: int
    multiple: int
    start: int
    verify: bool
    on_missing: Literal["mask", "raise"]
    reader: str

    def __post_init__(self) -> None:
        for name, spec in [*self.fields.items(), *self.columns.items()]:
            if not isinstance(spec, FieldSpec):
                raise TypeError(f"the spec of {name!r} is a {type(spec).__name__}, not a FieldSpec")
        for what in ("seq_len", "multiple", "start"):
            if not isinstance(getattr(self, what), int):
                raise TypeError(f"{what} is {getattr(self, what)!r}, not an integer")
        if self.start < 1:
            raise ValueError(f"start is {self.start}: the first batch is 1")
        check_reader(self.reader)
        if self.on_missing not in ("mask", "raise"):
            raise ValueError(f'on_missing is {self.on_missing!r}; use "mask" or "raise"')
        if self.multiple < 1 or self.seq_len < 1 or self.seq_len % self.multiple:
            raise ValueError(
                f"seq_len {self.seq_len} must be a positive multiple of multiple {self.multiple}"
            )
        if both := self.fields.keys() & CORE.keys():
            raise ValueError(
                f"{sorted(both)} are columns, which are always read: give their specs as columns"
            )
        for name, spec in self.columns.items():
            if spec.align != "token" or spec.ragged:
                raise ValueError(
                    f"column {name!r} is one row per token: only shift, fill and dtype can be chosen"
                )
        if "mask" in self.columns and self.columns["mask"].fill != 0:
            raise ValueError("padding and lost samples are never trained: the fill of mask is 0")


class _Upcoming:
    """An announced batch."""

    def __init__(self, batch: TrainBatch) -> None:
        self.batch = batch
        self.looked = threading.Event()
        self.plan: StepPlan | None = None
        self.findings = Findings()
        self.agreed = False
        self.error: Exception | None = None


class Batches:
    """The batches of a lineage from `settings.start` on, agreed among the ranks.

    `soon` runs a call in the background; `begin` is told of a plan as soon as all ranks agree on it.
    ValueError on every rank if their settings, stores or lineages differ.
    """

    def __init__(
        self,
        store: PayloadStore,
        exchange: Exchange,
        ranks: Ranks,
        settings: Settings,
        *,
        soon: Callable[[Callable[[], object]], None],
        begin: Callable[[StepPlan], None],
    ) -> None:
        self._store, self._exchange, self._ranks, self._settings = store, exchange, ranks, settings
        self._soon, self._begin = soon, begin
        self._next = settings.start
        self._upcoming: _Upcoming | None = None
        self._ended = False
        self._failed: BaseException | None = None
        self._check_alike()

    def next(self) -> StepPlan | None:
        """The next batch, planned; waits for it. None once the orchestrator has said that none will come.

        Raises, on all ranks, what any of them met when it looked at the batch.
        """
        while self._upcoming is None and not self._ended:
            self.meet(self._next, "waiting for the batch", look=True, wait_s=_BEAT_S)
        upcoming = self._upcoming
        if upcoming is None:
            return None
        while not upcoming.agreed:
            upcoming.looked.wait()
            self.meet(self._next, "looked")
        if upcoming.error is not None:
            self._failed = upcoming.error
            raise upcoming.error
        self._upcoming, self._next = None, self._next + 1
        return upcoming.plan

    def meet(
        self, step: int, at: str, *, failure: Failure | None = None, look: bool = False, wait_s: float = 0.0
    ) -> None:
        """Meet the other ranks at this place: all raise what failed on any, all learn of the next batch.

        `look`: rank 0 looks for it, for up to `wait_s`. Errors of `Ranks.tell`. After any error nothing goes on.
        """
        self.check()
        message = b""
        if look and failure is None and self._upcoming is None and not self._ended and self._ranks.rank == 0:
            try:
                message = self._look_for(wait_s)
            except Exception as error:
                failure = Failure.of(error, "read the batch")
        if failure is not None:
            message = _FAILURE + msgspec.msgpack.encode(failure)
        ready = self._upcoming is not None and not self._upcoming.agreed and self._upcoming.looked.is_set()
        try:
            said = self._ranks.tell(message, step=step, at=at, ready=ready)
            failures = [
                (rank, msgspec.msgpack.decode(s.message[1:], type=Failure))
                for rank, s in enumerate(said)
                if s.message[:1] == _FAILURE
            ]
            if failures:
                raise first_failure(failures, f"step {step}, {at}")
            if said[0].message[:1] == _END:
                self._ended = True
            elif said[0].message[:1] == _BATCH:
                self._announced(msgspec.msgpack.decode(said[0].message[1:], type=TrainBatch))
            elif all(s.ready for s in said):
                self._agree(step)
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Nothing goes on after this: ranks may be at different places."""
        self._failed = error

    def check(self) -> None:
        """RuntimeError once something has failed."""
        if self._failed is not None:
            raise RuntimeError(f"the loader cannot go on after: {self._failed or repr(self._failed)}")

    def _look_for(self, wait_s: float) -> bytes:
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

    def _announced(self, batch: TrainBatch) -> None:
        upcoming = self._upcoming = _Upcoming(batch)

        def look() -> None:
            try:
                upcoming.plan = self._plan(batch)
                upcoming.findings = Findings(upcoming.plan.probe(self._store))
            except Exception as error:
                upcoming.findings = Findings([], Failure.of(error))
            finally:
                upcoming.looked.set()

        self._soon(look)

    def _plan(self, batch: TrainBatch) -> StepPlan:
        if batch.lineage != self._exchange.lineage.id:
            raise ValueError(f"batch {batch.step} is of lineage {batch.lineage}, not of this one")
        return StepPlan(
            batch,
            fields=self._settings.fields,
            columns=self._settings.columns,
            seq_len=self._settings.seq_len,
            multiple=self._settings.multiple,
            dp=(self._ranks.dp_rank, self._ranks.dp_size),
            cp=(self._ranks.cp_rank, self._ranks.cp_size),
        )

    def _agree(self, step: int) -> None:
        """All ranks have looked: leave out alike what any of them found lost, and begin to read."""
        upcoming = self._upcoming
        assert upcoming is not None, "all ranks have the same next batch"
        said = self._ranks.tell(msgspec.msgpack.encode(upcoming.findings), step=step, at="findings")
        every = [msgspec.msgpack.decode(s.message, type=Findings) for s in said]
        failures = [(rank, found.failure) for rank, found in enumerate(every) if found.failure is not None]
        upcoming.agreed = True
        # What is wrong with the next batch is raised when it is asked for: the present step goes on.
        if failures:
            upcoming.error = first_failure(failures, f"step {upcoming.batch.step}")
            return
        plan = upcoming.plan
        assert plan is not None, "no rank failed"
        lost = {(one.sample, one.field): one for found in every for one in found.lost}
        upcoming.error = self._leave_out(plan, [lost[key] for key in sorted(lost)])
        if upcoming.error is None:
            self._begin(plan)

    def _leave_out(self, plan: StepPlan, lost: list[Lost]) -> Exception | None:
        texts = [f"trace {plan.items[one.sample].trace_id}, field {one.field!r}: {one.why()}" for one in lost]
        required = [i for i, one in enumerate(lost) if plan.specs[one.field].required]
        if required and self._settings.on_missing == "raise":
            return lost[required[0]].exception(f"step {plan.batch.step}, {texts[required[0]]}")
        try:
            plan.agree(lost)
        except ValueError as error:
            return ValueError(f"step {plan.batch.step}: {error}")
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

    def _check_alike(self) -> None:
        alike = msgspec.json.encode((self._settings, self._exchange.lineage.id, self._store.uuid))
        mine = _native.xxh3(alike).encode()
        said = self._ranks.tell(mine, step=0, at="construction of the loader")
        if others := [rank for rank, s in enumerate(said) if s.message != mine]:
            raise ValueError(
                f"rank {self._ranks.rank} and ranks {others} were given other arguments, another store, or another "
                "lineage: all ranks must be made alike, after the same prepare_resume"
            )
