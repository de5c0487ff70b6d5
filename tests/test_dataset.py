"""`PayloadDataset` in a DataLoader: forked and spawned workers, order, what cannot be."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest

from loading import FIELDS, Run, check
from prime_io import LineageLeftError, prepare_resume

torch = pytest.importorskip("torch", reason="a dataset of PyTorch: pip install 'prime-io[torch]'")

from torch.utils.data import DataLoader  # noqa: E402

from prime_io import PayloadDataset  # noqa: E402


@pytest.fixture
def run(tmp_path: Path) -> Any:
    made = Run(tmp_path / "run")
    yield made
    made.store.close()


@pytest.mark.parametrize("start_method", [None, "fork", "spawn"])
def test_workers_give_every_micro_batch_in_order(run: Run, start_method: str | None) -> None:
    """However many workers, the trainer sees the same micro-batches in the same order, bytes and all."""
    made: dict[str, Any] = {}
    for step, count in ((1, 3), (2, 1), (3, 4)):
        made |= run.batch(step, [60 - i for i in range(count)])
    run.exchange.say_stop(3)
    dataset = PayloadDataset(run.root, FIELDS, seq_len=64, start=1, lookahead=1)
    workers = 0 if start_method is None else 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads, which later Pythons name
        loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=workers,
            multiprocessing_context=start_method,
            timeout=60 * (workers > 0),
        )
        seen = [(mb.step, mb.index, check(mb, made)) for mb in loader]
    want = [(s, i, [f"t{s}.{i}"]) for s, n in ((1, 3), (2, 1), (3, 4)) for i in range(n)]
    assert seen == want
    assert run.exchange.trained(["trainer"]) is None, "a worker acknowledges nothing"


def test_missing_raises_in_a_dataset(run: Run) -> None:
    """Workers agree with nobody, so they mask nothing by themselves."""
    run.batch(1, [20])
    for file in Path(run.store.root).glob("v0/*"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r"trace t1\.0"):
        next(iter(PayloadDataset(run.root, FIELDS, seq_len=64, start=1)))


def test_a_dataset_is_parameters(run: Run) -> None:
    """It travels to a worker of any kind, and notices there that the run was resumed meanwhile."""
    dataset = pickle.loads(pickle.dumps(PayloadDataset(run.root, FIELDS, seq_len=64, start=1)))
    run.store.close()
    prepare_resume(run.root, None)
    with pytest.raises(LineageLeftError, match="was left"):
        next(iter(dataset))
