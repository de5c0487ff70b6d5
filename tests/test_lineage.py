"""Lineages: what a dead life left is never taken for the work of this one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from prime_io import _native
from prime_io import lineage as lineage_module
from prime_io import steps as steps_module
from prime_io.checkpoint import CheckpointManager, LineageLeftError
from prime_io.lineage import Lineage, Link, prepare_resume
from prime_io.store import PayloadStore
from runs import both, payload, save, straggle, tell, tree


def test_a_resume_waits_for_nobody_who_still_owns_the_store(tmp_path: Path) -> None:
    """Bug: an old orchestrator that woke up later deleted the step that the new life was resumed from."""
    prepare_resume(tmp_path, None)
    with PayloadStore(tmp_path / "payloads", owner=True), pytest.raises(BlockingIOError, match="owns"):
        prepare_resume(tmp_path, None)
    prepare_resume(tmp_path, None)


def test_visible_through_a_chain() -> None:
    """Promise: visible = this life, or an ancestor at a step no later than any at which it was left."""
    chain = (Link("a", None), Link("b", 9), Link("c", 4), Link("d", 7))
    life = Lineage(Path("run"), chain)
    assert life.visible("d", 1_000_000)
    assert [s for s in range(12) if life.visible("c", s)] == list(range(8))
    assert [s for s in range(12) if life.visible("b", s)] == list(range(5))
    assert [s for s in range(12) if life.visible("a", s)] == list(range(5))
    assert not life.visible("x", 0)
    assert life.id == "d" and life.resumed_from == 7


def test_start_and_load(tmp_path: Path) -> None:
    """Rule 10: a start writes LINEAGE, which every other process reads."""
    run = tmp_path / "run"
    begun = prepare_resume(run, None)
    read = Lineage.load(run)
    assert read.chain == begun.chain == (Link(begun.id, None),)
    assert read.batches_dir == run / "lineages" / begun.id / "batches"
    assert read.weights_dir == run / "lineages" / begun.id / "weights"
    assert read.acks_dir == run / "lineages" / begun.id / "acks"
    assert json.loads((run / "LINEAGE").read_text())["format"] == 1


def test_a_late_process_does_not_join_another_life(tmp_path: Path) -> None:
    """Bug: a trainer that started late joined the newest lineage, whatever life it was launched for."""
    first = prepare_resume(tmp_path, None)
    assert Lineage.load(tmp_path, expected=first.id).id == first.id
    second = prepare_resume(tmp_path, None)
    with pytest.raises(LineageLeftError, match=f"in lineage {second.id}, .* launched for {first.id}"):
        Lineage.load(tmp_path, expected=first.id)
    assert Lineage.load(tmp_path, expected=second.id).id == second.id


def test_load_without_a_start(tmp_path: Path) -> None:
    """Lineage.load says how to start a run that has none."""
    with pytest.raises(FileNotFoundError, match="prepare_resume"):
        Lineage.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="prepare_resume"):
        prepare_resume(tmp_path, 3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "torn"),
        ('{"format": 1, "chain"', "torn"),
        ('{"format": 2, "lives": 3}', "format 2"),
        ('{"format": 1, "chain": []}', "chain"),
        ('{"format": 1}', "torn or edited .*chain"),
        ('{"format": 1, "chain": [], "more": ' + "[" * 200_000, "torn"),
        ('{"format": 1, "chain": [{"id": "a", "resumed_at": 3}]}', "chain"),
        ('{"format": 1, "chain": [{"id": "../a", "resumed_at": null}]}', "chain"),
        (
            '{"format": 1, "chain": [{"id": "a", "resumed_at": null}, {"id": "a", "resumed_at": 1}]}',
            "chain",
        ),
    ],
)
def test_a_bad_lineage_file_is_named(tmp_path: Path, text: str, why: str) -> None:
    """A torn, edited or newer LINEAGE is an error that names it, never a fresh start."""
    (tmp_path / "LINEAGE").write_text(text)
    for step in (None, 1):
        with pytest.raises(ValueError, match=why) as error:
            prepare_resume(tmp_path, step)
        assert str(tmp_path / "LINEAGE") in str(error.value)


@pytest.fixture
def store(tmp_path: Path) -> PayloadStore:
    return PayloadStore(tmp_path / "run" / "payloads")


def manager(run: Path, **options: object) -> CheckpointManager:
    return CheckpointManager(run_dir=run, on_save_error="raise", **options)  # type: ignore[arg-type]


def test_resume_is_never_led_astray_by_the_dead_run(tmp_path: Path, store: PayloadStore) -> None:
    """Rule 10: resume at 5 with all of the dead run up to 15 in place, die at 7: 5 or 7 of the right life."""
    run = tmp_path / "run"
    first = prepare_resume(run, None)
    old = manager(run)
    both(old, store, 5, 10, 15)
    save(old, store, 16)
    tell(first, last=15)
    stray = tmp_path / "stray"
    stray.mkdir()
    (stray / "x").write_bytes(b"late")

    second = prepare_resume(run, 5)
    new = manager(run)
    assert new.latest() == 5 and new.steps() == [5]
    # A straggler of the dead life publishes after the resume.
    with pytest.raises(LineageLeftError, match="must end"):
        old.commit_component(15, "trainer", stray)
    straggle(old)
    old.commit_component(15, "trainer", stray)
    tell(first, last=15)
    assert not second.batches_dir.exists() and not second.weights_dir.exists()
    assert new.latest() == 5
    save(new, store, 7)

    third = prepare_resume(run, 5)
    assert third.chain == (Link(first.id, None), Link(second.id, 5), Link(third.id, 5))
    last = manager(run)
    assert last.steps() == [5]
    both(last, store, 7)
    assert last.steps() == [5, 7]
    assert last.load(store=store)[1].lineage == third.id
    assert tree(run / "abandoned" / first.id) >= {
        "checkpoints/step_10/trainer/rank_0.bin",
        "checkpoints/step_15/trainer/rank_0.bin",
        "checkpoints/step_16/orchestrator/state.msgpack",
        "batches/step_15",
        "weights/v5",
        "acks/step_1.rank0",
    }
    assert (run / "abandoned" / second.id / "checkpoints/step_7/orchestrator/state.msgpack").is_file()


def test_an_old_life_that_goes_on_is_stopped(tmp_path: Path, store: PayloadStore) -> None:
    """Rule 10: a process of a life that was left cannot save, and its retention removes nothing."""
    run = tmp_path / "run"
    prepare_resume(run, None)
    old = manager(run, keep_last=1)
    both(old, store, 1, 2)
    prepare_resume(run, 2)
    new = manager(run)
    both(new, store, 3)
    with pytest.raises(LineageLeftError, match="must end"):
        save(old, store, 4)
    assert asyncio.run(old.apply_retention()).removed == ()
    assert new.steps() == [1, 2, 3]


def test_a_resume_step_must_be_complete_and_visible(tmp_path: Path, store: PayloadStore) -> None:
    """Rule 10: a resume at a step that is not complete lists those that are, and changes nothing."""
    run = tmp_path / "run"
    first = prepare_resume(run, None)
    with pytest.raises(ValueError, match="no complete step"):
        prepare_resume(run, 1)
    old = manager(run)
    both(old, store, 2, 4)
    save(old, store, 6)
    before = tree(run)
    for step in (1, 3, 6, 7):
        with pytest.raises(ValueError, match=r"\[2, 4\]"):
            prepare_resume(run, step)
    assert tree(run) == before and Lineage.load(run).id == first.id


def test_a_run_with_checkpoints_is_not_started_anew(tmp_path: Path, store: PayloadStore) -> None:
    """prepare_resume(run, None): never over complete steps; fine where no step was ever completed."""
    run = tmp_path / "run"
    first = prepare_resume(run, None)
    save(manager(run), store, 3)
    tell(first, last=3)
    second = prepare_resume(run, None)
    assert second.chain == (Link(second.id, None),)
    assert not second.visible(first.id, 1)
    assert (run / "abandoned" / first.id / "checkpoints/step_3/orchestrator/manifest.json").is_file()
    both(manager(run), store, 3)
    with pytest.raises(FileExistsError, match=r"prepare_resume\(run, 3\)"):
        prepare_resume(run, None)
    (run / "LINEAGE").unlink()
    with pytest.raises(FileExistsError, match="no LINEAGE"):
        prepare_resume(run, None)


def test_a_damaged_checkpoint_is_no_reason_to_start_anew(tmp_path: Path, store: PayloadStore) -> None:
    """prepare_resume(run, None): a damaged only step is told, not taken for a run without steps."""
    run = tmp_path / "run"
    prepare_resume(run, None)
    both(manager(run), store, 3)
    path = run / "checkpoints/step_3/orchestrator/manifest.json"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileExistsError, match=r"step_3/orchestrator/manifest\.json"):
        prepare_resume(run, None)


def test_what_is_not_ours_stays(tmp_path: Path, store: PayloadStore) -> None:
    """A resume moves nothing that it does not know, and never touches payloads."""
    run = tmp_path / "run"
    prepare_resume(run, None)
    old = manager(run)
    both(old, store, 1, 2, segments=[payload(store, 1)])
    strange = ["checkpoints/notes/a", "checkpoints/step_007/a", "checkpoints/step_1/mine/a", "lineages/.x/a"]
    for name in strange:
        (run / name).parent.mkdir(parents=True)
        (run / name).write_text("mine")
    kept = tree(run / "payloads")
    prepare_resume(run, 1)
    assert all((run / name).is_file() for name in strange)
    assert tree(run / "payloads") == kept


def test_predicates_decide_for_frameworks(tmp_path: Path, store: PayloadStore) -> None:
    """A component of a framework's own format is complete when its predicate says so."""
    run = tmp_path / "run"
    components = {"orchestrator": None, "trainer": lambda path: (path / "DONE").is_file()}
    prepare_resume(run, None, components=components)
    m = manager(run, components=components)
    save(m, store, 1)
    save(m, store, 2)
    assert m.latest() is None
    (run / "checkpoints/step_1/trainer").mkdir()
    assert m.latest() is None
    (run / "checkpoints/step_1/trainer/DONE").touch()
    assert m.steps() == [1]
    with pytest.raises(ValueError, match=r"\[1\]"):
        prepare_resume(run, 2, components=components)
    prepare_resume(run, 1, components=components)
    assert manager(run, components=components).steps() == [1]
    assert not (run / "checkpoints/step_2").exists()


