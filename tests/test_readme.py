"""The README's examples run as they stand: a worker, an orchestrator and a trainer train a few steps together."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np

from prime_io import CheckpointManager, Episode, Rollout

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_of_the_readme_run(tmp_path: Path) -> None:
    """README: the three sides, pasted, train to the last step, resume from it and go on."""
    start, worker, orchestrator, trainer = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    seen: list[tuple[int, bool]] = []
    loaded: list[bytes] = []

    def life(max_steps: int, *, resumed_from: int | None) -> None:
        sides: dict[str, Any] = {"run": tmp_path}
        exec(start, sides)
        assert sides["begin"](tmp_path).resumed_from == resumed_from
        for source in (worker, orchestrator, trainer):
            exec(source, sides)

        async def run_episode(rollout: Rollout) -> Episode:
            tokens, rows = np.arange(9, dtype=np.int32), np.full((8, 2, 2), 3, np.uint8)
            episode: Episode = await asyncio.to_thread(
                sides["finish"], rollout, rollout.dispatch_version, tokens, tokens > 3,
                np.zeros(9, np.float32), rows, float(rollout.member % 2),
            )  # fmt: skip
            return episode

        def learn(micro_batch: Any) -> None:
            # 16 samples of 9 tokens and 8 rows each: the last token of a sample has none.
            rows, valid, _ = micro_batch.payload["routed_experts"]
            assert valid.sum() == 16 * 8 and len(micro_batch.token_ids) == 16 * 9
            seen.append((int(rows[valid].min()), bool((rows[valid] == 3).all())))

        def save(directory: Path) -> Path:
            (directory / "model").write_bytes(b"weights")
            return directory

        def load(directory: Path) -> None:
            loaded.append((directory / "model").read_bytes())

        async def both() -> None:
            await asyncio.gather(
                sides["orchestrate"](tmp_path, run_episode, ["a", "b", "c"], max_steps),
                asyncio.to_thread(sides["train"], tmp_path, learn, lambda: {"w": b"w"}, save, load),
            )

        asyncio.run(both())

    life(3, resumed_from=None)
    assert CheckpointManager(run_dir=tmp_path).latest() == 3
    life(5, resumed_from=3)
    assert loaded == [b"weights"]
    assert set(seen) == {(3, True)}
    assert CheckpointManager(run_dir=tmp_path).latest() == 5
