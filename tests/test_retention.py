"""Retention: what must stay stays, at every moment."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_io import _native
from prime_io import steps as steps_module
from prime_io.checkpoint import CheckpointManager, CorruptCheckpointError
from prime_io.retention import RetentionReport, choose
from prime_io.steps import Step
from prime_io.store import PayloadStore
from runs import both, payload, resume, save, tell, trainer


def manager(run: Path, keep_last: int = 2, keep_every: int | None = None) -> CheckpointManager:
    return CheckpointManager(run_dir=run, keep_last=keep_last, keep_every=keep_every, on_save_error="raise")


def retain(m: CheckpointManager) -> RetentionReport:
    return asyncio.run(m.apply_retention())


@given(
    st.dictionaries(st.integers(0, 40), st.booleans()),
    st.integers(1, 5),
    st.none() | st.integers(1, 7),
    st.none() | st.integers(0, 40),
)
def test_what_is_chosen(
    made: dict[int, bool], keep_last: int, keep_every: int | None, resumed_from: int | None
) -> None:
    """Promise: keep_last, keep_every, the newest complete, the one resumed from and newer ones stay."""
    steps = {n: Step(n, complete) for n, complete in made.items()}
    doomed = set(choose(steps, keep_last=keep_last, keep_every=keep_every, resumed_from=resumed_from))
    complete = sorted(n for n in made if made[n])
    for n in made:
        stays = (
            not complete
            or n >= complete[-1]
            or n == resumed_from
            or n in complete[-keep_last:]
            or (n in complete and keep_every is not None and n % keep_every == 0)
        )
        assert (n not in doomed) == stays


def test_keep_last_and_keep_every(run: Path, store: PayloadStore) -> None:
    """Promise: complete steps beyond keep_last and keep_every go, with their pins."""
    m = manager(run, keep_last=2, keep_every=4)
    both(m, store, *range(1, 10), segments=[payload(store, 1)])
    assert retain(m).removed == (1, 2, 3, 5, 6, 7)
    assert m.steps() == [4, 8, 9]
    assert sorted(os.listdir(run / "checkpoints")) == ["step_4", "step_8", "step_9"]
    assert retain(m) == RetentionReport()


def test_killed_between_the_halves(run: Path, store: PayloadStore) -> None:
    """keep_last=1 and a death between the orchestrator's and the trainer's half: the step before is there."""
    m = manager(run, keep_last=1)
    both(m, store, 1, 2, segments=[payload(store, 1)])
    save(m, store, 3)
    retain(m)
    assert m.steps() == [2]
    store = resume(run, 2, store)
    m = manager(run, keep_last=1)
    assert m.load(store=store)[0] == {"progress": b"2"}
    trainer(m, 3)
    retain(m)
    assert m.steps() == [2]


def test_incomplete_steps(run: Path, store: PayloadStore) -> None:
    """Promise: incomplete steps go once a newer one is complete, not before."""
    m = manager(run, keep_last=3)
    save(m, store, 1)
    trainer(m, 2)
    assert retain(m).removed == ()
    both(m, store, 3)
    save(m, store, 4)
    assert retain(m).removed == (1, 2)
    assert sorted(os.listdir(run / "checkpoints")) == ["step_3", "step_4"]


def test_ancestors_count_and_the_step_resumed_from_stays(run: Path, store: PayloadStore) -> None:
    """Promise: ancestors count, the step resumed from stays, abandoned/ goes once this life has a step."""
    m = manager(run)
    both(m, store, 1, 2, 3, 4, 5)
    life = m.lineage
    tell(life, last=5)
    store = resume(run, 3, store)
    m = manager(run, keep_last=1)
    report = retain(m)
    assert report == RetentionReport(removed=(1, 2)) and (run / "abandoned").exists()
    save(m, store, 4)
    assert not retain(m).abandoned
    trainer(m, 4)
    assert retain(m).abandoned
    assert not (run / "abandoned").exists() and m.steps() == [3, 4]
    both(m, store, 5, 6)
    assert retain(m).removed == (4, 5)
    assert m.steps() == [3, 6]
    store = resume(run, 6, store)
    m = manager(run, keep_last=1)
    both(m, store, 7)
    assert retain(m).removed == (3,)
    assert m.steps() == [6, 7]


def test_unknown_and_damaged_names_stay(run: Path, store: PayloadStore) -> None:
    """Retention removes nothing that it does not know, nor a step whose manifest is damaged."""
    m = manager(run, keep_last=1)
    both(m, store, 1, 2, 3)
    (run / "checkpoints/step_1/orchestrator/manifest.json").write_bytes(b"{")
    for name in ("best", "step_02", ".keep"):
        (run / "checkpoints" / name).mkdir()
    m = manager(run, keep_last=1)
    assert retain(m).removed == (2,)
    assert sorted(os.listdir(run / "checkpoints")) == [".keep", "best", "step_02", "step_1", "step_3"]


def test_what_cannot_be_read_stops_it(run: Path, store: PayloadStore) -> None:
    """Retention fails closed: a manifest of a newer format stops it before it removes anything."""
    m = manager(run, keep_last=1)
    both(m, store, 1, 2, 3)
    path = run / "checkpoints/step_2/trainer/manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":9'))
    with pytest.raises(ValueError, match="format 9"):
        retain(manager(run, keep_last=1))
    assert sorted(os.listdir(run / "checkpoints")) == ["step_1", "step_2", "step_3"]


def test_killed_while_removing(run: Path, store: PayloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal that is killed, or cannot finish, leaves trash, never half a step; the next one clears it."""
    m = manager(run, keep_last=1)
    both(m, store, 1, 2, 3, segments=[payload(store, 1)])

    def refuse(root: _native.Root, name: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(steps_module, "_unlink", refuse)
        with pytest.raises(KeyboardInterrupt):
            retain(m)
    names = sorted(os.listdir(run / "checkpoints"))
    assert names[0].startswith(".trash-") and names[1:] == ["step_2", "step_3"]
    fresh = manager(run, keep_last=1)
    assert fresh.steps() == [2, 3]
    assert retain(fresh).removed == (2,)
    assert os.listdir(run / "checkpoints") == ["step_3"]


def test_roots_read_beside_retention(run: Path, store: PayloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a step that retention removed while a sweep read its manifest made the sweep, and the run's end, fail."""
    m = CheckpointManager(run_dir=run, keep_last=1, pin="skip", on_save_error="raise")
    old, new = payload(store, 1), payload(store, 2)
    both(m, store, 1, segments=[old])
    both(m, store, 2, segments=[new])
    look = m._steps.look

    def and_then_it_goes() -> dict[int, Step]:
        found = look()
        monkeypatch.undo()
        assert retain(m).removed == (1,)
        return found

    monkeypatch.setattr(m._steps, "look", and_then_it_goes)
    assert m.unpinned_files() == {new.file}
    # One that is there and cannot be read still stops everything.
    path = run / "checkpoints/step_2/orchestrator/manifest.json"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError):
        CheckpointManager(run_dir=run, pin="skip").unpinned_files()
