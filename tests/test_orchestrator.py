"""The loop in one process, with a fake worker and a trainer thread on the real store: ship, save, resume, end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prime_io import (
    CheckpointManager,
    Dispatcher,
    Environment,
    Episode,
    Exchange,
    FieldSpec,
    Lineage,
    LineageLeftError,
    Orchestrator,
    PayloadStore,
    Policy,
    PolicySpan,
    Progress,
    Rollout,
    Sample,
    Trace,
    TrainBatch,
    TrainSink,
    TrainSource,
    load_batch,
    prepare_resume,
)
from prime_io.testing import run_virtual

FIELD = "routed_experts"


class Trainer(threading.Thread):
    """Reads every batch to the last byte, publishes versions, commits its half, acknowledges."""

    def __init__(self, run: Path, *, slower_than: Run | None = None, dies_after: int | None = None) -> None:
        """`slower_than`: a step takes until that run has two batches queued."""
        super().__init__(daemon=True)
        self.run_dir, self.slower_than, self.dies_after = run, slower_than, dies_after
        self.lineage = Lineage.load(run)
        self.exchange = Exchange(self.lineage)
        self.trained: dict[int, list[str]] = {}
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.train()
        except BaseException as error:
            self.error = error

    def train(self) -> None:
        store = PayloadStore(self.run_dir / "payloads", create=False)
        manager = CheckpointManager(run_dir=self.run_dir)
        step = committed = self.lineage.resumed_from or 0
        self.exchange.publish_weights(step, {"weights": b"w"})
        while (batch := self.exchange.wait_batch(step + 1, poll_s=0.002)) is not None:
            for trace in load_batch(batch, store=store):
                [sample] = trace.samples
                rows, valid = store.gather(sample.payload, FIELD, 0, len(sample.token_ids) - 1, verify=True)
                assert valid.all()
                assert (rows == sample.token_ids[0] % 256).all(), "the payload of another trace"
            while self.slower_than is not None and self.slower_than.sink.queued_batches < 2:
                time.sleep(0.002)
            step = batch.step
            self.exchange.publish_weights(step, {"weights": b"w"})
            if batch.checkpoint:
                self.commit(manager, step)
                committed = step
            self.trained[step] = [trace.trace_id for trace in batch.traces]
            self.exchange.acknowledge(step, "trainer")
            if step == self.dies_after:
                return
        if step != committed:
            self.commit(manager, step)

    def commit(self, manager: CheckpointManager, step: int) -> None:
        directory = manager.new_component_dir()
        (directory / "model").write_bytes(b"w" * 100)
        manager.commit_component(step, "trainer", directory)


class Run:
    """One life."""

    def __init__(self, run: Path, *, max_steps: int, pin: Any = "link", **options: Any) -> None:
        self.lineage = Lineage.load(run)
        self.store = PayloadStore(run / "payloads", owner=True)
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.progress, self.policy = Progress(), Policy()
        self.source = TrainSource(envs=[Environment("env", list(range(40)), 4)], seed=3)
        self.calls = 0
        self.sink = TrainSink(
            store=self.store,
            progress=self.progress,
            policy=self.policy,
            group_size=4,
            batch_size=8,
            max_off_policy_steps=6,
            fields={FIELD: FieldSpec(align="token-1")},
            lineage=self.lineage.id,
        )
        self.dispatcher = Dispatcher(
            source=self.source,
            run_episode=self.run_episode,
            policy=self.policy,
            progress=self.progress,
            max_inflight=13,
            max_off_policy_steps=6,
            lineage=self.lineage.id,
        )
        self.manager = CheckpointManager(run_dir=run, keep_last=2, pin=pin)
        self.orchestrator = Orchestrator(
            exchange=Exchange(self.lineage),
            store=self.store,
            source=self.source,
            dispatcher=self.dispatcher,
            sink=self.sink,
            manager=self.manager,
            progress=self.progress,
            policy=self.policy,
            max_steps=max_steps,
            checkpoint_every=2,
            on_event=lambda name, facts: self.events.append((name, facts)),
            poll_s=0.002,
            **options,
        )

    async def run_episode(self, rollout: Rollout) -> Episode:
        self.calls += 1
        number = self.calls
        await asyncio.sleep(0.001 * (number % 7))
        n, first = 10, (hash(rollout.group_id) + rollout.member) % 30000
        rows = np.full((n - 1, 3, 2), first % 256, np.uint8)
        segments = await asyncio.to_thread(self.store.write, {FIELD: rows}, version=rollout.dispatch_version)
        name = f"{rollout.group_id}.{rollout.member}.{self.lineage.id[:6]}"
        sample = Sample(
            np.full(n, first, np.int32), np.arange(n) > 3, np.zeros(n, np.float32), list(segments.values())
        )
        version = PolicySpan(rollout.dispatch_version, rollout.dispatch_version)
        return Episode(
            name,
            "env",
            rollout.group_id,
            rollout.task,
            version,
            rollout.dispatch_version,
            [Trace(name, float(number % 3), [sample])],
            lineage=rollout.lineage,
        )

    def of(self, name: str) -> list[Mapping[str, Any]]:
        return [facts for event, facts in self.events if event == name]


async def until_the_end(life: Run, trainer: Trainer) -> None:
    trainer.start()
    await life.orchestrator.run()
    await asyncio.to_thread(trainer.join, 20)
    assert trainer.error is None, trainer.error
    await life.orchestrator.finish()


async def soon(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not come to that in time"
        await asyncio.sleep(0.002)


async def until_killed(life: Run, trainer: Trainer) -> None:
    """Run until the trainer has died, then drop everything without a word, as a kill does.

    Not during a save: the files of the batches trained since its cut would still wait for it.
    """
    trainer.start()
    running = asyncio.ensure_future(life.orchestrator.run())
    while {"step": trainer.dies_after} not in life.of("trained") or life.orchestrator._saves:
        assert trainer.error is None, trainer.error
        assert not running.done() or running.result() is None
        await asyncio.sleep(0.002)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await life.dispatcher.close()
    await life.sink.drain()
    if life.orchestrator._sweeping is not None:
        await life.orchestrator._sweeping  # its thread holds the store
    life.store.close()


def test_a_run_trains_every_step_and_leaves_nothing(tmp_path: Path) -> None:
    """Main job: all steps are trained, the last step is complete, and no payload file is left."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life, trainer = Run(tmp_path, max_steps=5), Trainer(tmp_path)
        await until_the_end(life, trainer)
        assert sorted(trainer.trained) == [1, 2, 3, 4, 5]
        assert life.manager.latest() == 5
        assert not [kind for *_, kind in life.store.native.scan() if kind == "payload"]
        assert len(life.sink.ledger) == 0
        life.store.close()

    asyncio.run(main())


