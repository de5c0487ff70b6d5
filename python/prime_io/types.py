"""What moves through the orchestrator: samples, episodes, queued traces, open groups, batches.

Two forms of the same thing. `Sample`, `Trace` and `Episode` hold arrays: what a worker hands over and what a
scorer sees. `StoredSample`, `StoredTrace`, `StoredEpisode` and `QueuedTrace` hold segments in their place: what
waits in memory, goes into a checkpoint and into a batch. They are immutable, and no part of a cycle: the garbage
collector, which stops the event loop while it looks, need not know them. `columns.py` turns one into the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from .segment import PayloadSegment
from .state import check_plain

Array: TypeAlias = np.ndarray[Any, Any]
Reason: TypeAlias = Literal["stale", "overload"]


class Progress(msgspec.Struct):
    """Where the run is. `step` is the next batch to ship; checkpoint N holds `step == N + 1`."""

    step: int = 1
    total_tokens: int = 0
    total_samples: int = 0
    total_problems: int = 0


class Policy(msgspec.Struct):
    """The newest published policy version, shared by dispatcher, sink and orchestrator."""

    version: int = 0


class PolicySpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The policy versions that produced an episode: the first and the last."""

    start: int
    end: int


class Sample(msgspec.Struct):
    """One training sequence of n tokens.

    `token_ids` i32[n], `mask` bool[n] (tokens that are trained), `logprobs` f32[n], `columns`: further arrays of
    n rows (temperatures, ref_logprobs, ...), `payload`: handles of its heavy fields, `advantages` f32[n], one
    float for all tokens, or None before scoring.
    """

    token_ids: Array
    mask: Array
    logprobs: Array
    payload: list[PayloadSegment] = []
    columns: dict[str, Array] = {}
    scalars: dict[str, float] = {}
    advantages: Array | float | None = None


class Trace(msgspec.Struct):
    """One rollout's outcome: a reward and the samples to train on (branches of one conversation share files)."""

    id: str
    reward: float | None
    samples: list[Sample]
    ok: bool = True
    error: str | None = None


class Episode(msgspec.Struct):
    """What `run_episode` returns: the traces of one rollout of a task.

    `policy` is None for a frozen policy, which is never stale. `dispatch_version` is the version current when
    the rollout was dispatched: its files are in `v<dispatch_version>`. `lineage` is that of the run the worker
    belongs to. `native` is the framework's own record, kept as it is.
    """

    id: str
    env_name: str
    group_id: str
    task: Any
    policy: PolicySpan | None
    dispatch_version: int
    traces: list[Trace]
    ok: bool = True
    kind: Literal["train", "eval"] = "train"
    native: bytes | None = None
    lineage: str = ""
    error: str | None = None


class StoredSample(msgspec.Struct, frozen=True, gc=False):
    """A sample whose per-token arrays are in a spill file: `columns` has one segment per array."""

    n_tokens: int
    columns: dict[str, PayloadSegment]
    payload: list[PayloadSegment] = []
    scalars: dict[str, float] = {}
    advantage: float | None = None

    def spills(self) -> Iterator[PayloadSegment]:
        """Its segments in spill files."""
        yield from self.columns.values()

    def segments(self) -> Iterator[PayloadSegment]:
        """All its segments: payload first, then spilled columns."""
        yield from self.payload
        yield from self.columns.values()


class StoredTrace(msgspec.Struct, frozen=True, gc=False):
    """A trace by handle."""

    id: str
    reward: float | None
    samples: list[StoredSample]
    ok: bool = True
    error: str | None = None


class StoredEpisode(msgspec.Struct, frozen=True, gc=False):
    """An episode by handle, a member of an open group. One without traces (errored, rejected) owns no file."""

    id: str
    env_name: str
    group_id: str
    policy: PolicySpan | None
    dispatch_version: int
    traces: list[StoredTrace]
    ok: bool = True
    native: PayloadSegment | None = None
    error: str | None = None

    def samples(self) -> Iterator[StoredSample]:
        """The samples of all its traces."""
        for trace in self.traces:
            yield from trace.samples

    def spills(self) -> Iterator[PayloadSegment]:
        """Its segments in spill files."""
        for sample in self.samples():
            yield from sample.spills()
        if self.native is not None:
            yield self.native

    def segments(self) -> Iterator[PayloadSegment]:
        """All its segments, payload and spilled."""
        for sample in self.samples():
            yield from sample.payload
        yield from self.spills()


