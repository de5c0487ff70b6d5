"""Restoring the sink's part of a checkpoint, in the order of rule 3 (docs/design.md, Restore).

Stale and too-new work goes first, judged at the step to come and with the new configuration; then the pins of
what is kept get their names in the store back; then everything is probed in one batch and what lost a required
field is dropped, whole trace or episode at a time. Nothing of this is ever met later by the trainer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from .resume import LOST, HasPayloads, missing_rollouts, pin_set, survivors
from .segment import FieldSpec, PayloadSegment
from .types import OpenGroup, Progress, QueuedTrace, StoredEpisode, StoredSample, StoredTrace, is_stale

FORMAT = 1

T = TypeVar("T")
W = TypeVar("W", QueuedTrace, StoredEpisode)


class LinkBack(Protocol):
    """A checkpoint's pins, as `CheckpointManager.load` returns them."""

    def link_back(self, files: Sequence[str]) -> Mapping[str, str | Exception]:
        """Give these files their names in the store again; per file what was done, or why not."""
        ...


class RestoreReport(msgspec.Struct):
    """What became of a checkpoint's work: one integer per outcome."""

    queued_in_checkpoint: int = 0
    queued_kept: int = 0
    queued_stale: int = 0
    queued_too_new: int = 0
    queued_missing: int = 0
    queued_short: int = 0
    queued_corrupt: int = 0
    members_in_checkpoint: int = 0
    members_kept: int = 0
    members_stale: int = 0
    members_too_new: int = 0
    members_missing: int = 0
    members_short: int = 0
    members_corrupt: int = 0
    optional_fields_lost: int = 0
    groups_in_checkpoint: int = 0
    groups_complete: int = 0
    rollouts_requested: int = 0
    files_present: int = 0
    files_linked: int = 0
    files_copied: int = 0
    files_replaced: int = 0
    files_lost: int = 0

    def __str__(self) -> str:
        """Only the outcomes that happened, in one line."""
        return ", ".join(
            f"{n} {name.replace('_', ' ')}" for name, n in msgspec.structs.asdict(self).items() if n
        )


class Restored(msgspec.Struct):
    """The work that is kept, what a sink goes on with, and the report."""

    queue: list[QueuedTrace]
    groups: dict[str, OpenGroup]
    arrival: int
    counters: dict[str, int]
    report: RestoreReport
    dropped: dict[str, list[str]]
    """Ids (of traces and episodes) by outcome; `..._gone` are those whose payload is."""
    by_env: dict[str, Counter[str]]
    """The counts of the report by environment, but for those of files."""


def restore(
    state: Any,
    *,
    store: HasPayloads,
    step: int,
    max_off_policy_steps: int | None,
    fields: Mapping[str, FieldSpec],
    environments: frozenset[str] | None,
    pins: LinkBack | None,
) -> Restored:
    """Blocking; run it off the event loop. `step`: the next batch (N + 1 for checkpoint N). With None
    for `max_off_policy_steps` nothing is stale.

    ValueError for a format this version does not read, for a state with a part missing, and for work of an
    environment that is no longer configured.
    """
    saved = _decode(state)
    if environments is not None:
        unknown = {t.env_name for t in saved.queue} | {group.env_name for _, group, _ in saved.groups}
        unknown -= environments
        if unknown:
            raise ValueError(
                f"the checkpoint holds work of environments {sorted(unknown)} that are not configured "
                f"(configured: {sorted(environments)}): add them, or start a new run"
            )
    judge = _Judge(store, step, max_off_policy_steps, fields)
    for trace in saved.queue:
        judge.count("queued_in_checkpoint", trace.env_name)
    for _, group, members in saved.groups:
        judge.count("groups_in_checkpoint", group.env_name)
        judge.count("members_in_checkpoint", group.env_name, len(members))
    queue = judge.in_time("queued", saved.queue)
    grouped = {group_id: judge.in_time("members", members) for group_id, _, members in saved.groups}
    members = [member for members in grouped.values() for member in members]
    if pins is not None:
        judge.link_back(pins, [*queue, *members])
    queue = judge.present("queued", queue)
    kept = judge.present("members", members)
    remaining: dict[str, list[StoredEpisode]] = {}
    for member in kept:
        remaining.setdefault(member.group_id, []).append(member)
    groups = {
        # What is dispatched from now on decides the group's version.
        group_id: msgspec.structs.replace(group, members=remaining.get(group_id, []), dispatch_version=None)
        for group_id, group, _ in saved.groups
    }
    for trace in queue:
        judge.count("queued_kept", trace.env_name)
    for group in groups.values():
        missing = missing_rollouts(group)
        judge.count("members_kept", group.env_name, len(group.members))
        judge.count("groups_complete", group.env_name, missing == 0)
        judge.count("rollouts_requested", group.env_name, missing)
    arrival = max([saved.arrival, *(trace.arrival + 1 for trace in queue)])
    return Restored(queue, groups, arrival, saved.counters, judge.report, judge.dropped, judge.by_env)


