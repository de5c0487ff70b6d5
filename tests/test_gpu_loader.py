"""`benches/gpu_loader.py`: its flow and its checks, where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the loader makes tensors: pip install 'prime-io[torch]'")

BENCHES = Path(__file__).parents[1] / "benches"


def test_it_runs_and_checks_itself_without_a_gpu() -> None:
    """Main job: the script runs to its end on the CPU, compares every tensor, and claims no figure of a GPU."""
    done = subprocess.run(
        [sys.executable, str(BENCHES / "gpu_loader.py"), "--short"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("No CUDA device")
    table = [line for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert len(table) == 7 and all("not run: needs a GPU |  |  |" in line for line in table)
    assert done.stdout.count("\n- ") == done.stdout.count(" micro-batches of ") == 6


def spoil(name: str) -> Callable[[Any], Any]:
    """What changes the last item of a tensor of a micro-batch."""

    def change(mb: Any) -> None:
        rows = mb.payload["routed_experts"]
        tensor = {"routed_experts": rows.rows, "valid": rows.valid}.get(name)
        tensor = mb.columns.get(name, getattr(mb, name, None)) if tensor is None else tensor
        last = tensor.reshape(-1)[-1:]
        last.copy_(~last if last.dtype == torch.bool else last + 1)

    return change


@pytest.mark.parametrize(
    "name",
    [
        *("token_ids", "mask", "logprobs", "advantages", "temperatures"),
        *("routed_experts", "valid", "position_ids", "cu_seqlens"),
    ],
)
def test_its_check_sees_one_wrong_item(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that passes whatever came would let a wrong copy pass on the one machine that can show it."""
    monkeypatch.syspath_prepend(BENCHES)
    from training import Checker, Run

    run = Run(tmp_path / "run", steps=1, sequences=2, seq_len=1_024)
    checker = Checker(run, torch.device("cpu"))
    with run.loader() as loader:
        for step in loader:
            for i, micro_batch in enumerate(step):
                if i == 1:
                    spoil(name)(micro_batch)
                checker.add(micro_batch)
            loader.done(step.number)
    with pytest.raises(AssertionError, match=f"'{name}': 1[,}}]"):
        checker.finish()
    run.close()