@pytest.mark.parametrize("pin", ["link", "copy"])
def test_rule_11_a_killed_run_resumes_without_losing_or_repeating(tmp_path: Path, pin: str) -> None:
    """Rule 11: no pinned queued trace is lost, none is trained twice along the lineage, every draw is accounted."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        first = Run(tmp_path, max_steps=50, pin=pin)
        trainer = Trainer(tmp_path, slower_than=first, dies_after=5)
        await until_killed(first, trainer)
        step = CheckpointManager(run_dir=tmp_path).latest()
        assert step == 4
        cut = next(facts for facts in first.of("cut") if facts["step"] == step)
        assert cut["queued"]

        prepare_resume(tmp_path, step)
        second, resumed = Run(tmp_path, max_steps=9, pin=pin), Trainer(tmp_path)
        report = await second.orchestrator.restore(step)
        assert second.progress.step == step + 1
        assert set(cut["queued"]) <= set(second.sink.queued_trace_ids())
        assert report.queued_kept == report.queued_in_checkpoint == len(cut["queued"])
        assert {f for f, *_, kind in second.store.native.scan() if kind == "payload"} == (
            second.sink.ledger.files()
        )
        await until_the_end(second, resumed)

        line = [t for s, traces in trainer.trained.items() if s <= step for t in traces]
        line += [t for traces in resumed.trained.values() for t in traces]
        assert len(line) == len(set(line))
        assert sorted(resumed.trained) == list(range(step + 1, 10))
        dropped = {t for facts in second.of("dropped") for t in facts["traces"]}
        assert set(cut["queued"]) <= set(line) | dropped
        assert not [kind for *_, kind in second.store.native.scan() if kind == "payload"]
        second.store.close()

    asyncio.run(main())


def test_pin_skip_loses_exactly_the_reclaimed_files(tmp_path: Path) -> None:
    """`pin="skip"`: the traces whose payload was reclaimed are reported missing, spilled work stays readable."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        first = Run(tmp_path, max_steps=50, pin="skip")
        trainer = Trainer(tmp_path, slower_than=first, dies_after=5)
        await until_killed(first, trainer)
        step = CheckpointManager(run_dir=tmp_path).latest()
        cut = next(facts for facts in first.of("cut") if facts["step"] == step)
        there = {str(p.relative_to(tmp_path / "payloads")) for p in (tmp_path / "payloads").glob("v*/*")}
        pins = tmp_path / "checkpoints" / f"step_{step}" / "orchestrator" / "payloads"
        gone = {
            trace
            for trace, files in cut["files"].items()
            if any(file not in there and not (pins / file).exists() for file in files)
        }
        assert gone, "the queue of the cut was trained since, its payload must be gone"

        prepare_resume(tmp_path, step)
        second, resumed = Run(tmp_path, max_steps=8, pin="skip"), Trainer(tmp_path)
        report = await second.orchestrator.restore(step)
        assert set(second.sink.dropped_at_restore["queued_gone"]) == gone
        assert report.queued_missing == len(gone)
        await until_the_end(second, resumed)
        second.store.close()

    asyncio.run(main())


