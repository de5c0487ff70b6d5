"""The loop in trouble: damaged files, a full disk, another life, readers that do not answer."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loop import FIELD, Run, Trainer, soon, until_the_end
from prime_io import (
    Exchange,
    LineageLeftError,
    Rollout,
    prepare_resume,
)
from prime_io.testing import run_virtual


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
