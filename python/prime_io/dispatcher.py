"""`Dispatcher`: keeps rollouts in flight and hands their results over, once each.

It knows a group from its first dispatch until the sink consumed its last result. Every dispatched rollout
ends as one `Episode` (an exception becomes an errored one) or is covered by one `GroupCancellation`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from .source import TrainSource
from .types import Episode, GroupCancellation, OpenGroup, Policy, Progress, Reason, TaskRequest

log = logging.getLogger("prime_io.dispatcher")


class Rollout(msgspec.Struct, frozen=True):
    """One rollout to run. `member` is unique within its group, across resumes too: ids may be derived from it.

    The worker writes its payloads into `v<dispatch_version>`.
    """

    env_name: str
    group_id: str
    task: object
    member: int
    dispatch_version: int
    lineage: str = ""


RunEpisode = Callable[[Rollout], Awaitable[Episode]]


class Dispatcher:
    """Runs `run_episode(rollout)` for the tasks of `source`, at most `max_inflight` not yet consumed.

    Missing members of open groups are always dispatched; a new group only while `may_open()` says so.
    """

    def __init__(
        self,
        *,
        source: TrainSource,
        run_episode: RunEpisode,
        policy: Policy,
        progress: Progress,
        max_inflight: int,
        max_off_policy_steps: int,
        lineage: str = "",
        may_open: Callable[[], bool] = lambda: True,
    ) -> None:
        if max_inflight < 1:
            raise ValueError(f"max_inflight must be at least 1, not {max_inflight}")
        self.source = source
        self.may_open = may_open
        self._run_episode = run_episode
        self._policy = policy
        self._progress = progress
        self._max_inflight = max_inflight
        self._max_off_policy_steps = max_off_policy_steps
        self._lineage = lineage
        self._groups: dict[str, _Known] = {}
        self._todo: deque[tuple[str, int, int]] = deque()  # group, its next member, how many
        self._inflight: dict[asyncio.Task[Episode], Rollout] = {}
        self._emitted: deque[Episode | GroupCancellation] = deque()
        self._arrived = asyncio.Event()

    # -- dispatch

    @property
    def inflight(self) -> int:
        """Rollouts running now."""
        return len(self._inflight)

    def set_limit(self, n: int) -> None:
        """Change `max_inflight`; running rollouts are not cancelled by it."""
        self._max_inflight = n

    def pump(self) -> None:
        """Dispatch until the limit is reached or nothing may be dispatched.

        Results that wait to be consumed count as in flight: a slow consumer slows the rollouts down.
        """
        while len(self._inflight) + len(self._emitted) < self._max_inflight:
            if not self._todo and not self._draw():
                return
            group_id, member, left = self._todo.popleft()
            if left > 1:
                self._todo.appendleft((group_id, member + 1, left - 1))
            self._dispatch(group_id, member)

    def _draw(self) -> bool:
        if not self.source.resumed and not self.may_open():
            return False
        request = self.source.next_task(self._progress.step)
        known = self._groups.get(request.group_id)
        if known is None:
            known = self._groups[request.group_id] = _Known(request)
        known.requested = max(known.requested, request.first_member + request.rollouts)
        known.waiting += request.rollouts
        self._todo.append((request.group_id, request.first_member, request.rollouts))
        return True

    def _dispatch(self, group_id: str, member: int) -> None:
        known = self._groups[group_id]
        known.waiting -= 1
        known.running += 1
        if known.dispatch_version is None:
            known.dispatch_version = self._policy.version
        request = known.request
        rollout = Rollout(
            request.env_name, group_id, request.task, member, self._policy.version, self._lineage
        )
        task = asyncio.ensure_future(self._run(rollout))
        self._inflight[task] = rollout
        task.add_done_callback(self._done)

    async def _run(self, rollout: Rollout) -> Episode:
        try:
            episode = await self._run_episode(rollout)
            if not isinstance(episode, Episode):
                raise TypeError(f"run_episode returned a {type(episode).__name__}, not an Episode")
            if episode.group_id != rollout.group_id or episode.kind != "train":
                raise ValueError(f"run_episode returned a {episode.kind} episode of group {episode.group_id}")
            return episode
        except Exception as error:
            log.warning("a rollout of group %s failed: %s", rollout.group_id, error)
            return _errored(rollout, f"{type(error).__name__}: {error}")

    def _done(self, task: asyncio.Task[Episode]) -> None:
        rollout = self._inflight.pop(task, None)
        if rollout is None:
            return  # covered by a cancellation
        self._groups[rollout.group_id].running -= 1
        # Not cancelled by us: what `run_episode` waited for was.
        self._emit(_errored(rollout, "cancelled from inside") if task.cancelled() else task.result())

    # -- results

    def _emit(self, result: Episode | GroupCancellation) -> None:
        self._emitted.append(result)
        self._arrived.set()

    async def next_result(self) -> Episode | GroupCancellation:
        """Wait for the next result; from here on it counts as consumed only when its group is forgotten."""
        while not self._emitted:
            self._arrived.clear()
            await self._arrived.wait()
        return self._emitted.popleft()

    @property
    def emitted(self) -> int:
        """Results that wait to be consumed."""
        return len(self._emitted)

    def open_train_groups(self) -> dict[str, OpenGroup]:
        """The groups known here, for a snapshot: without members, those are the sink's to add."""
        return {
            group_id: OpenGroup(
                known.request.env_name,
                known.request.task,
                known.request.step,
                known.request.rollouts,
                requested=known.requested,
            )
            for group_id, known in self._groups.items()
        }

    def forget_consumed_group(self, group_id: str) -> None:
        """The sink consumed the last result of a group."""
        known = self._groups.pop(group_id, None)
        assert known is None or (not known.running and not known.waiting), (
            f"{group_id} still has rollouts to come"
        )

    def oldest_version(self) -> int | None:
        """The least dispatch version of all that is in flight or emitted: its files may still be needed."""
        versions = [rollout.dispatch_version for rollout in self._inflight.values()]
        versions += [e.dispatch_version for e in self._emitted if isinstance(e, Episode)]
        return min(versions, default=None)

    # -- cancellation

    def on_version_pending(self, version: int) -> None:
        """Weights `version` are coming: rollouts in flight that are stale for the next batch are cancelled.

        A moment to look, not a measure: staleness is judged at `progress.step`, as the sink does.
        """
        log.debug("version %d is pending", version)
        horizon = (self._progress.step - 1) - self._max_off_policy_steps
        for group_id, known in list(self._groups.items()):
            if known.dispatch_version is not None and known.dispatch_version < horizon:
                self._cancel(group_id, "stale", lambda r: r.dispatch_version < horizon)

    def cancel_inflight(self, n: int) -> int:
        """Cancel whole groups, newest first, until at least `n` rollouts in flight are gone; returns how many."""
        cancelled = 0
        for group_id in reversed(list(self._groups)):
            if cancelled >= n:
                break
            cancelled += self._cancel(group_id, "overload", lambda r: True)
        return cancelled

    def _cancel(self, group_id: str, reason: Reason, condition: Callable[[Rollout], bool]) -> int:
        tasks = [t for t, r in self._inflight.items() if r.group_id == group_id and condition(r)]
        for task in tasks:
            del self._inflight[task]
            task.cancel()
        known = self._groups[group_id]
        known.running -= len(tasks)
        if tasks:
            self._emit(GroupCancellation(known.request.env_name, group_id, len(tasks), reason))
        return len(tasks)

    async def close(self) -> None:
        """The run ends: cancel everything in flight without a word, give up what was not consumed, know no group."""
        tasks = list(self._inflight)
        self._inflight.clear()
        self._todo.clear()
        self._emitted.clear()
        self._groups.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _errored(rollout: Rollout, error: str) -> Episode:
    return Episode(
        id=f"{rollout.group_id}.{rollout.member}.errored",
        env_name=rollout.env_name,
        group_id=rollout.group_id,
        task=rollout.task,
        policy=None,
        dispatch_version=rollout.dispatch_version,
        traces=[],
        ok=False,
        lineage=rollout.lineage,
        error=error,
    )


class _Known:
    """A group from its first request on: how many rollouts wait for dispatch, how many run."""

    def __init__(self, request: TaskRequest) -> None:
        self.request = request
        self.waiting = 0
        self.running = 0
        self.requested = 0
        self.dispatch_version: int | None = None
