"""Rules of the loop (design, section 8) that no module's own tests hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loop import Run, Trainer, until_killed, until_the_end
from prime_io import (
    CheckpointManager,
    Episode,
    Exchange,
    GroupCancellation,
    Policy,
    Progress,
    Rollout,
    load_batch,
    prepare_resume,
)
from work import Bench

BATCH, GROUP = 8, 4


async def settled(life: Run, running: asyncio.Future[Any], when: Callable[[], bool]) -> None:
    """Wait until it has come to that, and to a rest: nothing in flight, nothing waiting to be consumed."""
    quiet = 0
    for _ in range(4000):
        assert not running.done() or running.result() is None
        resting = when() and not life.dispatcher.inflight and not life.dispatcher.emitted
        quiet = quiet + 1 if resting else 0
        if quiet > 20:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"it did not come to that: {life.sink.queued} queued, {life.of('shipped')}")


async def give_up(life: Run, running: asyncio.Future[Any]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await life.dispatcher.close()
    await life.sink.drain()
    life.store.close()


# --- 8


@pytest.mark.parametrize("reason", ["overload", "stale"])
def test_rule_08_what_is_cancelled_in_flight_releases(tmp_path: Path, reason: str) -> None:
    """Rule 8, overload and stale in flight: counted by that name; the members that came are scored or dropped, and no
    file of the group stays."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life = Run(tmp_path, max_steps=50)
        written = asyncio.Event()

        async def run_episode(rollout: Rollout) -> Episode:
            episode = await Run.run_episode(life, rollout)
            if rollout.member < 2:
                return episode
            written.set()
            await asyncio.Event().wait()  # its payload is there, and nobody will ever hear of it
            return episode

        life.dispatcher._run_episode = run_episode
        life.dispatcher.set_limit(GROUP)
        life.dispatcher.pump()
        for _ in range(2):
            result = await life.dispatcher.next_result()
            assert isinstance(result, Episode)
            await life.sink.add(result)
        await written.wait()
        if reason == "overload":
            assert life.dispatcher.cancel_inflight(1) == 2
        else:
            life.progress.step = 9
            life.dispatcher.on_version_pending(8)
        cancellation = await life.dispatcher.next_result()
        assert isinstance(cancellation, GroupCancellation) and cancellation.reason == reason
        await life.sink.cancel(cancellation)
        assert life.sink.counters[f"cancelled_{reason}"] == 2
        assert life.sink.counters["stale_members"] == (2 if reason == "stale" else 0)
        assert not life.sink.open_groups and not life.dispatcher.open_train_groups()
        assert life.sink.queued == (2 if reason == "overload" else 0)
        await life.orchestrator.finish()
        assert not [kind for *_, kind in life.store.native.scan() if kind == "payload"]
        assert len(life.sink.ledger) == 0
        life.store.close()

    asyncio.run(main())


# --- 9


def test_rule_09_on_result_runs_for_scored_groups_alone(tmp_path: Path) -> None:
    """Rule 9: once per scored group; never for one that was cancelled, is stale, or has nothing to score."""

    async def main() -> None:
        bench = Bench(tmp_path, progress=Progress(step=9), max_off_policy_steps=4)
        await bench.fill(1, policy=7)
        assert [group.group_id for group in bench.results] == bench.forgotten
        await bench.fill(1, policy=1)
        await bench.fill(1, policy=7, ok=False)
        await bench.sink.cancel(GroupCancellation("env", "gone", 2, "stale"))
        assert len(bench.results) == 1
        assert len(bench.forgotten) == 4, "all the same, nothing is left open"
        # Half cancelled, the rest is scored, once.
        await bench.sink.add(bench.episode("half", policy=7))
        await bench.sink.cancel(GroupCancellation("env", "half", 1, "overload"))
        assert [group.group_id for group in bench.results[1:]] == ["half"]
        await bench.sink.drain()

    asyncio.run(main())


# --- 14


