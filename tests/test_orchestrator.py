"""The loop in one process: ship, save, resume, end."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from loop import Run, Trainer, soon, until_killed, until_the_end
from prime_io import (
    CheckpointManager,
    Exchange,
    Orchestrator,
    PayloadStore,
    prepare_resume,
)


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