class _Killed(BaseException):
    pass


def _killing(monkeypatch: pytest.MonkeyPatch, at: int, *, after: bool) -> Callable[[], int]:
    """Die at the `at`-th change that a resume makes on disk, before or just after it."""
    count = 0

    class Dying:
        def __init__(self, path: str, *, create: bool = False) -> None:
            self._root = _native.Root(path, create=create)

        def __getattr__(self, name: str) -> object:
            call = getattr(self._root, name)
            if name not in ("write", "rename"):
                return call

            def step(*args: object, **more: object) -> None:
                nonlocal count
                count += 1
                if count == at and not after:
                    raise _Killed
                call(*args, **more)
                if count == at:
                    raise _Killed

            return step

    class Shim:
        Root = Dying

        def __getattr__(self, name: str) -> object:
            return getattr(_native, name)

    for module in (lineage_module, steps_module):
        monkeypatch.setattr(module, "_native", Shim())
    return lambda: count


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", [None, 2])
def test_killed_at_any_moment_of_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int | None, after: bool
) -> None:
    """Rule 10: a resume killed at any change on disk leaves a right state, and runs again."""
    at = 0
    while True:
        at += 1
        run = tmp_path / f"run{at}"
        store = PayloadStore(run / "payloads")
        lineages = [prepare_resume(run, None)]
        m = manager(run)
        both(m, store, *([1, 2, 3] if step is not None else []), segments=[payload(store, 7)])
        save(m, store, 4)
        (run / "checkpoints" / _native.temporary_name()).mkdir()
        tell(lineages[0], last=4)
        contents = sum(1 for _ in run.rglob("*") if _.is_file())

        with monkeypatch.context() as patch:
            count = _killing(patch, at, after=after)
            try:
                prepare_resume(run, step)
            except _Killed:
                died = True
            else:
                died = False
        # Whatever was reached, no process that starts now sees a step newer than the one resumed from, once
        # the new lineage is there; and before it is, nothing has changed.
        wanted = [1, 2] if step is not None else []
        seen = manager(run).steps()
        if Lineage.load(run).id == lineages[0].id:
            assert seen == ([1, 2, 3] if step is not None else [])
        else:
            assert seen == wanted
        assert sum(1 for _ in run.rglob("*") if _.is_file()) == contents

        last = prepare_resume(run, step)
        assert manager(run).steps() == wanted
        assert last.resumed_from == step
        left = {path.name for path in (run / "checkpoints").iterdir()}
        assert left == {f"step_{n}" for n in wanted}
        assert not tree(run / "lineages")
        assert sum(1 for _ in run.rglob("*") if _.is_file()) == contents
        store.close()
        if not died:
            assert count() < at
            break
    assert at > 4