def test_rule_14_no_group_is_opened_above_max_payload_bytes(tmp_path: Path) -> None:
    """Rule 14: while live payload exceeds the limit and the queue alone can fill the next batch, none is opened."""

    async def main(limit: int | None, run: Path) -> int:
        prepare_resume(run, None)
        life = Run(run, max_steps=50, max_payload_bytes=limit)
        life.dispatcher.set_limit(1)
        Exchange(life.lineage).publish_weights(0, {"weights": b"w"})
        running = asyncio.ensure_future(life.orchestrator.run())
        await settled(life, running, lambda: len(life.of("shipped")) == 2 and life.sink.queued_batches >= 1)
        queued = life.sink.queued
        assert life.sink.ledger.bytes > 1
        await give_up(life, running)
        return queued

    # One rollout at a time: the group that fills the next batch is the last one.
    assert BATCH <= asyncio.run(main(1, tmp_path / "limited")) < BATCH + GROUP
    assert asyncio.run(main(None, tmp_path / "free")) >= 2 * BATCH


def test_rule_14_bytes_in_a_queue_of_less_than_a_batch_open_the_next_group(tmp_path: Path) -> None:
    """Rule 14: all bytes above the limit lie in a queue that fills no batch: the run goes on."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life = Run(tmp_path, max_steps=3, max_payload_bytes=1)
        life.dispatcher.set_limit(GROUP)
        seen: list[tuple[int, int]] = []
        draw = life.source.next_task

        def next_task(step: int) -> Any:
            seen.append((life.sink.queued, life.sink.ledger.bytes))
            return draw(step)

        life.source.next_task = next_task  # type: ignore[method-assign]
        await until_the_end(life, Trainer(tmp_path))
        assert all(queued < BATCH for queued, held in seen if held > 1)
        assert [1 for queued, held in seen if 0 < queued < BATCH and held > 1], "it came to that"
        life.store.close()

    asyncio.run(main())


def test_rule_14_bytes_in_open_groups_keep_the_run_going(tmp_path: Path) -> None:
    """Rule 14: all bytes above the limit lie in members of open groups: the others are dispatched and shipped."""

    class LastMembersLate(Run):
        """Every group waits for its last member, until all that may be in flight is."""

        async def run_episode(self, rollout: Rollout) -> Episode:
            if rollout.member == GROUP - 1:
                while not self.held:
                    await asyncio.sleep(0.002)
            return await super().run_episode(rollout)

        held = False

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life, trainer = LastMembersLate(tmp_path, max_steps=4, max_payload_bytes=1), Trainer(tmp_path)
        trainer.start()
        running = asyncio.ensure_future(life.orchestrator.run())
        # Thirteen may be in flight: as many groups as last members may wait.
        waiting = life.dispatcher._inflight
        while len(waiting) < 13 or any(rollout.member < GROUP - 1 for rollout in waiting.values()):
            await asyncio.sleep(0.005)
        assert life.sink.queued == 0 and life.sink.ledger.bytes > 1
        assert len(life.sink.open_groups) > BATCH // GROUP
        life.held = True
        await running
        await asyncio.to_thread(trainer.join, 20)
        assert trainer.error is None and sorted(trainer.trained) == [1, 2, 3, 4]
        await life.orchestrator.finish()
        life.store.close()

    asyncio.run(main())


def test_rule_14_a_restored_run_above_the_limit_goes_on(tmp_path: Path) -> None:
    """Rule 14: what a resume brings back exceeds the new limit: members are asked for and batches shipped."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        first = Run(tmp_path, max_steps=50)
        await until_killed(first, Trainer(tmp_path, slower_than=first, dies_after=5))
        step = CheckpointManager(run_dir=tmp_path).latest()
        assert step == 4
        prepare_resume(tmp_path, step)
        second, trainer = Run(tmp_path, max_steps=10, max_payload_bytes=1), Trainer(tmp_path)
        report = await second.orchestrator.restore(step)
        assert second.sink.ledger.bytes > 1 and report.members_kept + report.queued_kept
        await until_the_end(second, trainer)
        assert sorted(trainer.trained) == list(range(step + 1, 11))
        second.store.close()

    asyncio.run(main())


