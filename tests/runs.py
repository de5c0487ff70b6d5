"""Small runs for the tests of lineages and checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prime_io.checkpoint import CheckpointManager, SaveReport, Snapshot
from prime_io.lineage import Lineage, prepare_resume
from prime_io.segment import PayloadSegment
from prime_io.store import PayloadStore


def payload(store: PayloadStore, value: int, *, version: int = 0, rows: int = 8) -> PayloadSegment:
    """One payload file with one field."""
    return store.write({"experts": np.full((rows, 4), value, np.uint8)}, version=version)["experts"]


def resume(run: Path, step: int, store: PayloadStore) -> PayloadStore:
    """Resume as a new process would: the old owner is gone, and the store opened again."""
    store.close()
    prepare_resume(run, step)
    return PayloadStore(run / "payloads", owner=True)


def save(
    manager: CheckpointManager,
    store: PayloadStore,
    step: int,
    segments: Sequence[PayloadSegment] = (),
    *,
    spills: Sequence[PayloadSegment] = (),
    state: Mapping[str, bytes] | None = None,
) -> SaveReport | None:
    """The orchestrator's half of a step."""
    state = {"progress": b"%d" % step} if state is None else state
    return asyncio.run(manager.save(Snapshot(step, state, segments, spills), store=store))


def trainer(manager: CheckpointManager, step: int, data: bytes = b"weights") -> Path:
    """The trainer's half of a step."""
    made = manager.run_dir / f"shards_{step}"
    made.mkdir()
    (made / "rank_0.bin").write_bytes(data)
    return manager.commit_component(step, "trainer", made)


def straggle(manager: CheckpointManager) -> None:
    """Make a process of a dead life that looked at LINEAGE just before the resume replaced it."""
    manager.lineage.is_current = lambda: True  # type: ignore[method-assign]


def both(manager: CheckpointManager, store: PayloadStore, *steps: int, **more: Any) -> None:
    """Complete steps."""
    for step in steps:
        save(manager, store, step, **more)
        trainer(manager, step)


def tell(lineage: Lineage, *, last: int) -> None:
    """The batches, weights and acknowledgements of a life up to step `last`."""
    for step in range(1, last + 1):
        for path in (
            lineage.batches_dir / f"step_{step}",
            lineage.weights_dir / f"v{step}",
            lineage.acks_dir / f"step_{step}.rank0",
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")


def tree(directory: Path) -> set[str]:
    """Every file below `directory`."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