def test_a_resume_moves_temporaries_of_dead_processes(tmp_path: Path) -> None:
    """Bug: what killed writers left in the run directory and in their lineage's stayed for ever."""
    run = tmp_path / "run"
    first = prepare_resume(run, None)
    manager = CheckpointManager(run_dir=run)
    with PayloadStore(run / "payloads", owner=True) as store:
        both(manager, store, 1)
    unfinished = manager.new_component_dir()
    (unfinished / "model").write_bytes(b"w")
    message = first.directory / _native.temporary_name()
    message.parent.mkdir(parents=True, exist_ok=True)
    message.write_bytes(b"half a word")
    foreign = run / ".tmp-notes"
    foreign.write_bytes(b"mine")

    prepare_resume(run, 1)
    assert not unfinished.exists() and not message.exists()
    moved = {path.name for path in (run / "abandoned").rglob("*")}
    assert {unfinished.name[1:], message.name[1:]} <= moved
    assert foreign.exists()


def test_a_straggler_at_work_does_not_fail_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a temporary that its writer renamed between the look and the move made prepare_resume raise ENOENT."""
    run = tmp_path / "run"
    first = prepare_resume(run, None)
    with PayloadStore(run / "payloads", owner=True) as store:
        both(CheckpointManager(run_dir=run), store, 1)
    message = first.directory / _native.temporary_name()
    message.parent.mkdir(parents=True, exist_ok=True)
    message.write_bytes(b"a word")
    really = lineage_module.set_aside

    def finished_first(root: _native.Root, source: str, **where: str) -> str:
        if source.endswith(message.name):
            message.rename(message.with_name("word"))
        return really(root, source, **where)

    monkeypatch.setattr(lineage_module, "set_aside", finished_first)
    assert prepare_resume(run, 1).resumed_from == 1
