"""The exchange directory."""

from __future__ import annotations

import os
from pathlib import Path

from prime_io import (
    Exchange,
    Lineage,
    TrainBatch,
    prepare_resume,
)


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
