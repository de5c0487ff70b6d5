"""Checkpoints: what is loaded is what was saved, or an error that names the file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from prime_io import _native
from prime_io.checkpoint import CheckpointManager, CorruptCheckpointError
from prime_io.lineage import prepare_resume
from prime_io.manifest import Manifest, Pin, seal, unseal
from prime_io.restore import saved_progress, sink_state
from prime_io.store import PayloadStore
from runs import both, payload, resume, save, straggle, trainer, tree


def test_round_trip(manager: CheckpointManager, store: PayloadStore) -> None:
    """Promise: a complete step gives back its state parts and names its pins and the missing."""
    kept, gone = payload(store, 1), payload(store, 2)
    store.reclaim([gone.file])
    report = save(manager, store, 3, [kept, gone, kept], state={"a": b"1", "b": b""})
    assert report is not None
    assert (report.step, report.pinned, report.copied, report.missing) == (3, 1, 0, (gone.file,))
    assert manager.latest() is None
    with pytest.raises(FileNotFoundError, match="no complete step"):
        manager.load(store=store)
    trainer(manager, 3)
    state, pins = manager.load(store=store)
    assert state == {"a": b"1", "b": b""}
    assert (pins.step, pins.files, pins.missing) == (3, (kept.file,), (gone.file,))
    assert manager.component_path(3, "trainer", verify=True).joinpath("rank_0.bin").read_bytes() == b"weights"


def test_pins_outlive_the_payloads(manager: CheckpointManager, store: PayloadStore) -> None:
    """Rule 3: payloads that were trained and reclaimed after the cut come back from their pins."""
    segments = [payload(store, n, version=n) for n in range(5)]
    both(manager, store, 1, segments=segments)
    store.reclaim([s.file for s in segments[:3]])
    _, pins = manager.load(store=store)
    answers = pins.link_back([s.file for s in segments] + ["v0/no.safetensors"])
    assert [answers[s.file] for s in segments] == ["linked"] * 3 + ["present"] * 2
    assert isinstance(answers["v0/no.safetensors"], FileNotFoundError)
    for n, segment in enumerate(segments):
        assert np.array_equal(store.read(segment, verify=True), np.full((8, 4), n, np.uint8))
    # The trainer may consume them again: the pins stay.
    store.reclaim([s.file for s in segments])
    assert set(pins.link_back([s.file for s in segments]).values()) == {"linked"}


def test_a_bad_pin_is_an_answer_for_its_file(manager: CheckpointManager, store: PayloadStore) -> None:
    """Rule 3: a pin that is short, of other content or gone is reported for that file alone."""
    segments = [payload(store, n) for n in range(4)]
    both(manager, store, 1, segments=segments)
    store.reclaim([s.file for s in segments])
    held = manager.component_path(1, "orchestrator") / "payloads"
    short, other, gone, good = (s.file for s in segments)
    os.truncate(held / short, (held / short).stat().st_size - 1)
    other_segment = payload(store, 99)
    os.unlink(held / other)
    os.link(Path(store.root) / other_segment.file, held / other)
    os.unlink(held / gone)
    answers = manager.load(store=store)[1].link_back([short, other, gone, good])
    assert isinstance(answers[short], _native.CorruptPayloadError)
    assert isinstance(answers[other], _native.CorruptPayloadError)
    assert isinstance(answers[gone], FileNotFoundError)
    assert answers[good] == "linked"
    assert not any((Path(store.root) / file).exists() for file in (short, other, gone))


def test_a_checkpoint_without_pins_loads(run: Path, store: PayloadStore) -> None:
    """Bug: a checkpoint with no pin at all (nothing queued, or pin="skip") could not be resumed from."""
    m = CheckpointManager(run_dir=run, pin="skip", on_save_error="raise")
    there, gone = payload(store, 1), payload(store, 2)
    both(m, store, 1)
    both(m, store, 2, segments=[there, gone])
    assert not (m.component_path(2, "orchestrator") / "payloads").exists()
    assert m.load(1, store=store)[1].link_back([]) == {}
    store.reclaim([gone.file])
    answers = m.load(2, store=store)[1].link_back([there.file, gone.file])
    assert answers[there.file] == "present"
    assert isinstance(answers[gone.file], FileNotFoundError)


def test_something_else_under_the_name_is_replaced(manager: CheckpointManager, store: PayloadStore) -> None:
    """Rule 3: what is there but is not the pinned payload is replaced by the pin."""
    segment = payload(store, 1)
    both(manager, store, 1, segments=[segment])
    path = Path(store.root) / segment.file
    path.unlink()
    path.write_bytes(b"something else")
    assert manager.load(store=store)[1].link_back([segment.file]) == {segment.file: "replaced"}
    assert store.read(segment, verify=True)[0, 0] == 1


@pytest.mark.parametrize("name", ["orchestrator/state.msgpack", "orchestrator/manifest.json"])
@pytest.mark.parametrize(
    "damage", ["flip first", "flip middle", "flip last", "cut", "longer", "empty", "gone"]
)
def test_damage_is_an_error_that_names_the_file(
    manager: CheckpointManager, store: PayloadStore, name: str, damage: str
) -> None:
    """Promise: a torn, edited or missing state file or manifest is an error that names it."""
    both(manager, store, 1, 2, segments=[payload(store, 1)])
    path = manager.run_dir / "checkpoints/step_2" / name
    data = bytearray(path.read_bytes())
    if damage.startswith("flip"):
        at = {"first": 0, "middle": len(data) // 2, "last": len(data) - 1}[damage.split()[1]]
        data[at] ^= 1
    path.unlink()
    if damage != "gone":
        body = {"cut": data[:-1], "longer": data + b"x", "empty": b""}.get(damage, data)
        path.write_bytes(body)
    fresh = CheckpointManager(run_dir=manager.run_dir)
    with pytest.raises(CorruptCheckpointError) as error:
        fresh.load(2, store=store)
    assert str(path) in str(error.value)
    assert fresh.load(1, store=store)[0] == {"progress": b"1"}


def test_every_edited_byte_of_a_manifest_is_seen(manager: CheckpointManager, store: PayloadStore) -> None:
    """A manifest with any one byte changed is refused: its numbers and names are never half right."""
    both(manager, store, 1, segments=[payload(store, 1)])
    data = (manager.run_dir / "checkpoints/step_1/orchestrator/manifest.json").read_bytes()
    assert unseal(data, "m", kind=Manifest).step == 1
    for at in range(len(data)):
        for flip in (1, 32, 128):
            edited = bytearray(data)
            edited[at] ^= flip
            with pytest.raises(ValueError, match="m: "):
                unseal(bytes(edited), "m", kind=Manifest)


@pytest.mark.parametrize("where", ["before the seal", "sealed"])
def test_a_deeply_nested_manifest_is_damaged(
    manager: CheckpointManager, store: PayloadStore, where: str
) -> None:
    """Bug: a deeply nested manifest ended a resume with a RecursionError that named no file."""
    both(manager, store, 1)
    path = manager.run_dir / "checkpoints/step_1/orchestrator/manifest.json"
    good = path.read_bytes()
    deep = b"[" * 200_000
    if where == "sealed":
        body = good[: good.index(b',"files"')] + b',"pins":{"v0/x":{"more":' + deep + b"]" * 200_000 + b"}}"
        path.write_bytes(body + b',"xxh3":"' + _native.xxh3(body).encode() + b'"}\n')
    else:
        path.write_bytes(b'{"more":' + deep)
    fresh = CheckpointManager(run_dir=manager.run_dir)
    assert fresh.latest() == (1 if where == "sealed" else None)
    with pytest.raises(CorruptCheckpointError, match="not a manifest") as error:
        fresh.load(1, store=store)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("part", ["progress", "sink", "queue"])
@pytest.mark.parametrize("blob", [b"\x91" * 200_000 + b"\xc0", b"\xc1", b""])
def test_a_part_that_is_something_else_is_a_sentence(part: str, blob: bytes) -> None:
    """Bug: a part of the state that is torn or deeply nested was a bare msgspec error, or a RecursionError."""
    parts = {"progress": b"\x80", "source": b"", "sink": b"\x80", "queue": b"\x90", part: blob}
    with pytest.raises(ValueError, match=f"checkpoint 3: its '{part}' state .*resume from another step"):
        sink_state(parts, step=3)
        saved_progress(parts, step=3)


def test_a_damaged_newest_step_is_told(
    manager: CheckpointManager, store: PayloadStore, caplog: pytest.LogCaptureFixture
) -> None:
    """latest() falls back to the newest undamaged step and says why, naming the file."""
    both(manager, store, 1, 2)
    path = manager.run_dir / "checkpoints/step_2/trainer/manifest.json"
    path.write_bytes(path.read_bytes()[:-4])
    fresh = CheckpointManager(run_dir=manager.run_dir)
    assert fresh.latest() == 1
    assert str(path) in caplog.text


def test_a_newer_format_is_not_skipped(manager: CheckpointManager, store: PayloadStore) -> None:
    """A checkpoint of a newer format is a sentence to act on, not a step that is silently not there."""
    both(manager, store, 1, 2)
    path = manager.run_dir / "checkpoints/step_2/orchestrator/manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2'))
    fresh = CheckpointManager(run_dir=manager.run_dir)
    for read in (fresh.latest, lambda: fresh.load(store=store)):
        with pytest.raises(ValueError, match=r"format 2.*reads format 1.*newer"):
            read()


def test_a_step_copied_under_another_number_is_refused(
    manager: CheckpointManager, store: PayloadStore
) -> None:
    """A manifest of another step is not taken for this one's."""
    both(manager, store, 1)
    os.rename(manager.run_dir / "checkpoints/step_1", manager.run_dir / "checkpoints/step_9")
    fresh = CheckpointManager(run_dir=manager.run_dir)
    assert fresh.latest() is None
    with pytest.raises(CorruptCheckpointError, match="it is of step 1"):
        fresh.load(9, store=store)