def test_rule_15_stop_saves_where_the_run_is(tmp_path: Path) -> None:
    """Rule 15: SIGTERM's `stop` saves N unless it is there, the trainer commits N, and a resume goes on at N + 1."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life, trainer = Run(tmp_path, max_steps=50), Trainer(tmp_path)
        trainer.start()
        running = asyncio.ensure_future(life.orchestrator.run())
        while len(trainer.trained) < 3:
            await asyncio.sleep(0.002)
        life.orchestrator.stop()
        await running
        await asyncio.to_thread(trainer.join, 20)
        assert trainer.error is None
        last = max(trainer.trained)
        assert life.manager.latest() == last == life.progress.step - 1
        queued = next(facts["queued"] for facts in life.of("cut") if facts["step"] == last)
        await life.orchestrator.finish()
        life.store.close()

        prepare_resume(tmp_path, last)
        second, resumed = Run(tmp_path, max_steps=last + 2), Trainer(tmp_path)
        await second.orchestrator.restore(last)
        assert set(queued) <= set(second.sink.queued_trace_ids())
        await until_the_end(second, resumed)
        assert sorted(resumed.trained) == [last + 1, last + 2]
        second.store.close()

    asyncio.run(main())


def test_rule_15_a_run_whose_last_step_cannot_be_saved_gives_nothing_up(tmp_path: Path) -> None:
    """Bug: a failed save of the last step ended the run as if it were good, and its queue was drained."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life, trainer = Run(tmp_path, max_steps=3), Trainer(tmp_path)
        trainer.start()
        save, failing = life.manager._commit, True

        def full(snapshot: Any, store: Any) -> Any:
            if failing and snapshot.step == 3:
                raise OSError(28, "No space left on device", "checkpoints")
            return save(snapshot, store)

        life.manager._commit = full  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="step 3 could not be saved"):
            await life.orchestrator.run()
        assert life.manager.failed_saves == 2, "the cut's own save and one more try"
        assert life.sink.queued and life.sink.ledger.files() <= {f for f, *_ in life.store.native.scan()}
        life.orchestrator._exchange.say_stop(3)
        await asyncio.to_thread(trainer.join, 20)
        await life.dispatcher.close()
        await life.sink.drain()
        life.store.close()

    asyncio.run(main())


