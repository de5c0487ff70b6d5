"""`Dispatcher`: exact numbers, bounded flight, every rollout accounted for once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from prime_io import (
    Dispatcher,
    Environment,
    Episode,
    GroupCancellation,
    Policy,
    Progress,
    Rollout,
    TaskRequest,
    TrainSource,
)


def finished(rollout: Rollout) -> Episode:
    return Episode(
        f"{rollout.group_id}.{rollout.member}",
        rollout.env_name,
        rollout.group_id,
        rollout.task,
        None,
        rollout.dispatch_version,
        [],
    )


class Rig:
    """A dispatcher whose rollouts end when they are let go."""

    def __init__(self, *, max_inflight: int = 4, group_size: int = 3, **more: Any) -> None:
        self.source = TrainSource(envs=[Environment("env", list(range(50)), group_size)], seed=0)
        self.policy, self.progress = Policy(), Progress()
        self.gates: dict[tuple[str, int], asyncio.Future[None]] = {}
        self.most = 0
        self.dispatcher = Dispatcher(
            source=self.source,
            run_episode=more.pop("run_episode", self.run_episode),
            policy=self.policy,
            progress=self.progress,
            max_inflight=max_inflight,
            max_off_policy_steps=1,
            **more,
        )

    async def run_episode(self, rollout: Rollout) -> Episode:
        self.most = max(self.most, self.dispatcher.inflight)
        gate = self.gates[rollout.group_id, rollout.member] = asyncio.get_running_loop().create_future()
        await gate
        return finished(rollout)

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(main())  # type: ignore[arg-type]


def test_rule_05_a_request_for_k_rollouts_dispatches_exactly_k() -> None:
    """Rule 5: after resuming 5 of 8 members exactly 3 are dispatched, within the cap, as members 8 to 10."""

    async def main() -> None:
        rig = Rig(max_inflight=2, may_open=lambda: False)
        rig.source.resumed.append(TaskRequest("env", 7, 1, 3, "env-000004", 8))
        rig.dispatcher.pump()
        seen: list[str] = []
        while rig.dispatcher.inflight:
            await rig.settle()
            for gate in rig.gates.values():
                if not gate.done():
                    gate.set_result(None)
            await rig.settle()
            while rig.dispatcher.emitted:
                result = await rig.dispatcher.next_result()
                assert isinstance(result, Episode)
                seen.append(result.id)
            rig.dispatcher.pump()
        assert seen == [f"env-000004.{member}" for member in (8, 9, 10)]
        assert rig.most <= 2

    run(main)


def test_rule_04_members_asked_for_again_never_take_a_number_twice() -> None:
    """Bug: rollouts asked for again while others of their group waited renumbered those, and later ones repeated."""

    async def main() -> None:
        rig = Rig(max_inflight=2, group_size=4)
        rig.dispatcher.pump()
        rig.source.resumed.append(TaskRequest("env", 7, 1, 1, "env-000000", 4))
        rig.source.resumed.append(TaskRequest("env", 7, 1, 1, "env-000000", 5))
        rig.dispatcher.may_open = lambda: False
        rig.dispatcher.set_limit(10)
        rig.dispatcher.pump()
        await rig.settle()
        assert sorted(rig.gates) == [("env-000000", member) for member in range(6)]
        assert rig.dispatcher.open_train_groups()["env-000000"].requested == 6
        await rig.dispatcher.close()

    run(main)


def test_rule_09_a_group_is_known_from_dispatch_to_its_last_consumed_result() -> None:
    """Rule 9: an emitted result keeps its group open under its task until the sink has consumed it."""

    async def main() -> None:
        rig = Rig(max_inflight=3)
        rig.dispatcher.pump()
        await rig.settle()
        [(group_id, group)] = rig.dispatcher.open_train_groups().items()
        for gate in rig.gates.values():
            gate.set_result(None)
        await rig.settle()
        assert rig.dispatcher.emitted == 3
        for _ in range(3):
            await rig.dispatcher.next_result()
        assert rig.dispatcher.open_train_groups() == {group_id: group}
        rig.dispatcher.forget_consumed_group(group_id)
        assert not rig.dispatcher.open_train_groups()

    run(main)


def test_rule_09_every_dispatched_rollout_ends_once() -> None:
    """Rule 9: with errors and cancellations, results and cancelled counts add up to what was dispatched."""

    async def main() -> None:
        async def flaky(rollout: Rollout) -> Episode:
            await asyncio.sleep(0)
            if rollout.member == 1:
                raise RuntimeError("the tool failed")
            if rollout.member == 2:
                await asyncio.sleep(60)
            return finished(rollout)

        rig = Rig(max_inflight=9, run_episode=flaky)
        rig.dispatcher.pump()
        await rig.settle()
        rig.policy.version, rig.progress.step = 3, 4
        rig.dispatcher.set_limit(0)
        rig.dispatcher.on_version_pending(3)
        outcome: Counter[str] = Counter()
        groups: Counter[str] = Counter()
        while rig.dispatcher.emitted:
            result = await rig.dispatcher.next_result()
            if isinstance(result, GroupCancellation):
                assert result.reason == "stale"
                outcome["cancelled"] += result.count
                groups[result.group_id] += result.count
            else:
                outcome["ok" if result.ok else "errored"] += 1
                groups[result.group_id] += 1
        assert outcome == {"ok": 3, "errored": 3, "cancelled": 3}
        assert set(groups.values()) == {3}
        await rig.dispatcher.close()

    run(main)


def test_rule_07_in_flight_and_emitted_versions_are_seen() -> None:
    """Rule 7: a straggler keeps the version it was dispatched under live, in flight and emitted."""

    async def main() -> None:
        rig = Rig(max_inflight=1)
        rig.policy.version = 2
        rig.dispatcher.pump()
        await rig.settle()
        rig.policy.version = 50
        assert rig.dispatcher.oldest_version() == 2
        for gate in rig.gates.values():
            gate.set_result(None)
        await rig.settle()
        assert rig.dispatcher.oldest_version() == 2
        await rig.dispatcher.next_result()
        assert rig.dispatcher.oldest_version() is None

    run(main)


def test_rule_14_members_of_open_groups_are_dispatched_though_no_group_may_open() -> None:
    """Rule 14: `may_open` holds back new groups only."""

    async def main() -> None:
        allowed = [True]
        rig = Rig(max_inflight=1, may_open=lambda: allowed[0])
        rig.dispatcher.pump()
        allowed[0] = False
        total = 0
        for _ in range(10):
            await rig.settle()
            for gate in rig.gates.values():
                if not gate.done():
                    gate.set_result(None)
            await rig.settle()
            while rig.dispatcher.emitted:
                await rig.dispatcher.next_result()
                total += 1
            rig.dispatcher.pump()
        assert total == 3

    run(main)


def test_overload_cancels_the_newest_groups_first() -> None:
    """`cancel_inflight(n)` gives up whole groups, newest first, and says so."""

    async def main() -> None:
        rig = Rig(max_inflight=6)
        rig.dispatcher.pump()
        await rig.settle()
        first, second = rig.dispatcher.open_train_groups()
        assert rig.dispatcher.cancel_inflight(2) == 3
        result = await rig.dispatcher.next_result()
        assert result == GroupCancellation("env", second, 3, "overload")
        assert first in rig.dispatcher.open_train_groups()
        await rig.dispatcher.close()

    run(main)
