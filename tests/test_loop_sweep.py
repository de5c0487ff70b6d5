"""The sweep beside a run that goes on: orphans of old versions go, and nothing that may still be needed."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loop import FIELD, Run, Trainer
from prime_io import Episode, PayloadSegment, Rollout, prepare_resume
from prime_io.sweep import GRACE_S


async def until(condition: Callable[[], bool], trainer: Trainer, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert trainer.error is None, trainer.error
        assert time.monotonic() < end, "it did not come to that in time"
        await asyncio.sleep(0.005)


def orphan(life: Run, version: int, *, old: bool) -> Path:
    """A payload whose writer died before it was reported."""
    [segment] = life.store.write({FIELD: np.zeros((9, 3, 2), np.uint8)}, version=version).values()
    path = Path(life.store.root) / segment.file
    if old:
        age(path)
    return path


def age(path: Path) -> None:
    then = time.time() - GRACE_S - 60
    os.utime(path, (then, then))


async def leave(life: Run, trainer: Trainer, running: asyncio.Future[Any]) -> None:
    life.orchestrator.stop()
    await running
    await asyncio.to_thread(trainer.join, 20)
    assert trainer.error is None, trainer.error
    await life.orchestrator.finish()
    assert not [kind for *_, kind in life.store.native.scan() if kind == "payload"]
    life.store.close()


def test_rule_07_an_orphan_of_an_old_version_goes_while_the_run_goes_on(tmp_path: Path) -> None:
    """Rule 7: in between, only what is below every live version and older than the grace is swept."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life, trainer = Run(tmp_path, max_steps=500), Trainer(tmp_path)
        gone, young, future = (
            orphan(life, 0, old=True),
            orphan(life, 0, old=False),
            orphan(life, 10**6, old=True),
        )
        trainer.start()
        running = asyncio.ensure_future(life.orchestrator.run())
        await until(lambda: any(facts["reclaimed"] for facts in life.of("orphans_swept")), trainer)
        assert not running.done()
        assert not gone.exists() and young.exists() and future.exists()
        swept = [facts for facts in life.of("orphans_swept") if facts["reclaimed"]]
        assert swept[0]["reclaimed"] == 1 and swept[0]["before"] > 0
        # The trainer reads every row of every batch: nothing that was needed has gone.
        several = len(trainer.trained) + 4
        await until(lambda: len(trainer.trained) >= several, trainer)
        assert young.exists() and future.exists()
        await leave(life, trainer, running)

    asyncio.run(main())


def test_rule_07_a_straggler_keeps_its_early_files(tmp_path: Path) -> None:
    """Rule 7: a rollout dispatched long ago holds back the sweep of its version, until it has been consumed."""

    class Straggling(Run):
        early: PayloadSegment | None = None
        late: asyncio.Event

        async def run_episode(self, rollout: Rollout) -> Episode:
            if self.early is not None:
                return await super().run_episode(rollout)
            first = (hash(rollout.group_id) + rollout.member) % 30000
            rows = np.full((9, 3, 2), first % 256, np.uint8)
            [self.early] = self.store.write({FIELD: rows}, version=rollout.dispatch_version).values()
            age(Path(self.store.root) / self.early.file)
            await self.late.wait()
            episode = await super().run_episode(rollout)
            episode.traces[0].samples[0].payload = [self.early]
            return episode

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life, trainer = Straggling(tmp_path, max_steps=500), Trainer(tmp_path)
        life.late = asyncio.Event()
        # However long it takes, it is not stale: that would cancel it.
        life.sink._max_off_policy_steps = life.dispatcher._max_off_policy_steps = 10**6
        trainer.start()
        running = asyncio.ensure_future(life.orchestrator.run())
        await until(lambda: life.early is not None, trainer)
        beside = orphan(life, life.early.pos, old=True)
        assert life.early.file.startswith("v0/")
        await until(lambda: len(trainer.trained) >= 5 and len(life.of("orphans_swept")) >= 2, trainer)
        assert all(facts["before"] == 0 for facts in life.of("orphans_swept"))
        early = Path(life.store.root) / life.early.file
        assert early.exists() and beside.exists()
        life.late.set()
        await until(lambda: not early.exists() and not beside.exists(), trainer)
        assert not running.done()
        await leave(life, trainer, running)

    asyncio.run(main())


def test_a_sweep_that_fails_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Promise: a sweep beside the run that fails is logged, and the run and its next sweep go on."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        life, trainer = Run(tmp_path, max_steps=500), Trainer(tmp_path)
        sweep, running_now, most, calls = life.store.sweep, 0, 0, 0

        def failing(**options: Any) -> Any:
            nonlocal running_now, most, calls
            calls += 1
            running_now += 1
            most = max(most, running_now)
            time.sleep(0.05)
            running_now -= 1
            if calls == 1:
                raise OSError(5, "Input/output error")
            return sweep(**options)

        life.store.sweep = failing  # type: ignore[method-assign]
        gone = orphan(life, 0, old=True)
        trainer.start()
        running = asyncio.ensure_future(life.orchestrator.run())
        await until(lambda: not gone.exists(), trainer)
        assert calls >= 2 and most == 1
        await leave(life, trainer, running)

    caplog.set_level(logging.WARNING, "prime_io.orchestrator")
    asyncio.run(main())
    assert "the sweep below version" in caplog.text and "Input/output error" in caplog.text