def test_rule_14_shipping_waits_for_the_policy(tmp_path: Path) -> None:
    """Rule 14: batch s ships only at policy >= s - 1 - max_lead, and the queue does not grow without end."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life = Run(tmp_path, max_steps=50)
        Exchange(life.lineage).publish_weights(0, {"weights": b"w"})
        running = asyncio.ensure_future(life.orchestrator.run())
        while life.dispatcher.inflight or not life.sink.queued_batches:
            await asyncio.sleep(0.01)
        assert [facts["step"] for facts in life.of("shipped")] == [1, 2]
        assert life.sink.queued_batches <= 2 + 13 // 8 + 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await life.dispatcher.close()
        await life.sink.drain()
        life.store.close()

    asyncio.run(main())


@pytest.mark.parametrize("pin", ["link", "skip"])
def test_an_extended_run_resumes_from_its_last_step(tmp_path: Path, pin: str) -> None:
    """max_steps reached, run extended and resumed: no task is skipped and the queue is back.

    Bug: with `pin="skip"`, `finish` reclaimed the files that the last checkpoint names.
    """

    async def main() -> None:
        prepare_resume(tmp_path, None)
        first, trainer = Run(tmp_path, max_steps=3, pin=pin), Trainer(tmp_path)
        await until_the_end(first, trainer)
        first.store.close()
        cut = next(facts for facts in first.of("cut") if facts["step"] == 3)

        prepare_resume(tmp_path, 3)
        second, resumed = Run(tmp_path, max_steps=6, pin=pin), Trainer(tmp_path)
        await second.orchestrator.restore(3)
        assert second.source.drawn == cut["drawn"]
        assert set(cut["queued"]) <= set(second.sink.queued_trace_ids())
        known = set(second.sink.open_groups)
        assert {g for g, (done, target) in cut["groups"].items() if done < target} <= known
        await until_the_end(second, resumed)
        assert sorted(resumed.trained) == [4, 5, 6]
        second.store.close()

    asyncio.run(main())


def test_a_retention_that_fails_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: an EIO while old checkpoints were looked through ended the run, though its saves were good."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life, trainer = Run(tmp_path, max_steps=8), Trainer(tmp_path)
        retain, errors = life.manager.apply_retention, [OSError(5, "Input/output error"), ValueError("torn")]

        async def failing() -> Any:
            if errors:
                raise errors.pop()
            return await retain()

        life.manager.apply_retention = failing  # type: ignore[method-assign]
        await until_the_end(life, trainer)
        assert not errors and life.manager.steps() == [6, 8]
        life.store.close()

    asyncio.run(main())
    assert "Input/output error" in caplog.text and "torn" in caplog.text


def test_finish_waits_for_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the last sweep read a manifest while retention, still at work in its thread, removed that step."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life, trainer = Run(tmp_path, max_steps=5), Trainer(tmp_path)
        trainer.start()
        await life.orchestrator.run()
        await asyncio.to_thread(trainer.join, 20)
        under_way, look = threading.Event(), life.manager._steps.look

        def slow_look() -> Any:
            under_way.set()
            time.sleep(0.1)
            return look()

        monkeypatch.setattr(life.manager._steps, "look", slow_look)
        retention = asyncio.ensure_future(life.manager.apply_retention())
        await asyncio.to_thread(under_way.wait, 5)
        retention.cancel()  # as `run` cancels what watches: the thread goes on
        await asyncio.gather(retention, return_exceptions=True)
        order: list[str] = []
        monkeypatch.setattr(life.manager._steps, "look", lambda: order.append("look") or look())
        sweep = life.store.sweep
        monkeypatch.setattr(life.store, "sweep", lambda **how: order.append("sweep") or sweep(**how))
        await life.orchestrator.finish()
        assert order.index("sweep") > 0
        assert not list(tmp_path.rglob(".trash-*"))
        life.store.close()

    asyncio.run(main())


def test_nothing_of_dead_processes_is_left(tmp_path: Path) -> None:
    """Bug: temporaries of processes that died in this life stayed unless somebody called remove_leftovers."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life, trainer = Run(tmp_path, max_steps=3), Trainer(tmp_path)
        pid = os.fork()
        if not pid:
            try:
                (life.manager.new_component_dir() / "model").write_bytes(b"half")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert list(tmp_path.glob(".tmp-*"))
        await until_the_end(life, trainer)
        assert not list(tmp_path.glob(".tmp-*"))
        life.store.close()

    asyncio.run(main())