def test_rule_14_trained_waits_for_every_reader_and_is_cumulative(tmp_path: Path) -> None:
    """Rule 14: a batch's files stay until all readers acknowledged it; a later step answers for earlier ones."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life = Run(tmp_path, max_steps=50, readers=("rank0", "rank1"))
        exchange = Exchange(life.lineage)
        exchange.publish_weights(0, {"weights": b"w"})
        running = asyncio.ensure_future(life.orchestrator.run())
        await settled(life, running, lambda: len(life.of("shipped")) == 2)
        batches = [exchange.read_batch(step) for step in (1, 2)]
        exchange.acknowledge(2, "rank0")
        exchange.acknowledge(1, "somebody")
        await asyncio.sleep(0.1)
        assert not life.of("trained")
        for batch in batches:
            assert batch is not None
            assert len(load_batch(batch, store=life.store)) == BATCH
        exchange.acknowledge(2, "rank1")
        await settled(life, running, lambda: {"step": 2} in life.of("trained"))
        await life.sink.drain()
        there = {file for file, *_ in life.store.native.scan()}
        assert not any(set(batch.files) & there for batch in batches if batch)
        await give_up(life, running)

    asyncio.run(main())


# --- 15


@pytest.mark.parametrize("saved", [True, False])
def test_rule_15_stop_saves_n_unless_it_is_there(tmp_path: Path, saved: bool) -> None:
    """Rule 15: stopped where a checkpoint was cut, nothing is saved twice; elsewhere exactly that step is saved."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life = Run(tmp_path, max_steps=50)
        exchange = Exchange(life.lineage)
        exchange.publish_weights(0, {"weights": b"w"})
        if not saved:
            exchange.publish_weights(1, {"weights": b"w"})
        last = 2 if saved else 3
        running = asyncio.ensure_future(life.orchestrator.run())
        await settled(life, running, lambda: len(life.of("shipped")) == last)
        life.orchestrator.stop()
        while exchange.stop_step() is None:
            await asyncio.sleep(0.005)
        assert exchange.stop_step() == last
        assert [facts["step"] for facts in life.of("cut")] == ([2] if saved else [2, 3])
        assert all(facts["committed"] for facts in life.of("saved"))
        assert life.manager.failed_saves == 0
        # The readers are told, and the run ends with their last acknowledgement.
        assert not running.done()
        exchange.acknowledge(last, "trainer")
        await asyncio.wait_for(running, 20)
        await life.orchestrator.finish()
        life.store.close()

    asyncio.run(main())


def test_rule_15_the_last_step_is_saved_before_the_run_drains(tmp_path: Path) -> None:
    """Rule 15: the checkpoint of the last step holds the queue and groups that the end then gives up."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life, trainer = Run(tmp_path, max_steps=3), Trainer(tmp_path)
        await until_the_end(life, trainer)
        drained = [
            at
            for at, (name, facts) in enumerate(life.events)
            if name == "dropped" and facts["reason"].startswith("drained")
        ]
        [saved] = [
            at for at, (name, facts) in enumerate(life.events) if name == "saved" and facts["step"] == 3
        ]
        assert drained and min(drained) > saved
        [cut] = [facts for facts in life.of("cut") if facts["step"] == 3]
        given_up = {trace for at in drained for trace in life.events[at][1]["traces"]}
        assert set(cut["queued"]) <= given_up
        life.store.close()

    asyncio.run(main())


# --- 7


def test_rule_07_the_oldest_live_version_is_the_least_of_all_parts(tmp_path: Path) -> None:
    """Rule 7: queue, groups, untrained batches, in flight, emitted: the oldest of them bounds the sweep."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life = Run(tmp_path, max_steps=50)
        live = life.orchestrator.oldest_live_version
        life.policy.version = 9
        assert live() == 9
        held = life.sink.ledger.hold(life.store.write({"x": b"queue"}, version=7).values())
        assert live() == 7
        stuck = asyncio.Event()

        async def never(rollout: Rollout) -> Episode:
            await stuck.wait()
            raise AssertionError

        life.dispatcher._run_episode = never
        life.policy.version = 5
        life.dispatcher.pump()
        life.policy.version = 9
        assert life.dispatcher.inflight and live() == 5
        life.dispatcher._emit(Episode("e", "env", "g", 0, None, 4, [], lineage=life.lineage.id))
        assert live() == 4
        await life.dispatcher.next_result()
        assert live() == 5
        await life.dispatcher.close()
        assert live() == 7
        life.sink.ledger.release(held)
        assert live() == 9
        await life.sink.drain()
        life.store.close()

    asyncio.run(main())


def test_rule_07_a_policy_is_never_below_what_is_written(tmp_path: Path) -> None:
    """Rule 7: with nothing alive, the current version itself is the bound: workers are writing it."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life = Run(tmp_path, max_steps=50)
        assert life.policy == Policy(0) and life.orchestrator.oldest_live_version() == 0
        life.policy.version = 3
        assert life.orchestrator.oldest_live_version() == 3
        life.store.close()

    asyncio.run(main())
