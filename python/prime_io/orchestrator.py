"""`Orchestrator`: the reference loop around source, dispatcher, sink and checkpoints. It owns the store.

Three coroutines share one event loop: results are consumed as they come, batches ship when they may, and the
exchange directory is watched for new weights and acknowledgements. A cut is made in the instant a batch is
taken, with no await between; its save runs beside everything else, and only releases wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from . import _native
from .checkpoint import CheckpointManager
from .cut import Cut
from .dispatcher import Dispatcher
from .exchange import Exchange
from .restore import RestoreReport, saved_progress, sink_state
from .sink import EpisodeRefusedError, TrainSink
from .source import TrainSource
from .state import decode_state, encode_state
from .store import PayloadStore, SweepReport
from .types import Episode, PackedBatch, Policy, Progress

log = logging.getLogger("prime_io.orchestrator")

STOP_GRACE_S = 60.0
"""How long a run that is told to stop waits for its last batch to be trained, in seconds."""

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


OnEvent = Callable[[str, Mapping[str, Any]], None]


class Stateful(Protocol):
    """User state that travels in the checkpoint (an algorithm, a curriculum): msgpack types and ndarrays."""

    def state_dict(self) -> dict[str, Any]:
        """The state of this instant."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from it."""
        ...


class Orchestrator:
    """Runs batches up to `max_steps`, with a checkpoint every `checkpoint_every` steps and at the last.

    Batch s ships only when policy version s - 1 - `max_lead` or newer is published. No new group is opened
    while the next batch waits for that and the queue can fill it and `max_lead` more, nor while live payload
    files exceed `max_payload_bytes` and the queue can fill the next batch. `readers`: who acknowledges batches.
    `on_event(name, facts)` is told of cuts, saves, shipped and trained batches, restores and sweeps.
    """

    def __init__(
        self,
        *,
        exchange: Exchange,
        store: PayloadStore,
        source: TrainSource,
        dispatcher: Dispatcher,
        sink: TrainSink,
        manager: CheckpointManager,
        progress: Progress,
        policy: Policy,
        max_steps: int,
        checkpoint_every: int,
        max_lead: int = 1,
        max_payload_bytes: int | None = None,
        readers: Sequence[str] = ("trainer",),
        algorithm: Stateful | None = None,
        on_event: OnEvent | None = None,
        poll_s: float = 0.02,
    ) -> None:
        if checkpoint_every < 1 or max_steps < 1 or not readers:
            raise ValueError(
                f"checkpoint_every={checkpoint_every}, max_steps={max_steps}, readers={list(readers)}: the first "
                "two count from 1, and somebody has to read the batches"
            )
        for env in source.envs.values():
            if sink.group_size(env.name) != env.group_size:
                raise ValueError(
                    f"environment {env.name!r} draws groups of {env.group_size}, and the sink's group_size for it is "
                    f"{sink.group_size(env.name)}: no group of it would ever be complete"
                )
        self.sink = sink
        self.dispatcher = dispatcher
        self._exchange = exchange
        self._store = store
        self._source = source
        self._manager = manager
        self._progress = progress
        self._policy = policy
        self._max_steps = max_steps
        self._checkpoint_every = checkpoint_every
        self._max_lead = max_lead
        self._max_payload_bytes = max_payload_bytes
        self._readers = tuple(readers)
        self._algorithm = algorithm
        self._on_event = on_event
        self._poll_s = poll_s
        self._trained = progress.step - 1
        self._saves: set[asyncio.Task[None]] = set()
        self._sweeping: asyncio.Task[None] | None = None
        self._last_saved = 0
        self._stopping = self._links_tried = False
        self._published: int | None = None
        self._taking: int | None = None  # the version of an episode between the dispatcher and the sink
        self._failure: BaseException | None = None
        self._wake = asyncio.Event()
        dispatcher.may_open = self._may_open
        sink.on_result = source.on_result
        sink.on_consumed = dispatcher.forget_consumed_group
        sink.on_drop = lambda reason, ids: self._tell("dropped", {"reason": reason, "traces": list(ids)})

    # -- checkpoint

    def snapshot_state(self) -> Cut:
        """The cut: everything of one instant; no await, no I/O, nothing that grows with tokens or segments."""
        sink = self.sink.state_dict(self.dispatcher.open_train_groups())
        queue = sink.pop("queue")
        parts = {
            "progress": msgspec.msgpack.encode(self._progress),
            "source": encode_state(self._source.state_dict()),
            "sink": msgspec.msgpack.encode(sink),
        }
        if self._algorithm is not None:
            parts["algorithm"] = encode_state(self._algorithm.state_dict())
        return Cut(self._progress.step - 1, parts, queue, self.sink.open_members())

    def _cut(self) -> None:
        """Take a snapshot and start its save; what is held now stays until that is over."""
        cut = self.snapshot_state()
        waiting = self.sink.ledger.open_snapshot()
        if self._on_event is not None:
            self._on_event(
                "cut",
                {
                    "step": cut.step,
                    "queued": self.sink.queued_trace_ids(),
                    "groups": {g: [len(o.members), o.target] for g, o in self.sink.open_groups.items()},
                    "emitted": self.dispatcher.emitted,
                    "inflight": self.dispatcher.inflight,
                    "drawn": self._source.drawn,
                    "members": [t.id for member in cut.members for t in member.traces],
                    "files": self.sink.queued_files(),
                },
            )
        task = asyncio.ensure_future(self._save(cut, waiting))
        self._saves.add(task)
        task.add_done_callback(self._saved)

    def _saved(self, task: asyncio.Task[None]) -> None:
        self._saves.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._wake.set()

    async def _save(self, cut: Cut, waiting: set[str]) -> None:
        try:
            snapshot = await asyncio.to_thread(cut.snapshot)
            report = await self._manager.save(snapshot, store=self._store)
            await asyncio.to_thread(snapshot.let_go)
        except asyncio.CancelledError:
            raise  # the save itself goes on in its thread and still needs the files
        except BaseException:
            self.sink.close_snapshot(waiting)
            raise
        self.sink.close_snapshot(waiting)
        if report is not None:
            self._last_saved = cut.step
        self._tell("saved", {"step": cut.step, "committed": report is not None})
        await self._retain()
        if report is not None and (self._sweeping is None or self._sweeping.done()):
            self._sweeping = asyncio.ensure_future(self._sweep_orphans())

    async def _retain(self) -> None:
        """Remove what need not stay. What fails is left to the next save or acknowledgement."""
        try:
            await self._manager.apply_retention()
        except (OSError, ValueError) as error:
            log.warning("retention failed and nothing more is removed; the next one tries again: %s", error)

    def _tell(self, event: str, facts: Mapping[str, Any]) -> None:
        if self._on_event is not None:
            self._on_event(event, facts)

    async def restore(self, step: int) -> RestoreReport:
        """Go on from complete step `step`: state, then payload files, then a sweep of what nobody needs.

        Before `run`, in a fresh process, after `prepare_resume(run, step)`.
        """
        parts, pins = await asyncio.to_thread(self._manager.load, step, store=self._store)
        state = sink_state(parts, step=step)
        saved = saved_progress(parts, step=step)
        for name, value in msgspec.structs.asdict(saved).items():
            setattr(self._progress, name, value)
        self._policy.version = self._trained = self._last_saved = step
        self._source.load_state_dict(decode_state(parts["source"]))
        if self._algorithm is not None:
            if "algorithm" not in parts:
                raise ValueError(
                    f"checkpoint {step} has no 'algorithm' state: its run had no algorithm; resume without one"
                )
            self._algorithm.load_state_dict(decode_state(parts["algorithm"]))
        elif "algorithm" in parts:
            log.warning(
                "checkpoint %d has state of an algorithm, and this run has none: it is left out", step
            )
        report, requests = await self.sink.load_state_dict(state, pins=pins)
        self._source.resumed.extend(requests)
        self._tell(
            "restored",
            {
                "step": step,
                "report": msgspec.structs.asdict(report),
                "dropped": self.sink.dropped_at_restore,
                "queued": self.sink.queued_trace_ids(),
                "requests": {r.group_id: r.rollouts for r in requests},
            },
        )
        await self.sweep()
        return report

    async def sweep(self) -> SweepReport | None:
        """Reclaim every file nobody needs. Only while nobody writes: after a restore, or when workers have left.

        None, with a line in the log, if something cannot be read (a checkpoint's manifest, say): what is needed
        is not known then, and everything stays. LineageLeftError if the run has been resumed since.
        """
        if self._sweeping is not None:
            await self._sweeping
        await self.sink.drain()
        try:
            await asyncio.to_thread(self._manager.remove_leftovers)
            report = await asyncio.to_thread(self._store.sweep, roots=self._roots, before=None)
        except (OSError, ValueError) as error:
            log.error("the sweep is left out, files that nobody needs may stay: %s", error)
            return None
        await asyncio.to_thread(self._retire_empty, self.oldest_live_version())
        self._tell("swept", {"reclaimed": len(report.reclaimed), "kept": report.kept})
        return report

    def _retire_empty(self, before: int) -> None:
        """Remove the directories of versions below `before` that have nothing in them any more."""
        try:
            store = _native.Root(self._store.root)
            for version in self._store.versions():
                if version < before and not store.list(f"v{version}"):
                    self._store.retire(version)
            self._store.empty_trash()
        except OSError as error:
            log.warning("an empty version directory stays: %s", error)

    async def _sweep_orphans(self) -> None:
        """While others write: what no root names in versions that nobody writes any more, unless it is young.

        A rollout that is never reported (its worker died, it was cancelled) leaves such files. What fails is
        left to the next sweep.
        """
        before = self.oldest_live_version()
        try:
            report = await asyncio.to_thread(self._store.sweep, roots=self._roots, before=before)
        except Exception as error:
            log.warning(
                "the sweep below version %d failed; the next checkpoint tries again: %s", before, error
            )
            return
        for file, message in report.errors:
            log.warning("sweep: %s stays: %s", file, message)
        self._tell("orphans_swept", {"reclaimed": len(report.reclaimed), "before": before})

    def _roots(self) -> set[str]:
        """What a sweep must spare: files somebody holds, and files a checkpoint names but has not pinned.

        In this order: a snapshot lets go of its files only when its checkpoint is there to be read. An old life
        does not know what the new one needs: LineageLeftError.
        """
        self._manager.lineage.check_current("sweep")
        return self.sink.ledger.files() | self._manager.unpinned_files()

    def oldest_live_version(self) -> int:
        """No file below `v<this>` is needed, or will be: queue, groups, untrained batches, all in flight."""
        known = (
            self._policy.version,
            self.sink.oldest_live_payload_version(),
            self.dispatcher.oldest_version(),
            self._taking,
        )
        return min(version for version in known if version is not None)

    # -- the loop

    def stop(self) -> None:
        """Finish in order: ship nothing more, save this point, tell the readers. For SIGTERM; returns at once."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Run to `max_steps` or until `stop`; returns when the last shipped batch is trained and saved.

        Workers may still be writing then: stop them, and call `finish`. LineageLeftError, within `poll_s`, if the
        run has been resumed by somebody else: this process must end.
        """
        await asyncio.to_thread(self._manager.link_probe, self._store)
        tasks = [asyncio.ensure_future(work()) for work in (self._watch, self._consume, self._ship)]
        consume = tasks[1]
        try:
            while not tasks[2].done():
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            consume.cancel()
            await self._last_save()
            clock = asyncio.get_running_loop().time
            end = clock() + STOP_GRACE_S if self._stopping else None
            while self._trained < self._progress.step - 1:
                left = None if end is None else end - clock()
                if left is not None and left <= 0:
                    log.warning("batch %d was not acknowledged; leaving without", self._progress.step - 1)
                    break
                self._wake.clear()
                waiting = asyncio.ensure_future(self._wake.wait())
                await asyncio.wait([tasks[0], waiting], timeout=left, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if tasks[0].done():
                    tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def finish(self) -> SweepReport | None:
        """After the workers have left: give up what is not trained (a checkpoint holds it) and sweep.

        As `sweep`: where a manifest cannot be read no file is removed, and it returns None.
        """
        await asyncio.to_thread(self._manager.lineage.check_current, "finish")
        await self.dispatcher.close()
        try:
            spare = await asyncio.to_thread(self._manager.unpinned_files)
        except (OSError, ValueError):
            spare = self.sink.ledger.files()  # all; the sweep will meet the same, and say so
        await self.sink.discard_all(spare=spare)
        # Waits for a retention that is under way too: it must not remove what the sweep reads.
        await self._retain()
        return await self.sweep()

    async def _last_save(self) -> None:
        """Save the last step unless it is, and tell the readers that it is the last.

        RuntimeError if that is not possible.
        """
        step = self._progress.step - 1
        await asyncio.gather(*self._saves)
        if step > self._last_saved and self._failure is None:
            self._cut()
            await asyncio.gather(*self._saves)
        if self._failure is not None:
            raise self._failure
        if step > self._last_saved:
            # What waits in the queue must not be given up: no checkpoint holds it.
            raise RuntimeError(
                f"step {step} could not be saved (the log says why); the run ends without giving up its work: "
                f"resume it from step {self._last_saved or None}"
            )
        await asyncio.to_thread(self._exchange.say_stop, step)

    async def _consume(self) -> None:
        while True:
            result = await self.dispatcher.next_result()
            if isinstance(result, Episode):
                await self._take(result)
                await self._try_links(result)
            else:
                await self.sink.cancel(result)
            while self.sink.requests:
                self._source.resumed.append(self.sink.requests.popleft())
            self._wake.set()

    async def _take(self, episode: Episode) -> None:
        """Add an episode. One that must be refused (a worker of a dead lineage) counts as an errored member."""
        if episode.policy is not None and episode.policy.end > self._policy.version:
            # A worker may see new weights before this process does.
            self._taking = episode.dispatch_version
            try:
                self._see(await asyncio.to_thread(self._exchange.newest_weights))
            finally:
                self._taking = None
        try:
            await self.sink.add(episode)
        except EpisodeRefusedError as error:
            log.error("%s", error)
            refused = msgspec.structs.replace(
                episode, lineage=self._exchange.lineage.id, policy=None, traces=[], ok=False, error=str(error)
            )
            with contextlib.suppress(EpisodeRefusedError):  # one too many: its group is full
                await self.sink.add(refused)

    async def _try_links(self, episode: Episode) -> None:
        """Try with the first payload of a worker, who may be another user, whether it can be linked."""
        if self._links_tried:
            return
        payload = (s.file for t in episode.traces for sample in t.samples for s in sample.payload)
        file = next((file for file in payload if file in self.sink.ledger), None)
        if file is not None:
            with contextlib.suppress(FileNotFoundError):  # reclaimed meanwhile: the next one will do
                await asyncio.to_thread(self._manager.link_probe, self._store, file)
                self._links_tried = True

    async def _ship(self) -> None:
        while self._progress.step <= self._max_steps and not self._stopping:
            if self._failure is not None:
                raise self._failure
            if not self._in_lead() or not self.sink.ready():
                self._pump()  # only now: what has shipped may have been all that new groups waited for
                self._wake.clear()
                await self._wake.wait()
                continue
            batch = self.sink.take_packed()
            assert batch is not None, "ready() said so, and nothing was awaited since"
            last = batch.step == self._max_steps
            batch = msgspec.structs.replace(
                batch, checkpoint=last or batch.step % self._checkpoint_every == 0
            )
            if batch.checkpoint:
                self._cut()
            self._tell("shipped", {"step": batch.step, "traces": batch.trace_ids})
            await self._publish(batch)

    async def _publish(self, batch: PackedBatch) -> None:
        """Publish a batch; while the disk is full, again and again, since what was taken must not be lost."""
        told = False
        while True:
            try:
                return await asyncio.to_thread(self._exchange.publish_batch, batch)
            except OSError as error:
                if error.errno not in _NO_SPACE or self._stopping or self._failure is not None:
                    raise
                if not told:
                    log.error("batch %d is published as soon as there is room for it: %s", batch.step, error)
                told = True
            await asyncio.sleep(self._poll_s)

    async def _watch(self) -> None:
        while True:
            newest, trained = await asyncio.to_thread(self._look)
            if self._see(newest):
                assert newest is not None
                await asyncio.to_thread(self._exchange.remove_weights, before=newest - 1)
            # Nobody can have trained what was not shipped.
            trained = None if trained is None else min(trained, self._progress.step - 1)
            if trained is not None and trained > self._trained:
                self._trained = trained
                self.sink.trained(trained)
                self._tell("trained", {"step": trained})
                self._wake.set()
                await self._retain()
                await asyncio.to_thread(self._exchange.forget, before=trained)
            await asyncio.sleep(self._poll_s)

    def _see(self, newest: int | None) -> bool:
        """Take up a version that is published; whether it is new."""
        if newest is None or newest == self._published:
            return False
        self.dispatcher.on_version_pending(newest)
        self._published = self._policy.version = newest
        self._wake.set()
        return True

    def _pump(self) -> None:
        """Dispatch, once this lineage has weights to sample with."""
        if self._published is not None:
            self.dispatcher.pump()

    def _look(self) -> tuple[int | None, int | None]:
        self._manager.lineage.check_current("orchestrate")
        return self._exchange.newest_weights(), self._exchange.trained(self._readers)

    def _in_lead(self) -> bool:
        return self._policy.version >= self._progress.step - 1 - self._max_lead

    def _may_open(self) -> bool:
        if self._stopping or self._progress.step > self._max_steps:
            return False
        if not self._in_lead() and self.sink.queued_batches > self._max_lead:
            return False
        limit = self._max_payload_bytes
        return limit is None or self.sink.ledger.bytes <= limit or not self.sink.queued_batches
