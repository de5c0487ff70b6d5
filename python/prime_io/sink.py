"""`TrainSink`: from finished episodes to batches, and the owner of every payload file on the way.

One event loop's thread uses it. I/O runs in worker threads (native calls that release the GIL); state changes
only between awaits, so that `state_dict` is always one instant.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import Any, TypeVar

import msgspec
import numpy as np

from . import columns, restore
from .releases import Releases
from .resume import Ledger, missing_rollouts
from .scoring import ScoreEpisode, ScoreGroup, grpo
from .segment import FieldSpec, PayloadSegment, clip
from .state import check_plain
from .store import PayloadStore
from .trace_queue import Queued, TraceQueue
from .types import (
    Episode,
    GroupCancellation,
    OpenGroup,
    PackedBatch,
    Policy,
    Progress,
    QueuedTrace,
    Sample,
    ScoredGroup,
    StoredEpisode,
    StoredTrace,
    TaskRequest,
    Trace,
    TrainBatch,
    is_stale,
)

log = logging.getLogger("prime_io.sink")

T = TypeVar("T")

_PREPARED_TOGETHER = 16
"""Traces that are made ready for the queue in one go: a millisecond or two of the event loop."""
_SCORED_ON_THE_LOOP = 64
"""Traces of a group up to which taking float advantages up costs the loop less than a thread would."""


class EpisodeRefusedError(ValueError):
    """An episode that this sink must not take: of another lineage, of an unpublished policy, or one too many."""


class TrainSink:
    """Collects episodes into groups, scores full groups, queues their traces and cuts batches, oldest first.

    `group_size`: members of a group, for all environments or by name. Exactly one of `batch_size` (traces) and
    `token_batch_size` (tokens). `seq_len`: longer samples are cut to it. `fields`: what is known of the payload
    fields (default: token-aligned and required). `score_episode(episode)` may set rewards before an episode is
    stored; `score_group(traces)` returns advantages; both may be coroutines. `admit(episode)` refuses an episode
    by returning False. Callbacks tie it to a loop: `on_result(group)` once per scored group,
    `on_consumed(group id)` once the sink holds nothing open of a group, `on_drop(reason, trace ids)` for traces
    that leave without being trained; rollouts that have to be asked for again are appended to `requests`.
    `counters` counts every outcome.
    """

    def __init__(
        self,
        *,
        store: PayloadStore,
        progress: Progress,
        policy: Policy,
        group_size: int | Mapping[str, int],
        max_off_policy_steps: int,
        batch_size: int | None = None,
        token_batch_size: int | None = None,
        seq_len: int | None = None,
        fields: Mapping[str, FieldSpec] | None = None,
        score_episode: ScoreEpisode | None = None,
        score_group: ScoreGroup = grpo,
        admit: Callable[[Episode], bool] | None = None,
        filter_zero_advantages: bool = True,
        lineage: str = "",
        on_result: Callable[[ScoredGroup], object] | None = None,
        on_consumed: Callable[[str], object] | None = None,
        on_drop: Callable[[str, Sequence[str]], object] | None = None,
    ) -> None:
        self._queue = TraceQueue(batch_size=batch_size, token_batch_size=token_batch_size)
        sizes = {"": group_size} if isinstance(group_size, int) else group_size
        if not sizes or min(sizes.values()) < 1:
            raise ValueError(f"group_size={group_size!r}: every environment needs one of at least 1")
        if not store.owner:
            raise ValueError(f"TrainSink needs the owner's store; open {store.root} with owner=True")
        self.store = store
        self.progress = progress
        self.policy = policy
        self.ledger = Ledger()
        self.counters: Counter[str] = Counter()
        self.requests: deque[TaskRequest] = deque()
        self.dropped_at_restore: dict[str, list[str]] = {}
        self.fields = dict(fields or {})
        self._group_size = group_size
        self._max_off_policy_steps = max_off_policy_steps
        self._seq_len = seq_len
        self._score_episode = score_episode
        self._score_group = score_group
        self._admit = admit
        self._filter_zero_advantages = filter_zero_advantages
        self._lineage = lineage
        self.on_result = on_result
        self.on_consumed = on_consumed
        self.on_drop = on_drop
        self._groups: dict[str, _Group] = {}
        self._arrival = 0
        self._fresh_for: int | None = None
        self._releases = Releases(store=store, ledger=self.ledger, counters=self.counters)

    # -- in

    async def add(self, episode: Episode) -> None:
        """Take a finished episode: spill its arrays, and score its group if it was the last member.

        EpisodeRefusedError, with nothing taken and its files reclaimed, if it is of another lineage, of a
        policy newer than any published, or more than its group waits for.
        """
        self._releases.raise_failure()
        if episode.group_id not in self._groups:
            episode = _with_plain_task(episode)
        try:
            columns.check(episode)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            # It will not get better by asking again: it counts as delivered. A sweep takes its files.
            log.error("episode %s is not what a worker may return: %s", episode.id, error)
            self.counters["malformed"] += 1
            episode = _without_traces(episode, f"malformed: {error}")
        payload = [segment for t in episode.traces for sample in t.samples for segment in sample.payload]
        refusal = self._refusal(episode)
        if refusal:
            self.counters["refused"] += 1
            self.discard(payload)
            raise EpisodeRefusedError(f"episode {episode.id}: {refusal}")
        if episode.kind == "eval":
            self.counters["eval"] += 1
            self.discard(payload)
            return
        group = self._group(episode.group_id, episode.env_name, episode.task, episode.dispatch_version)
        held = self.ledger.hold(payload)
        taking = {trace.id for trace in episode.traces}
        group.pending += 1
        group.taking |= taking
        try:
            await self._store_episode(episode, group)
        finally:
            group.pending -= 1
            group.taking -= taking
            # What is kept of the episode was held by `append`; what was cut away or failed is free now.
            self.ledger.release(held)
        self._releases.reclaim()
        if group.complete:
            await self._score(episode.group_id, group)

    async def cancel(self, cancellation: GroupCancellation) -> None:
        """Rollouts of a group that will never come; the rest of the group is scored if it is complete by that.

        ValueError for an environment without a group size.
        """
        self._releases.raise_failure()
        group = self._group(cancellation.group_id, cancellation.env_name, None, None)
        self.counters[f"cancelled_{cancellation.reason}"] += cancellation.count
        group.open.cancelled += cancellation.count
        if group.complete:
            await self._score(cancellation.group_id, group)

    def _refusal(self, episode: Episode) -> str:
        if episode.lineage != self._lineage:
            return f"it is of lineage {episode.lineage!r}, this run is {self._lineage!r}"
        if episode.policy is not None and episode.policy.end > self.policy.version:
            return f"its policy version {episode.policy.end} is above the current {self.policy.version}"
        group = self._groups.get(episode.group_id)
        if episode.kind == "train" and group is not None and group.missing < 1:
            return f"group {episode.group_id} already has its {group.open.target} members"
        if group is not None:
            known = {t.id for member in group.open.members for t in member.traces} | group.taking
            again = known & {t.id for t in episode.traces}
            if again or episode.id in {member.id for member in group.open.members}:
                return f"group {episode.group_id} already has it ({sorted(again)[:3]})"
        if group is None and self.group_size(episode.env_name) is None:
            return self._no_group_size(episode.env_name)
        return ""

    def group_size(self, env_name: str) -> int | None:
        """The members of a group of this environment; None if it was given no size."""
        sizes = self._group_size
        return sizes if isinstance(sizes, int) else sizes.get(env_name)

    def _no_group_size(self, env_name: str) -> str:
        assert not isinstance(self._group_size, int)
        return f"environment {env_name!r} has no group_size (there are {sorted(self._group_size)})"

    def _group(self, group_id: str, env_name: str, task: Any, dispatch_version: int | None) -> _Group:
        group = self._groups.get(group_id)
        if group is None:
            target = self.group_size(env_name)
            if target is None:
                raise ValueError(self._no_group_size(env_name))
            group = _Group(OpenGroup(env_name, task, self.progress.step, target, requested=target))
            self._groups[group_id] = group
        if group.open.dispatch_version is None:
            group.open.dispatch_version = dispatch_version
        return group

    async def _store_episode(self, episode: Episode, group: _Group) -> None:
        """Judge, score, cut and spill one episode and make it a member, or ask for it again."""
        if episode.ok and self._admit is not None and not self._admit(episode):
            self.counters["rejected"] += 1
            episode = _without_traces(episode, "rejected")
        if episode.ok and self._score_episode is not None:
            await _maybe_await(self._score_episode(episode))
        if not episode.ok:
            self.counters["errored"] += 1
            episode = _without_traces(episode, episode.error or "errored")
        else:
            self._cut_to_seq_len(episode)
        try:
            stored = await asyncio.to_thread(columns.spill, episode, store=self.store)
        except OSError as error:
            # The member is asked for again, under the same group.
            log.warning(
                "spilling episode %s failed and its rollout is asked for again: %s", episode.id, error
            )
            self.counters["spill_failed"] += 1
            if group.missing >= 0:  # it still counts as pending: unless the group was cancelled meanwhile
                self.requests.append(self._ask_again(episode.group_id, group, 1))
            return
        self._append(group, stored)

    def _append(self, group: _Group, stored: StoredEpisode) -> None:
        held = self.ledger.hold(stored.segments())
        group.open.members.append(stored)
        group.members.append((stored, msgspec.Raw(_encoder.encode(stored)), held))

    def _ask_again(self, group_id: str, group: _Group, rollouts: int) -> TaskRequest:
        g = group.open
        first = g.requested
        g.requested += rollouts
        return TaskRequest(g.env_name, g.task, g.step, rollouts, group_id, first)

    def _cut_to_seq_len(self, episode: Episode) -> None:
        """Cut samples to `seq_len`; a trace that has no trained token left is dropped."""
        kept = []
        for trace in episode.traces:
            samples = [self._cut(sample) for sample in trace.samples]
            trained = [sample for sample in samples if sample.mask.any()]
            if trained:
                trace.samples = trained
                kept.append(trace)
            else:
                self._dropped("truncated_away", [trace.id])
        episode.traces = kept

    def _cut(self, sample: Sample) -> Sample:
        n, limit = len(sample.token_ids), self._seq_len
        if limit is None or n <= limit:
            return sample
        self.counters["truncated"] += 1
        advantages = sample.advantages
        return Sample(
            token_ids=sample.token_ids[:limit],
            mask=sample.mask[:limit],
            logprobs=sample.logprobs[:limit],
            payload=clip(sample.payload, 0, limit, fields=self.fields),
            columns={name: column[:limit] for name, column in sample.columns.items()},
            scalars=sample.scalars,
            advantages=advantages[:limit] if isinstance(advantages, np.ndarray) else advantages,
        )

    # -- scoring

    async def _score(self, group_id: str, group: _Group) -> None:
        """Score a complete group. Computes and prepares first; then, without an await: result, queue, forget."""
        if group.scoring:
            return
        group.scoring = True
        g = group.open
        members = g.members[: g.target]
        fresh = [m for m in members if not self._stale(m)]
        traces = [
            (m, t) for m in fresh for t in m.traces if t.ok and t.reward is not None and isfinite(t.reward)
        ]
        stale = {t.id for m in members for t in m.traces} - {t.id for m in fresh for t in m.traces}
        unscored = {t.id for m in fresh for t in m.traces} - {t.id for _, t in traces}
        scored: list[StoredTrace] = []
        ready: list[tuple[Queued, str]] = []
        version = max((m.dispatch_version for m in fresh), default=0)
        try:
            if traces:
                scored = await self._advantages(group_id, [t for _, t in traces], version)
            async for (m, _), trace in _in_turns(zip(traces, scored, strict=True), _PREPARED_TOGETHER):
                ready.append(self._ready(m, trace))
        except OSError as error:
            group.scoring = False
            await self._lose(group_id, group, [m for m in fresh if m.traces], error)
            return
        except BaseException:  # cancelled: the run is over
            for queued, _ in ready:
                self.ledger.release(queued.held)
            raise
        finally:
            group.scoring = False
        # From here on without an await: a cut sees the group open with all its members, or scored.
        self.counters["owed"] += g.target
        self._dropped("stale_members", sorted(stale))
        self._dropped("unscored", sorted(unscored))
        if scored:
            self.counters["groups_scored"] += 1
            if self.on_result is not None:
                rewards = [t.reward for t in scored if t.reward is not None]
                self.on_result(ScoredGroup(group_id, g.env_name, g.task, g.step, rewards))
        else:
            self.counters["groups_empty"] += 1
        for queued, reason in ready:
            if reason:
                self._dropped(reason, [queued.trace_id])
                self.ledger.release(queued.held)
            else:
                self._push(queued)
        self._forget(group_id, group)
        self._releases.reclaim()

    async def _lose(
        self, group_id: str, group: _Group, lost: Sequence[StoredEpisode], error: OSError
    ) -> None:
        """Scoring could not read or spill: its members are released and asked for again."""
        log.warning(
            "scoring group %s failed and %d rollouts are asked for again: %s", group_id, len(lost), error
        )
        self.counters["spill_failed"] += len(lost)
        names = {member.id for member in lost}
        for member, _, held in group.members:
            if member.id in names:
                self.ledger.release(held)
        group.members = [entry for entry in group.members if entry[0].id not in names]
        group.open.members = [member for member, _, _ in group.members]
        self._releases.reclaim()
        missing = missing_rollouts(group.open)
        if missing:
            self.requests.append(self._ask_again(group_id, group, missing))
        elif lost:  # all of them were cancelled meanwhile
            await self._score(group_id, group)

    async def _advantages(
        self, group_id: str, traces: Sequence[StoredTrace], version: int
    ) -> list[StoredTrace]:
        if getattr(self._score_group, "rewards_only", False):
            given = [Trace(t.id, t.reward, []) for t in traces]
        else:
            given = await asyncio.to_thread(columns.load_traces, traces, store=self.store)
        advantages = await _maybe_await(self._score_group(given))
        if len(advantages) != len(traces):
            raise ValueError(
                f"score_group gave {len(advantages)} advantages for the {len(traces)} traces of {group_id}"
            )
        if len(traces) <= _SCORED_ON_THE_LOOP and all(isinstance(a, Real) for a in advantages):
            return columns.with_advantages(traces, advantages, version=version, store=self.store)
        return await asyncio.to_thread(
            columns.with_advantages, traces, advantages, version=version, store=self.store
        )

    def _ready(self, member: StoredEpisode, trace: StoredTrace) -> tuple[Queued, str]:
        """A scored trace as it will be queued, or the reason why it will not be. It holds its files either way."""
        reason = ""
        if not all(s.advantage is None or isfinite(s.advantage) for s in trace.samples):
            reason = "unscored"
        elif self._filter_zero_advantages and all(s.advantage == 0.0 for s in trace.samples):
            reason = "zero_advantage"
        queued = QueuedTrace(
            trace_id=trace.id,
            episode_id=member.id,
            env_name=member.env_name,
            group_id=member.group_id,
            policy=member.policy,
            dispatch_version=member.dispatch_version,
            arrival=self._arrival,
            n_tokens=sum(s.n_tokens for s in trace.samples),
            reward=trace.reward,
            samples=trace.samples,
        )
        self._arrival += 1
        return self._held(queued), reason

    def _held(self, trace: QueuedTrace) -> Queued:
        return Queued(trace, self.ledger.hold(trace.segments()))

    def _push(self, queued: Queued) -> None:
        self._queue.push(queued)
        if self._stale(queued):
            self._fresh_for = None
        self._releases.sync(queued.held)

    def _forget(self, group_id: str, group: _Group) -> None:
        del self._groups[group_id]
        for _, _, held in group.members:
            self.ledger.release(held)
        if self.on_consumed is not None:
            self.on_consumed(group_id)

    def _stale(self, work: StoredEpisode | QueuedTrace | Queued) -> bool:
        return is_stale(work.policy, step=self.progress.step, max_off_policy_steps=self._max_off_policy_steps)

    # -- out

    @property
    def queued(self) -> int:
        """Traces waiting for a batch."""
        return len(self._queue)

    @property
    def queued_batches(self) -> int:
        """How many batches the queue can fill."""
        return self._queue.batches

    @property
    def open_groups(self) -> dict[str, OpenGroup]:
        """The groups that have members or restored work here."""
        return {group_id: group.open for group_id, group in self._groups.items()}

    def queued_trace_ids(self) -> list[str]:
        """The ids of the queue, in batch order."""
        return [queued.trace_id for queued in sorted(self._queue)]

    def queued_files(self) -> dict[str, tuple[str, ...]]:
        """The files of every queued trace."""
        return {queued.trace_id: queued.held for queued in self._queue}

    def ready(self) -> bool:
        """Whether the queue, without what is stale for the next batch, can fill a batch."""
        self._drop_stale()
        return self.queued_batches >= 1

    def take_batch(self) -> TrainBatch | None:
        """Cut the next batch, oldest version first, and advance `progress`; None if it cannot be filled."""
        packed = self.take_packed()
        return None if packed is None else msgspec.msgpack.decode(packed.encode(), type=TrainBatch)

    def take_packed(self) -> PackedBatch | None:
        """As `take_batch`, without decoding: a few microseconds a trace, for the event loop."""
        if not self.ready():
            return None
        step, taken = self.progress.step, self._queue.take()
        for queued in taken:
            self.ledger.ship(step, queued.held)
        files = sorted({file for queued in taken for file in queued.held})
        self.progress.step += 1
        self.progress.total_tokens += sum(queued.n_tokens for queued in taken)
        self.progress.total_samples += sum(queued.n_samples for queued in taken)
        self.progress.total_problems += len({queued.group_id for queued in taken})
        self.counters["shipped"] += len(taken)
        ids, blobs = [queued.trace_id for queued in taken], [queued.blob for queued in taken]
        return PackedBatch(step, self._lineage, ids, blobs, files)

    def _drop_stale(self) -> None:
        """Stale traces leave the queue; looked for once a step, since nothing else makes them stale."""
        if self._fresh_for == self.progress.step:
            return
        self._fresh_for = self.progress.step
        stale = self._queue.remove(self._stale)
        if not stale:
            return
        self.ledger.release_later(file for queued in stale for file in queued.held)
        self._dropped("stale_queued", [queued.trace_id for queued in stale])
        self._releases.reclaim()

    def trained(self, step: int) -> None:
        """Every reader acknowledged batch `step` (and all before it): their files are released."""
        self.ledger.trained(step)
        self._releases.reclaim()

    def oldest_live_payload_version(self) -> int | None:
        """The least `v<k>` that queue, groups, open snapshots or untrained batches still name."""
        return self.ledger.oldest_version()

    def _dropped(self, reason: str, trace_ids: Sequence[str]) -> None:
        self.counters[reason] += len(trace_ids)
        if trace_ids and self.on_drop is not None:
            self.on_drop(reason, trace_ids)

    # -- files

    def discard(self, segments: Iterable[PayloadSegment]) -> None:
        """Reclaim the files of work that nobody takes (a late result), unless somebody holds them."""
        self.ledger.discard(segments)
        self._releases.reclaim()

    def close_snapshot(self, snapshot: set[str]) -> None:
        """The save of a cut is over, well or not: reclaim what waited for it and nobody needs now."""
        self.ledger.close_snapshot(snapshot)
        self._releases.reclaim()

    async def drain(self) -> None:
        """Wait for background reclaims and syncs."""
        await self._releases.drain()

    async def discard_all(self, *, spare: Iterable[str] = ()) -> None:
        """Give up queue and groups (the run is over and their checkpoint committed): release every file.

        Files to `spare` stay where they are: a checkpoint names them and has no link of its own.
        """
        self._releases.spare(spare)
        self._dropped("drained_queued", self.queued_trace_ids())
        for queued in self._queue.remove(lambda queued: True):
            self.ledger.release(queued.held)
        for group_id, group in list(self._groups.items()):
            self._dropped("drained_members", [t.id for m, _, _ in group.members for t in m.traces])
            self._forget(group_id, group)
        self._releases.reclaim()
        await self.drain()

    # -- state

    def queued_blobs(self) -> list[msgspec.Raw]:
        """The queued traces, in no order, as each was encoded when it was scored."""
        return [queued.blob for queued in self._queue]

    def open_members(self) -> list[StoredEpisode]:
        """The finished members of all open groups."""
        return [member for group in self._groups.values() for member, _, _ in group.members]

    def work(self) -> Iterator[QueuedTrace | StoredEpisode]:
        """Everything a snapshot has to pin: queued traces and members of open groups."""
        for queued in self._queue:
            yield queued.trace()
        yield from self.open_members()

    def state_dict(self, open_groups: Mapping[str, OpenGroup]) -> dict[str, Any]:
        """The sink at this instant, as msgpack types; no await, no I/O.

        `open_groups`: the groups the dispatcher knows; those of which no result was consumed yet are open
        without members.
        """
        groups = {
            group_id: msgspec.structs.replace(group, members=[]) for group_id, group in open_groups.items()
        }
        members: dict[str, list[msgspec.Raw]] = {group_id: [] for group_id in groups}
        for group_id, group in self._groups.items():
            dispatched = open_groups.get(group_id, group.open)
            groups[group_id] = msgspec.structs.replace(
                group.open,
                members=[],
                task=dispatched.task,
                step=dispatched.step,
                requested=max(group.open.requested, dispatched.requested),
            )
            members[group_id] = [blob for _, blob, _ in group.members]
        return {
            "format": restore.FORMAT,
            "arrival": self._arrival,
            "counters": dict(self.counters),
            "queue": self.queued_blobs(),
            "groups": [[group_id, group, members[group_id]] for group_id, group in groups.items()],
        }

    async def load_state_dict(
        self, state: Any, *, pins: restore.LinkBack | None = None
    ) -> tuple[restore.RestoreReport, list[TaskRequest]]:
        """Restore, after `progress` was: filter, link pins back, probe, drop what is gone (rule 3).

        Groups that lack nothing are scored at once; the requests ask for the missing rollouts of the others.
        """
        assert not self._queue and not self._groups, "load_state_dict works on a fresh sink"
        restored = await asyncio.to_thread(
            restore.restore,
            state,
            store=self.store,
            step=self.progress.step,
            max_off_policy_steps=self._max_off_policy_steps,
            fields=self.fields,
            environments=None if isinstance(self._group_size, int) else frozenset(self._group_size),
            pins=pins,
        )
        self.counters.update(restored.counters)
        self.dropped_at_restore = restored.dropped
        self._arrival = restored.arrival
        for trace in restored.queue:
            self._push(self._held(trace))
        for group_id, open_group in restored.groups.items():
            members, open_group.members = open_group.members, []
            group = self._groups[group_id] = _Group(open_group)
            for member in members:
                self._append(group, member)
        requests = []
        for group_id, group in list(self._groups.items()):
            if group.complete:
                await self._score(group_id, group)
            else:
                requests.append(self._ask_again(group_id, group, missing_rollouts(group.open)))
        log.info("restored: %s", restored.report)
        return restored.report, requests


class _Group:
    """An open group in the sink: what is saved of it, with each member's blob and hold."""

    def __init__(self, open_group: OpenGroup) -> None:
        self.open = open_group
        self.members: list[tuple[StoredEpisode, msgspec.Raw, tuple[str, ...]]] = []
        self.pending = 0
        self.taking: set[str] = set()
        self.scoring = False

    @property
    def missing(self) -> int:
        """Rollouts neither delivered, cancelled nor being taken in right now."""
        return missing_rollouts(self.open) - self.pending

    @property
    def complete(self) -> bool:
        """Whether nothing more will come; what is being taken in right now still may."""
        return missing_rollouts(self.open) == 0 and not self.pending


_encoder = msgspec.msgpack.Encoder()


def _without_traces(episode: Episode, error: str) -> Episode:
    return msgspec.structs.replace(episode, traces=[], native=None, ok=False, error=error)


def _with_plain_task(episode: Episode) -> Episode:
    """The same without a task that no checkpoint could hold; a dispatcher knows its groups' tasks itself."""
    try:
        check_plain(episode.task, "task", operation=f"episode {episode.id}")
    except TypeError as error:
        log.error("%s; its group goes on without", error)
        return msgspec.structs.replace(episode, task=None)
    return episode


async def _in_turns(items: Iterable[T], size: int) -> AsyncIterator[T]:
    """The items; after every `size` of them others get their turn on the event loop."""
    for n, item in enumerate(items, 1):
        yield item
        if n % size == 0:
            await asyncio.sleep(0)


async def _maybe_await(value: T | Awaitable[T]) -> T:
    if inspect.isawaitable(value):
        return await value
    return value