def test_load_a_step_that_is_not_there(manager: CheckpointManager, store: PayloadStore) -> None:
    """A step that is not complete lists those that are."""
    both(manager, store, 1, 2)
    save(manager, store, 3)
    for step in (3, 4):
        with pytest.raises(ValueError, match=r"\[1, 2\]"):
            manager.load(step, store=store)


def test_only_a_newer_complete_step_is_the_latest(manager: CheckpointManager, store: PayloadStore) -> None:
    """Promise: with one component committed, by whichever side, a step does not count."""
    both(manager, store, 1)
    save(manager, store, 2)
    trainer(manager, 3)
    assert manager.latest() == 1 and manager.steps() == [1]
    trainer(manager, 2)
    assert manager.latest() == 2


def test_another_store_needs_a_path(manager: CheckpointManager, store: PayloadStore, tmp_path: Path) -> None:
    """Promise: another store's uuid is an error, and path= brings state and pins into another run."""
    segments = [payload(store, n) for n in range(3)]
    both(manager, store, 4, segments=segments)
    prepare_resume(tmp_path / "other", None)
    other = CheckpointManager(run_dir=tmp_path / "other")
    with PayloadStore(tmp_path / "other" / "payloads") as target:
        with pytest.raises(ValueError, match="path="):
            manager.load(store=target)
        with pytest.raises(ValueError, match="either"):
            other.load(4, store=target, path=manager.run_dir / "checkpoints/step_4")
        with pytest.raises(FileNotFoundError, match="step_<N>"):
            other.load(store=target, path=manager.run_dir / "checkpoints")
        state, pins = other.load(store=target, path=manager.run_dir / "checkpoints/step_4")
        assert state == {"progress": b"4"}
        assert set(pins.link_back(pins.files).values()) == {"linked"}
        assert [int(target.read(s, verify=True)[0, 0]) for s in segments] == [0, 1, 2]
    assert tree(manager.run_dir / "checkpoints") >= {"step_4/orchestrator/state.msgpack"}


