"""`PayloadLoader` on four ranks, as processes with a gloo group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loading import EXPERTS, Run
from ranked import die, interrupted, lose_during_the_step, lose_step, run_ranks, train

pytest.importorskip("torch", reason="ranks meet in torch.distributed: pip install 'prime-io[torch]'")

LENGTHS = [40, 30, 60, 12, 50, 40, 20]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run")
    yield made
    made.store.close()


def files_of(run: Run, step: int, trace: str) -> list[Path]:
    batch = run.exchange.read_batch(step)
    assert batch is not None
    [queued] = [t for t in batch.traces if t.trace_id == trace]
    return [Path(run.store.root) / s.file for s in queued.samples[0].payload if s.field == EXPERTS]


@pytest.mark.parametrize("split", [(4, 1), (2, 2), (1, 2)])
def test_ranks_train_every_row_once_and_mask_alike(run: Run, tmp_path: Path, split: tuple[int, int]) -> None:
    """Any split into data, context and tensor parallel ranks: all rows once, equal counts, the same samples masked.

    Then a swap with a file of equal size raises on all ranks at one micro-batch, and one acknowledgement a step.
    """
    for step in (1, 2, 3):
        run.batch(step, LENGTHS)
    files_of(run, 2, "t2.2")[0].unlink()
    with files_of(run, 2, "t2.4")[1].open("r+b") as file:
        file.truncate(4097)
    one, two = files_of(run, 3, "t3.0")[0], files_of(run, 3, "t3.5")[0]
    assert one.stat().st_size == two.stat().st_size
    two.write_bytes(one.read_bytes())
    dp, _ = split
    said = run_ranks(train, 4, run.root, tmp_path / "out", split=split, start=1, lengths=LENGTHS)
    for step, masked in ((1, []), (2, ["t2.2", "t2.4"])):
        heads = [s for rank in said for s in rank if s[0] == "step" and s[1] == step]
        assert len(heads) == 4 and all(head == heads[0] for head in heads) and heads[0][3] == masked
        rows: dict[str, int] = {}
        for rank in said:
            mine = [s for s in rank if s[0] == step]
            assert [s[1] for s in mine] == list(range(heads[0][2]))
            for _, _, names, lo, hi, hidden in mine:
                assert hi > lo and set(hidden) == set(masked) & set(names)
                for name in names:
                    rows[name] = rows.get(name, 0) + 1
        # Each trace is in the windows of all its context- and tensor-parallel ranks, and nowhere else.
        assert rows == {f"t{step}.{i}": 4 // dp for i in range(len(LENGTHS))}
    ends = [rank[-1] for rank in said]
    assert all(end == ends[0] for end in ends) and ends[0][0] == "CorruptPayloadError", ends
    assert (
        f"trace t3.5, field '{EXPERTS}'" in ends[0][1] and two.name in ends[0][1] and ", rank " in ends[0][1]
    )
    assert sorted(os.listdir(run.lineage.acks_dir)) == ["step_1.trainer", "step_2.trainer"]


def test_a_file_lost_during_the_step_raises_on_all(run: Run, tmp_path: Path) -> None:
    """A read that fails on one rank ends all of them at the same micro-batch, with the same words."""
    run.batch(1, [60] * 16)
    files = [str(f) for i in range(16) for f in files_of(run, 1, f"t1.{i}")]
    # Rank 0 has read two more by the time it deletes; a later one is lost on whichever rank comes to it first.
    said = run_ranks(lose_during_the_step, 4, run.root, tmp_path / "out", split=(4, 1), start=1, files=files)
    ends = [rank[-1] for rank in said]
    assert all(end == ends[0] for end in ends) and ends[0][0] == "FileNotFoundError", ends
    assert all(len(rank) == len(said[0]) < 5 for rank in said)


@pytest.mark.parametrize(("how", "error"), [("kill", "ConnectionError"), ("hang", "TimeoutError")])
def test_a_dead_rank_is_an_error(run: Run, tmp_path: Path, how: str, error: str) -> None:
    """A rank that is killed, or hangs, stops the others within the timeout, with the step and a reason."""
    run.batch(1, [60] * 16)
    said = run_ranks(
        die, 4, run.root, tmp_path / "out", timeout_s=30, split=(4, 1), start=1, how=how, gloo_s=3
    )
    assert said[3] == [[0]]
    for rank in said[:3]:
        assert rank[-1][0] == error and "step 1, micro-batch 1" in rank[-1][1], rank


def test_ctrl_c_gets_through_a_wait_for_others(run: Run, tmp_path: Path) -> None:
    """A rank that waits for a hanging one can be told to stop long before the timeout."""
    run.batch(1, [60] * 8)
    said = run_ranks(interrupted, 2, run.root, tmp_path / "out", split=(2, 1), start=1, gloo_s=5)
    assert said == [["interrupted", "ok"], ["ok"]]


def test_another_world_size_goes_on(run: Run, tmp_path: Path) -> None:
    """State is the step: four ranks train two steps, three others the next, each trace once."""
    for step in (1, 2):
        run.batch(step, LENGTHS)
    run.exchange.say_stop(2)
    options = {"split": (4, 1), "lengths": LENGTHS}
    said = run_ranks(train, 4, run.root, tmp_path / "four", start=1, **options)
    assert all(rank[-1] == "ok" for rank in said)
    run.batch(3, LENGTHS)
    run.exchange.say_stop(3)
    more = run_ranks(train, 3, run.root, tmp_path / "three", start=3, **(options | {"split": (3, 1)}))
    assert all(rank[-1] == "ok" for rank in more)
    seen = [name for rank in (*said, *more) for s in rank if isinstance(s[0], int) for name in s[2]]
    assert sorted(seen) == sorted(f"t{step}.{i}" for step in (1, 2, 3) for i in range(len(LENGTHS)))
    assert run.exchange.trained(["trainer"]) == 3


def test_ranks_that_differ_are_told(run: Run, tmp_path: Path) -> None:
    """Ranks that would read different things, or are at different places, are errors and not hangs."""
    run.batch(1, [60] * 8)
    options: dict[str, Any] = {"lengths": [60] * 8, "split": (2, 1)}
    said = run_ranks(train, 2, run.root, tmp_path / "starts", start=[1, 2], **options)
    assert all(rank[-1][0] == "ValueError" and "made alike" in rank[-1][1] for rank in said), said
    said = run_ranks(lose_step, 2, run.root, tmp_path / "places", start=1, **options)
    for rank in said:
        assert rank[-1][0] == "RuntimeError" and "is in step 1" in rank[-1][1], rank
    said = run_ranks(train, 3, run.root, tmp_path / "grid", start=1, **(options | {"split": (2, 1)}))
    assert {rank[-1][0] for rank in said} == {"ValueError"} and "grid" in said[0][-1][1]