def sink_state(parts: Mapping[str, bytes], *, step: int) -> dict[str, Any]:
    """The sink's state as `TrainSink.state_dict` gave it, from the parts of checkpoint `step`.

    ValueError if a part is missing.
    """
    for part in ("progress", "source", "sink", "queue"):
        if part not in parts:
            raise ValueError(f"checkpoint {step} has no {part!r} state: it was written by something else")
    state = _part(parts, "sink", step, dict[str, Any])
    state["queue"] = _part(parts, "queue", step, list[msgspec.Raw])
    return state


def saved_progress(parts: Mapping[str, bytes], *, step: int) -> Progress:
    """`Progress` from the parts of checkpoint `step`. ValueError if it is not one."""
    return _part(parts, "progress", step, Progress)


def _part(parts: Mapping[str, bytes], name: str, step: int, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(parts[name], type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(
            f"checkpoint {step}: its {name!r} state was written by something else, or edited ({error}); resume "
            "from another step"
        ) from error


class _Saved(msgspec.Struct):
    format: int
    arrival: int
    counters: dict[str, int]
    queue: list[QueuedTrace]
    groups: list[tuple[str, OpenGroup, list[StoredEpisode]]]


def _decode(state: Any) -> _Saved:
    version = state.get("format") if isinstance(state, dict) else None
    if version != FORMAT:
        raise ValueError(
            f"the checkpoint's sink state has format {version!r}; this version of prime-io reads {FORMAT}: "
            "resume with the version that wrote it"
        )
    try:
        # Blobs inside are msgpack already; one round trip makes them values of their types.
        return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=_Saved)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(
            f"the checkpoint's sink state is not complete: {error}; resume from another step"
        ) from error


class _Judge:
    def __init__(
        self,
        store: HasPayloads,
        step: int,
        max_off_policy_steps: int | None,
        fields: Mapping[str, FieldSpec],
    ) -> None:
        self._store, self._step, self._off_policy, self._fields = store, step, max_off_policy_steps, fields
        self.report = RestoreReport()
        self.dropped: dict[str, list[str]] = {}
        self.by_env: dict[str, Counter[str]] = {}

    def count(self, kind: str, env_name: str | None, n: int = 1) -> None:
        setattr(self.report, kind, getattr(self.report, kind) + n)
        if env_name is not None:
            self.by_env.setdefault(env_name, Counter())[kind] += n

    def _drop(self, kind: str, work: QueuedTrace | StoredEpisode) -> None:
        self.dropped.setdefault(kind, []).append(_name(work))
        self.count(kind, work.env_name)

    def in_time(self, kind: str, work: Sequence[W]) -> list[W]:
        kept = []
        for item in work:
            if item.policy is not None and item.policy.end >= self._step:
                self._drop(f"{kind}_too_new", item)
            elif self._off_policy is not None and is_stale(
                item.policy, step=self._step, max_off_policy_steps=self._off_policy
            ):
                self._drop(f"{kind}_stale", item)
            else:
                kept.append(item)
        return kept

    def link_back(self, pins: LinkBack, work: Sequence[QueuedTrace | StoredEpisode]) -> None:
        outcomes: Counter[str] = Counter()
        for result in pins.link_back(sorted(pin_set(work))).values():
            outcomes["lost" if isinstance(result, Exception) else result] += 1
        for outcome, n in outcomes.items():
            self.count(f"files_{outcome}", None, n)

    def present(self, kind: str, work: Sequence[W]) -> list[W]:
        def lost(item: W, why: str) -> None:
            if why not in LOST:
                self.count("optional_fields_lost", item.env_name)
                return
            self.dropped.setdefault(f"{kind}_gone", []).append(_name(item))
            self.count(f"{kind}_{why}", item.env_name)

        kept, _ = survivors(work, store=self._store, fields=self._fields, without=_without, on_loss=lost)
        return kept


def _name(work: QueuedTrace | StoredEpisode) -> str:
    return work.trace_id if isinstance(work, QueuedTrace) else work.id


def _without(item: W, lost: frozenset[PayloadSegment]) -> W:
    """The same work without the segments of optional fields that are gone."""

    def sample(s: StoredSample) -> StoredSample:
        return msgspec.structs.replace(s, payload=[p for p in s.payload if p not in lost])

    if isinstance(item, QueuedTrace):
        return msgspec.structs.replace(item, samples=[sample(s) for s in item.samples])
    traces: list[StoredTrace] = [
        msgspec.structs.replace(t, samples=[sample(s) for s in t.samples]) for t in item.traces
    ]
    return msgspec.structs.replace(item, traces=traces)