def test_a_run_can_be_moved(manager: CheckpointManager, store: PayloadStore, tmp_path: Path) -> None:
    """Everything is relative: a run directory that was renamed loads as before."""
    segment = payload(store, 3)
    both(manager, store, 1, segments=[segment])
    store.close()
    os.rename(manager.run_dir, tmp_path / "elsewhere")
    with PayloadStore(tmp_path / "elsewhere/payloads") as moved:
        _, pins = CheckpointManager(run_dir=tmp_path / "elsewhere").load(store=moved)
        assert pins.link_back(pins.files) == {segment.file: "present"}


def test_a_visible_component_is_never_written_over(manager: CheckpointManager, store: PayloadStore) -> None:
    """Promise: a save that meets a visible component is an error, and the component stays."""
    both(manager, store, 1)
    with pytest.raises(FileExistsError, match="committed already"):
        save(manager, store, 1, state={"x": b"other"})
    with pytest.raises(FileExistsError, match="committed already"):
        trainer(manager, 1)
    assert manager.load(store=store)[0] == {"progress": b"1"}
    assert not [name for name in tree(manager.run_dir / "checkpoints") if "tmp" in name]


def test_an_invisible_component_is_moved_aside(
    run: Path, store: PayloadStore, manager: CheckpointManager
) -> None:
    """Promise: a save that meets a component of a dead life moves it to abandoned/."""
    both(manager, store, 1)
    life = manager.lineage.id
    store = resume(run, 1, store)
    straggle(manager)
    trainer(manager, 2, b"late")
    new = CheckpointManager(run_dir=run, on_save_error="raise")
    save(new, store, 2)
    assert new.latest() == 1
    (run / "shards_2").mkdir(exist_ok=True)
    (run / "shards_2" / "rank_0.bin").write_bytes(b"right")
    new.commit_component(2, "trainer", run / "shards_2")
    assert new.latest() == 2
    assert (new.component_path(2, "trainer") / "rank_0.bin").read_bytes() == b"right"
    aside = run / "abandoned" / life / "checkpoints/step_2/trainer/rank_0.bin"
    assert aside.read_bytes() == b"late"


