"""What is in a cut of the loop, and what a resume makes of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loop import Run, Trainer, soon, until_the_end
from prime_io import (
    Episode,
    prepare_resume,
)


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
