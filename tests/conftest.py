"""A started run, its owner's store and a manager that raises, for the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_io import CheckpointManager, PayloadStore, prepare_resume


@pytest.fixture
def run(tmp_path: Path) -> Path:
    prepare_resume(tmp_path / "run", None)
    return tmp_path / "run"


@pytest.fixture
def store(run: Path) -> Iterator[PayloadStore]:
    with PayloadStore(run / "payloads", owner=True) as opened:
        yield opened


@pytest.fixture
def manager(run: Path) -> CheckpointManager:
    return CheckpointManager(run_dir=run, on_save_error="raise")