def test_leftovers_of_a_killed_save(manager: CheckpointManager, store: PayloadStore) -> None:
    """Temporaries of dead processes and trash are ignored, then removed; unknown names never are."""
    both(manager, store, 1)
    checkpoints = manager.run_dir / "checkpoints"
    boot, start = _native.temporary_name().removeprefix(".tmp-").split("-")[0::2][:2]
    dead = f".tmp-{boot}-999999999-{start}-0"
    other_host = f".tmp-00000000-1-{start}-0"
    alive = _native.temporary_name()
    trash = alive.replace(".tmp-", ".trash-")
    for name in (dead, other_host, alive, trash, "notes", ".hidden"):
        (checkpoints / name / "payloads").mkdir(parents=True)
        (checkpoints / name / "x").write_bytes(b"x")
    (checkpoints / "step_1" / dead).mkdir()
    assert manager.latest() == 1
    assert sorted(manager.remove_leftovers()) == sorted([dead, dead, trash])
    assert {path.name for path in checkpoints.iterdir()} == {"step_1", other_host, alive, "notes", ".hidden"}
    assert manager.remove_leftovers() == []


def test_commit_component_is_checked(manager: CheckpointManager, store: PayloadStore, tmp_path: Path) -> None:
    """The trainer's half: only known components, hashed whole, and damage found when asked."""
    made = tmp_path / "made"
    (made / "deep/er").mkdir(parents=True)
    (made / "deep/er/file").write_bytes(b"1" * 1000)
    (made / "empty").touch()
    (made / "manifest.json").write_bytes(b'{"format": "of a framework"}')
    with pytest.raises((ValueError, FileExistsError), match=r"manifest\.json"):
        manager.commit_component(1, "trainer", made)
    assert tree(made) == {"deep/er/file", "empty", "manifest.json"}
    # Of a commit that was killed before its rename.
    (made / "manifest.json").write_bytes(b'{"format":1,"lineage":"0123')
    with pytest.raises(ValueError, match="not a component"):
        manager.commit_component(1, "critic", made)
    path = manager.commit_component(1, "trainer", made)
    assert tree(path) == {"deep/er/file", "empty", "manifest.json"} and not made.exists()
    assert manager.component_path(1, "trainer", verify=True) == path
    (path / "deep/er/file").write_bytes(b"1" * 999 + b"2")
    with pytest.raises(CorruptCheckpointError, match="deep/er/file"):
        manager.component_path(1, "trainer", verify=True)
    (path / "empty").unlink()
    (path / "deep/er/file").write_bytes(b"1" * 1000)
    with pytest.raises(CorruptCheckpointError, match="empty"):
        manager.component_path(1, "trainer", verify=True)
    with pytest.raises(FileNotFoundError, match="no component"):
        manager.component_path(2, "trainer")


@pytest.mark.parametrize(
    "options",
    [
        {"keep_last": 0},
        {"keep_every": 0},
        {"pin": "soft"},
        {"on_save_error": "ignore"},
        {"components": ["trainer"]},
        {"components": {"orchestrator": lambda _: True}},
        {"components": ["orchestrator", "../x"]},
        {"components": []},
        {"components": "orchestrator"},
    ],
)
def test_options_are_checked_at_construction(run: Path, options: dict[str, object]) -> None:
    """A wrong option is a ValueError when the manager is made, not at the first save."""
    with pytest.raises(ValueError, match=r"keep_|pin=|on_save_error|components"):
        CheckpointManager(run_dir=run, **options)  # type: ignore[arg-type]


def test_a_manifest_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a manifest beyond its limit is refused when it is written, not when it is needed."""
    monkeypatch.setattr("prime_io.manifest.MANIFEST_LIMIT", 2000)
    pins = {f"v0/{n}.safetensors": Pin(1, ("0" * 16,), "link") for n in range(100)}
    with pytest.raises(ValueError, match="above the limit"):
        seal(Manifest(format=1, lineage="a", step=1, component="orchestrator", pins=pins))


def test_a_manifest_is_the_same_in_slices() -> None:
    """A manifest with many pins, encoded in slices, decodes to what went in."""
    pins = {f"v{n % 7}/{n}.safetensors": Pin(n, (f"{n:016x}",), "link") for n in range(1000)}
    manifest = Manifest(format=1, lineage="a", step=1, component="orchestrator", missing=["x"], pins=pins)
    assert unseal(seal(manifest), "m", kind=Manifest) == manifest


def test_a_checkpoint_of_no_work_can_be_restored(manager: CheckpointManager, store: PayloadStore) -> None:
    """Bug: a cut with an empty queue has no directory of pins, and link_back of nothing raised ENOENT."""
    both(manager, store, 1)
    _, pins = manager.load(store=store)
    assert pins.link_back([]) == {}
    assert isinstance(pins.link_back(["v0/no.safetensors"])["v0/no.safetensors"], FileNotFoundError)