class QueuedTrace(msgspec.Struct, frozen=True, gc=False):
    """A scored trace waiting for a batch. `arrival` orders traces of equal version."""

    trace_id: str
    episode_id: str
    env_name: str
    group_id: str
    policy: PolicySpan | None
    dispatch_version: int
    arrival: int
    n_tokens: int
    reward: float | None
    samples: list[StoredSample]

    def spills(self) -> Iterator[PayloadSegment]:
        """Its segments in spill files."""
        for sample in self.samples:
            yield from sample.spills()

    def segments(self) -> Iterator[PayloadSegment]:
        """All its segments, payload and spilled."""
        for sample in self.samples:
            yield from sample.segments()

    @property
    def version(self) -> int:
        """What orders a batch: the first policy version, or the dispatch version of a frozen policy."""
        return self.dispatch_version if self.policy is None else self.policy.start


class OpenGroup(msgspec.Struct):
    """A group known to the dispatcher or the sink and not yet scored.

    `members` are the finished episodes (errored ones count as delivered), `cancelled` the rollouts given up
    for good; the rest of `target` is missing. `requested` counts the rollouts asked for, those asked for again
    included: it numbers the next ones.
    """

    env_name: str
    task: Any
    step: int
    target: int
    members: list[StoredEpisode] = []
    cancelled: int = 0
    requested: int = 0
    dispatch_version: int | None = None


class TaskRequest(msgspec.Struct, frozen=True):
    """`rollouts` rollouts of a task, for a new group or (after a resume) the rest of an open one.

    Their member numbers start at `first_member`. The task goes into checkpoints: TypeError, naming what, unless it
    is made of None, bool, int (64 bits), float, str, bytes, list and dict.
    """

    env_name: str
    task: Any
    step: int
    rollouts: int
    group_id: str
    first_member: int = 0

    def __post_init__(self) -> None:
        if self.rollouts < 1:
            raise ValueError(f"TaskRequest {self.group_id}: rollouts must be at least 1, not {self.rollouts}")
        check_plain(self.task, "task", operation=f"TaskRequest {self.group_id}")


class GroupCancellation(msgspec.Struct, frozen=True):
    """`count` dispatched rollouts of a group will never come."""

    env_name: str
    group_id: str
    count: int
    reason: Reason


class TrainBatch(msgspec.Struct, frozen=True):
    """Batch `step` by handle, as written for the trainer. `checkpoint`: the trainer commits this step too."""

    step: int
    lineage: str
    traces: list[QueuedTrace]
    files: list[str]
    checkpoint: bool = False


class PackedBatch(msgspec.Struct, frozen=True):
    """A batch as the orchestrator takes it: each trace as it was encoded when it was queued.

    Decoding hundreds of traces takes many milliseconds, and the event loop must not stand still for that.
    """

    step: int
    lineage: str
    trace_ids: list[str]
    traces: list[msgspec.Raw]
    files: list[str]
    checkpoint: bool = False

    def encode(self) -> bytes:
        """The bytes of the `TrainBatch`."""
        return msgspec.msgpack.encode(
            {
                "step": self.step,
                "lineage": self.lineage,
                "traces": self.traces,
                "files": self.files,
                "checkpoint": self.checkpoint,
            }
        )


class ScoredGroup(msgspec.Struct, frozen=True):
    """What `TrainSource.on_result` learns about a group that was scored."""

    group_id: str
    env_name: str
    task: Any
    step: int
    rewards: list[float]


def is_stale(policy: PolicySpan | None, *, step: int, max_off_policy_steps: int) -> bool:
    """Whether work of this policy is too old to be trained by batch `step`."""
    return policy is not None and policy.start < (step - 1) - max_off_policy_steps