@pytest.mark.parametrize("pin", ["link", "skip"])
def test_a_damaged_manifest_of_an_old_step_skips_the_last_sweep(
    tmp_path: Path, pin: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: a manifest of an old step that could not be read made `finish` raise; now nothing is swept, and the log
    says why."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life, trainer = Run(tmp_path, max_steps=5, pin=pin), Trainer(tmp_path)
        trainer.start()
        await life.orchestrator.run()
        await asyncio.to_thread(trainer.join, 20)
        await life.manager.apply_retention()
        assert life.manager.steps() == [4, 5]
        damaged = tmp_path / "checkpoints/step_4/orchestrator/manifest.json"
        damaged.write_bytes(damaged.read_bytes()[:-9])
        life.manager._steps._kept.clear()  # as for a process that has not read it yet
        await life.sink.add(await life.run_episode(Rollout("env", "late", 0, 0, 0, life.lineage.id)))
        await life.sink.drain()
        held = life.sink.ledger.files()
        assert await life.orchestrator.finish() is None
        assert str(damaged) in caplog.text and "the sweep is left out" in caplog.text
        assert held <= {file for file, *_ in life.store.native.scan()}
        assert len(life.sink.ledger) == 0
        life.store.close()

    asyncio.run(main())


def test_rule_10_an_old_life_ends_as_soon_as_another_has_begun(tmp_path: Path) -> None:
    """Bug: a run that somebody else resumed noticed at its next save or retention only, and went on until then."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life = Run(tmp_path, max_steps=50)
        Exchange(life.lineage).publish_weights(0, {"weights": b"w"})
        running = asyncio.ensure_future(life.orchestrator.run())
        # At rest: what is left to do is to look for new weights and acknowledgements.
        await soon(lambda: life.of("orphans_swept") and not life.dispatcher.inflight)
        orphan = life.store.write({FIELD: np.zeros((2, 3, 2), np.uint8)}, version=0)[FIELD].file
        # Its lock does not stop a resume from another host, on a filesystem that does not tell.
        new = tmp_path / "LINEAGE.new"
        new.write_text(json.dumps({"format": 1, "chain": [{"id": "next", "resumed_at": None}]}))
        new.rename(tmp_path / "LINEAGE")
        with pytest.raises(LineageLeftError, match="must end"):
            await asyncio.wait_for(running, 20)
        for leave in (life.orchestrator.finish, life.orchestrator.sweep):
            with pytest.raises(LineageLeftError):
                await leave()
        await life.dispatcher.close()
        await life.sink.drain()
        assert orphan in {file for file, *_ in life.store.native.scan()}, "it deletes nothing any more"
        life.store.close()

    asyncio.run(main())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_batch_that_finds_no_room_is_published_later(
    tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: a disk that was full for a moment when a batch was published ended the run."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life, trainer = Run(tmp_path, max_steps=4), Trainer(tmp_path)
        publish, failures = life.orchestrator._exchange.publish_batch, [code] * 3

        def full(batch: Any) -> None:
            if batch.step == 2 and failures:
                raise OSError(failures.pop(), "No space left on device", "batches/step_2")
            publish(batch)

        life.orchestrator._exchange.publish_batch = full  # type: ignore[method-assign]
        await until_the_end(life, trainer)
        assert not failures and sorted(trainer.trained) == [1, 2, 3, 4]
        life.store.close()

    asyncio.run(main())
    assert caplog.text.count("batch 2 is published as soon as there is room") == 1


def test_stop_ends_a_run_whose_batch_finds_no_room(tmp_path: Path) -> None:
    """Promise: a run that waits for room to publish a batch can be stopped, with the error that it waits for."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life = Run(tmp_path, max_steps=4)
        Exchange(life.lineage).publish_weights(0, {"weights": b"w"})

        def full(batch: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", "batches/step_1")

        life.orchestrator._exchange.publish_batch = full  # type: ignore[method-assign]
        running = asyncio.ensure_future(life.orchestrator.run())
        await soon(lambda: life.progress.step > 1)
        await asyncio.sleep(0.05)
        assert not running.done()
        life.orchestrator.stop()
        with pytest.raises(OSError, match="No space left"):
            await asyncio.wait_for(running, 20)
        await life.dispatcher.close()
        await life.sink.drain()
        life.store.close()

    asyncio.run(main())


def test_rule_15_stop_waits_a_minute_for_the_last_acknowledgement(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rule 15: a reader that never acknowledges holds a stopped run for a minute, and no longer."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life = Run(tmp_path, max_steps=50)
        life.orchestrator._poll_s = 0.5
        Exchange(life.lineage).publish_weights(0, {"weights": b"w"})
        running = asyncio.ensure_future(life.orchestrator.run())
        while len(life.of("shipped")) < 2:
            await asyncio.sleep(0.1)
        life.orchestrator.stop()
        clock = asyncio.get_running_loop().time
        while life.orchestrator._exchange.stop_step() is None:
            await asyncio.sleep(0.1)
        told = clock()
        await running
        assert 59 < clock() - told < 61
        assert life.manager._steps.find(2, "orchestrator") is not None
        await life.orchestrator.finish()
        life.store.close()

    run_virtual(main())
    assert "batch 2 was not acknowledged" in caplog.text


def test_acknowledgements_of_what_was_not_shipped_release_nothing(tmp_path: Path) -> None:
    """Rule 14: a reader that acknowledges a step ahead of what was shipped is believed for what was, and no more."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life = Run(tmp_path, max_steps=50)
        exchange = Exchange(life.lineage)
        exchange.publish_weights(0, {"weights": b"w"})
        exchange.acknowledge(40, "trainer")
        running = asyncio.ensure_future(life.orchestrator.run())
        await soon(lambda: {"step": 2} in life.of("trained"))
        exchange.publish_weights(1, {"weights": b"w"})
        await soon(lambda: len(life.of("shipped")) >= 3)
        assert all(facts["step"] <= 3 for facts in life.of("trained"))
        shipped = [facts["step"] for facts in life.of("shipped")]
        assert shipped == sorted(shipped)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await life.dispatcher.close()
        await life.sink.drain()
        life.store.close()

    asyncio.run(main())


class Curriculum:
    """User state that changes all the time."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.weights = np.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.weights = state["seen"], state["weights"]


def test_rule_02_the_algorithms_state_is_of_the_cut(tmp_path: Path) -> None:
    """Rule 2: an algorithm's state is saved as of the cut, whatever happens to it after, and comes back."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        algorithm = Curriculum()
        first, trainer = Run(tmp_path, max_steps=4, algorithm=algorithm), Trainer(tmp_path)
        at_cut: dict[int, list[str]] = {}
        snapshot = first.orchestrator.snapshot_state

        def cut() -> Any:
            algorithm.seen.append(f"step {first.progress.step}")
            algorithm.weights[:] = len(algorithm.seen)
            made = snapshot()
            at_cut[made.step] = list(algorithm.seen)
            algorithm.seen.append("after the cut")
            algorithm.weights[:] = -1
            return made

        first.orchestrator.snapshot_state = cut  # type: ignore[method-assign]
        await until_the_end(first, trainer)
        first.store.close()
        prepare_resume(tmp_path, 4)
        again = Curriculum()
        second = Run(tmp_path, max_steps=5, algorithm=again)
        await second.orchestrator.restore(4)
        assert again.seen == at_cut[4]
        assert again.weights.tolist() == [len(at_cut[4])] * 3
        await second.sink.drain()
        second.store.close()

    asyncio.run(main())


def test_rule_02_an_emitted_result_is_asked_for_again(tmp_path: Path) -> None:
    """Rule 2: a result that waits to be consumed when the cut is made counts as missing, under the same task."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life = Run(tmp_path, max_steps=50)
        life.dispatcher.set_limit(4)
        life.dispatcher.pump()
        await life.sink.add(await the_next(life))
        await soon(lambda: life.dispatcher.emitted >= 3)
        [(group_id, group)] = life.dispatcher.open_train_groups().items()
        life.progress.step = 2
        life.orchestrator._cut()
        await life.sink.add(await the_next(life))  # consumed after the cut: not in it
        await asyncio.gather(*life.orchestrator._saves)
        Trainer(tmp_path).commit(life.manager, 1)
        await life.dispatcher.close()
        await life.sink.drain()
        life.store.close()

        prepare_resume(tmp_path, 1)
        again = Run(tmp_path, max_steps=50)
        report = await again.orchestrator.restore(1)
        assert (report.members_kept, report.rollouts_requested) == (1, 3)
        [request] = again.source.resumed
        assert (request.group_id, request.task, request.rollouts) == (group_id, group.task, 3)
        assert request.first_member == 4
        await again.sink.drain()
        again.store.close()

    asyncio.run(main())


async def the_next(life: Run) -> Episode:
    result = await life.dispatcher.next_result()
    assert isinstance(result, Episode)
    return result


def test_exchange_forget_keeps_what_readers_still_need(tmp_path: Path) -> None:
    """Promise: batches and acknowledgements before a step are removed, those from it on and other names stay."""
    prepare_resume(tmp_path, None)
    lineage = Lineage.load(tmp_path)
    exchange = Exchange(lineage)
    for step in (1, 2, 3):
        exchange.publish_batch(TrainBatch(step, lineage.id, [], []))
        for reader in ("rank0", "rank1"):
            exchange.acknowledge(step, reader)
    (lineage.batches_dir / "step_x").write_bytes(b"")
    exchange.forget(before=3)
    assert sorted(os.listdir(lineage.batches_dir)) == ["step_3", "step_x"]
    assert sorted(os.listdir(lineage.acks_dir)) == ["step_3.rank0", "step_3.rank1"]
    assert exchange.trained(["rank0", "rank1"]) == 3
    assert exchange.read_batch(1) is None and exchange.read_batch(3) is not None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"checkpoint_every": 0}, "checkpoint_every=0"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"readers": ()}, "somebody has to read"),
    ],
)
def test_options_of_the_orchestrator_are_checked(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    """Promise: a wrong option is a ValueError at construction, in words."""
    prepare_resume(tmp_path, None)
    life = Run(tmp_path, max_steps=1)
    settings: dict[str, Any] = {
        "exchange": Exchange(life.lineage),
        "store": life.store,
        "source": life.source,
        "dispatcher": life.dispatcher,
        "sink": life.sink,
        "manager": life.manager,
        "progress": life.progress,
        "policy": life.policy,
        "max_steps": 1,
        "checkpoint_every": 1,
    }
    Orchestrator(**settings)
    with pytest.raises(ValueError, match=why):
        Orchestrator(**(settings | options))
    life.store.close()


@pytest.mark.parametrize("size", [{"other": 4}, {"env": 8}])
def test_environments_need_the_group_size_that_they_are_drawn_with(
    tmp_path: Path, size: dict[str, int]
) -> None:
    """Bug: an environment that the sink had no (or another) group size for was sampled for ever and never scored."""
    prepare_resume(tmp_path, None)
    life = Run(tmp_path, max_steps=1)
    life.sink._group_size = size
    with pytest.raises(
        ValueError, match=r"'env' draws groups of 4, and the sink's group_size for it is (None|8)"
    ):
        Orchestrator(
            exchange=Exchange(life.lineage),
            store=life.store,
            source=life.source,
            dispatcher=life.dispatcher,
            sink=life.sink,
            manager=life.manager,
            progress=life.progress,
            policy=life.policy,
            max_steps=1,
            checkpoint_every=1,
        )
    life.store.close()


def test_a_checkpoint_without_the_algorithms_state_says_so(tmp_path: Path) -> None:
    """Bug: resuming with an algorithm from a checkpoint that has no state of one was a bare KeyError."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        first, trainer = Run(tmp_path, max_steps=2), Trainer(tmp_path)
        await until_the_end(first, trainer)
        first.store.close()
        prepare_resume(tmp_path, 2)
        second = Run(tmp_path, max_steps=3, algorithm=Curriculum())
        with pytest.raises(ValueError, match=r"no 'algorithm' state.*resume without one"):
            await second.orchestrator.restore(2)
        await second.sink.drain()
        second.store.close()

    asyncio.run(main())


def test_links_are_tried_at_start_and_with_the_first_payload_of_a_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise: whether links work is tried for real, at start and on the first file of another; one line each."""
    caplog.set_level("INFO", "prime_io.checkpoint")

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life, trainer = Run(tmp_path, max_steps=3), Trainer(tmp_path)
        tried: list[str | None] = []
        probe = life.manager.link_probe

        def link_probe(store: PayloadStore, file: str | None = None) -> bool:
            tried.append(file)
            if len(tried) == 2:
                assert file is not None
                os.unlink(tmp_path / "payloads" / file)  # gone meanwhile: the next one is tried
            return probe(store, file)

        life.manager.link_probe = link_probe  # type: ignore[method-assign]
        trainer.start()
        running = asyncio.ensure_future(life.orchestrator.run())
        await soon(lambda: len(tried) >= 3)
        assert tried[0] is None and all(tried[1:])
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await life.dispatcher.close()
        await life.sink.drain()
        life.orchestrator._exchange.say_stop(0)
        await asyncio.to_thread(trainer.join, 20)
        assert len(tried) == 3
        assert not list((tmp_path / "checkpoints").glob(".tmp-*"))
        life.store.close()

    asyncio.run(main())
    lines = [r.getMessage() for r in caplog.records if "are pinned by hard links" in r.getMessage()]
    assert [line.partition(" of ")[0] for line in lines] == ["payloads", "workers' files"]


def test_version_directories_that_are_empty_go_with_a_full_sweep(tmp_path: Path) -> None:
    """Promise: after a sweep in which nobody writes, directories of versions below every live one do not stay."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life, trainer = Run(tmp_path, max_steps=6), Trainer(tmp_path)
        (tmp_path / "payloads/v1").mkdir()
        (tmp_path / "payloads/v1/notes").write_text("of a person")
        await until_the_end(life, trainer)
        versions = life.store.versions()
        assert 1 in versions and all(version in (1, life.policy.version) for version in versions)
        assert (tmp_path / "payloads/v1/notes").exists()
        life.store.close()

    asyncio.run(main())
