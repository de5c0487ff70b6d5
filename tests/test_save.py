"""Saving: one at a time, of one instant, and a failure or a kill at any moment costs no older step."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from prime_io import _native
from prime_io.checkpoint import CheckpointManager, Snapshot
from prime_io.lineage import Lineage, prepare_resume
from prime_io.manifest import pack_state
from prime_io.store import PayloadStore
from runs import both, payload, save, trainer, tree


def test_mutation_after_the_cut(manager: CheckpointManager, store: PayloadStore) -> None:
    """Rule 2: what the caller changes right after the cut does not reach the checkpoint."""
    blob = bytearray(b"one")
    state = {"a": blob, "b": b"two"}
    segments = [payload(store, 1)]
    spills = [payload(store, 2)]
    first = [segments[0].file, spills[0].file]

    async def go() -> None:
        snapshot = Snapshot(1, state, segments, spills)  # type: ignore[arg-type]
        task = asyncio.ensure_future(manager.save(snapshot, store=store))
        blob[:] = b"two"
        state["c"] = b"three"
        del state["b"]
        segments.append(payload(store, 3))
        spills.clear()
        await task

    asyncio.run(go())
    trainer(manager, 1)
    found, pins = manager.load(store=store)
    assert found == {"a": b"one", "b": b"two"}
    assert sorted(pins.files) == sorted(first)


def test_state_is_one_plain_msgpack_map() -> None:
    """No pickle: state.msgpack is a msgpack map that any library reads, whatever the sizes."""
    state = {"": b"", "short": b"1" * 300, "long": bytes(range(256)) * 12_289}
    assert msgspec.msgpack.decode(pack_state(state)) == state
    assert msgspec.msgpack.decode(pack_state({})) == {}


def test_a_snapshot_holds_bytes_only() -> None:
    """No pickle: a state part that is not bytes is refused when the snapshot is made."""
    with pytest.raises(TypeError, match=r"state\['sink'\]"):
        Snapshot(1, {"sink": {"x": 1}}, [])  # type: ignore[dict-item]


def test_one_save_at_a_time_in_order(manager: CheckpointManager, store: PayloadStore) -> None:
    """Promise: one save in flight, later ones wait their turn, and the loop goes on meanwhile."""
    running: list[int] = []
    inner = manager._commit
    seen: list[list[int]] = []

    def slow(snapshot: Snapshot, at: PayloadStore) -> object:
        running.append(snapshot.step)
        seen.append(list(running))
        time.sleep(0.05)
        result = inner(snapshot, at)
        running.remove(snapshot.step)
        return result

    manager._commit = slow  # type: ignore[method-assign, assignment]

    async def go() -> float:
        lag = 0.0

        async def tick() -> None:
            nonlocal lag
            while True:
                before = time.perf_counter()
                await asyncio.sleep(0.001)
                lag = max(lag, time.perf_counter() - before)

        ticking = asyncio.ensure_future(tick())
        snapshots = [Snapshot(n, {"n": b"%d" % n}, []) for n in (1, 2, 3)]
        await asyncio.gather(*(manager.save(s, store=store) for s in snapshots))
        ticking.cancel()
        return lag

    assert asyncio.run(go()) < 0.04
    assert seen == [[1], [2], [3]]


def test_a_cancelled_caller_leaves_a_whole_save(manager: CheckpointManager, store: PayloadStore) -> None:
    """A save whose caller is cancelled goes on to its end, and the next one waits for it."""

    async def go() -> None:
        task = asyncio.ensure_future(manager.save(Snapshot(1, {"a": b"x" * 1_000_000}, []), store=store))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await manager.save(Snapshot(2, {"a": b"y"}, []), store=store)

    asyncio.run(go())
    names = {path.name for path in (manager.run_dir / "checkpoints").iterdir()}
    assert "step_2" in names and not [name for name in names if name.startswith(".")]


@pytest.mark.parametrize("mode", ["link", "copy", "skip"])
def test_pin_modes(run: Path, store: PayloadStore, mode: str) -> None:
    """Promise and rule 13: pin="copy" shares no inode, "skip" pins nothing, spills are always linked."""
    m = CheckpointManager(run_dir=run, pin=mode, on_save_error="raise")  # type: ignore[arg-type]
    segment, spill, shared = payload(store, 1), payload(store, 2), payload(store, 3)
    both(m, store, 1, segments=[segment, shared], spills=[spill, shared])
    root, held = Path(store.root), m.component_path(1, "orchestrator") / "payloads"
    assert (held / spill.file).samefile(root / spill.file)
    assert (held / shared.file).samefile(root / shared.file)
    _, pins = m.load(store=store)
    assert set(pins.files) == {segment.file, spill.file, shared.file}
    assert m.unpinned_files() == ({segment.file} if mode == "skip" else set())
    if mode == "skip":
        assert not (held / segment.file).exists()
    else:
        assert (held / segment.file).samefile(root / segment.file) == (mode == "link")
    assert set(pins.link_back(pins.files).values()) == {"present"}
    store.reclaim([segment.file, spill.file])
    answers = pins.link_back(pins.files)
    back = {"link": "linked", "copy": "copied"}
    if mode == "skip":
        assert isinstance(answers[segment.file], FileNotFoundError)
    else:
        assert answers[segment.file] == back[mode]
    assert answers[spill.file] == ("copied" if mode == "copy" else "linked")


def test_links_are_tried_for_real(
    manager: CheckpointManager,
    store: PayloadStore,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Promise: whether links work is tried, and one log line says so."""
    caplog.set_level(logging.INFO, "prime_io.checkpoint")
    assert manager.link_probe(store)
    assert len(caplog.records) == 1 and "hard links" in caplog.text
    assert tree(manager.run_dir / "checkpoints") == set()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert not manager.link_probe(store)
    assert len(caplog.records) == 2 and "copies" in caplog.text


@pytest.mark.parametrize("how", ["link", "copy"])
def test_bytes_that_could_not_be_synced_are_lost(
    manager: CheckpointManager,
    store: PayloadStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: Literal["link", "copy"],
) -> None:
    """Promise: a payload whose fsync failed is missing from the checkpoint, linked or copied; the save goes on.
    Bug guarded: with pin="copy" it made every save fail."""
    manager.pin = how
    good, bad = payload(store, 1), payload(store, 2)

    def sync(files: list[str]) -> list[OSError | None]:
        return [OSError(28, "no space", f) if f == bad.file else None for f in files]

    monkeypatch.setattr(store, "sync", sync)
    report = save(manager, store, 1, [good, bad])
    assert report is not None and report.missing == (bad.file,) and report.pinned == 1
    assert "no checkpoint holds it" in caplog.text


def test_an_error_that_says_nothing_of_the_bytes_fails_the_save(
    manager: CheckpointManager, store: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: EACCES or EMFILE is never reported as missing."""
    segment = payload(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(store, "sync", lambda files: [OSError(24, "too many open files", f) for f in files])
        with pytest.raises(OSError, match="too many"):
            save(manager, store, 1, [segment])
    report = save(manager, store, 1, [segment])
    assert report is not None and report.pinned == 1


def test_an_answer_of_a_sync_that_is_no_os_error_fails_the_save(
    manager: CheckpointManager, store: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: a name that the engine refuses is a mistake somewhere, not a payload that is missing."""
    segment = payload(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(store, "sync", lambda files: [ValueError("not a payload's name") for _ in files])
        with pytest.raises(ValueError, match="not a payload's name"):
            save(manager, store, 1, [segment])
    assert manager.steps() == [] and not list((manager.run_dir / "checkpoints").iterdir())
    report = save(manager, store, 1, [segment])
    assert report is not None and report.pinned == 1


@pytest.mark.parametrize("policy", ["continue", "raise"])
@pytest.mark.parametrize("where", ["pin", "write", "finish"])
def test_a_failed_save_leaves_the_run_as_it_was(
    run: Path,
    store: PayloadStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    policy: str,
    where: str,
) -> None:
    """Promise: a failed save is logged, counted and removed; older steps stay, and the run goes on."""
    m = CheckpointManager(run_dir=run, on_save_error=policy)  # type: ignore[arg-type]
    segments = [payload(store, 1)]
    both(m, store, 1, segments=segments)
    before = tree(run)

    class Failing:
        def __init__(self, *args: object, **more: object) -> None:
            self._commit = _native.Commit(*args, **more)  # type: ignore[arg-type]

        def __getattr__(self, name: str) -> object:
            if name == where:

                def fail(*_: object, **__: object) -> None:
                    raise OSError(28, "no space left on device", "somewhere")

                return fail
            return getattr(self._commit, name)

    class Shim:
        Commit = Failing

        def __getattr__(self, name: str) -> object:
            return getattr(_native, name)

    with monkeypatch.context() as patch:
        patch.setattr("prime_io.checkpoint._native", Shim())
        if policy == "raise":
            with pytest.raises(OSError, match="no space"):
                save(m, store, 2, segments)
        else:
            assert save(m, store, 2, segments) is None
            assert m.failed_saves == 1 and "no space" in caplog.text
    assert tree(run) == before and m.steps() == [1]
    both(m, store, 2, segments=segments)
    assert m.steps() == [1, 2]


def test_a_save_that_fails_after_its_rename_never_counts(
    manager: CheckpointManager, store: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: a save that fails after its rename goes to trash: the power cut might have taken it."""
    both(manager, store, 1)

    class Late:
        def __init__(self, *args: object, **more: object) -> None:
            self._commit = _native.Commit(*args, **more)  # type: ignore[arg-type]

        def __getattr__(self, name: str) -> object:
            return getattr(self._commit, name)

        def finish(self, manifest: bytes) -> None:
            self._commit.finish(manifest)
            raise OSError(5, "fsync step_2: input/output error")

    class Shim:
        Commit = Late

        def __getattr__(self, name: str) -> object:
            return getattr(_native, name)

    with monkeypatch.context() as patch:
        patch.setattr("prime_io.checkpoint._native", Shim())
        with pytest.raises(OSError, match="fsync"):
            save(manager, store, 2)
    trainer(manager, 2)
    assert manager.steps() == [1]
    assert [name for name in manager.remove_leftovers() if name.startswith(".trash-")]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB."""
    where = tmp_path / "small"
    where.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"needs root to mount a tmpfs: {made.stderr.strip()}")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_full_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Promise: ENOSPC in a save leaves older steps and no temporary; with room again the next one works."""
    run = small_disk / "run"
    prepare_resume(run, None)
    m = CheckpointManager(run_dir=run)
    with PayloadStore(run / "payloads", owner=True) as store:
        both(m, store, 1, segments=[payload(store, 1)])
        before = tree(run / "checkpoints")
        assert save(m, store, 2, [payload(store, 2)], state={"big": bytes(2 << 20)}) is None
        assert m.failed_saves == 1 and "step 2 failed" in caplog.text
        assert tree(run / "checkpoints") == before and m.steps() == [1]
        both(m, store, 2)
        assert m.steps() == [1, 2]


def test_a_store_on_another_filesystem_is_copied(
    small_disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise: where links do not reach, pins are copies, and so is the way back."""
    run = tmp_path / "run"
    prepare_resume(run, None)
    m = CheckpointManager(run_dir=run, on_save_error="raise")
    with PayloadStore(small_disk / "payloads", owner=True) as store:
        segment = payload(store, 5)
        assert not m.link_probe(store)
        report = save(m, store, 1, [segment])
        assert report is not None and report.copied == 1 and "are copies" in caplog.text
        trainer(m, 1)
        store.reclaim([segment.file])
        _, pins = m.load(store=store)
        assert pins.link_back(pins.files) == {segment.file: "copied"}
        assert store.read(segment, verify=True)[0, 0] == 5


LOOP = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from prime_io.checkpoint import CheckpointManager
from prime_io.manifest import pack_state
from prime_io.store import PayloadStore
from runs import both, payload
run = Path(sys.argv[1])
manager = CheckpointManager(run_dir=run, on_save_error="raise", keep_last=2)
manager.remove_leftovers()
with PayloadStore(run / "payloads", owner=True) as store:
    queue = []
    step = manager.latest() or 0
    print("ready", flush=True)
    while True:
        step += 1
        queue = queue[-20:] + [payload(store, step % 256, version=step) for _ in range(5)]
        both(manager, store, step, segments=queue, state={"step": b"%d" % step, "fill": bytes(100_000)})
        print(step, flush=True)
        asyncio.run(manager.apply_retention())
"""


def test_sigkill_at_random_moments(tmp_path: Path) -> None:
    """The promise: killed at any moment, the newest acknowledged step loads whole, with every pin."""
    run, seed = tmp_path / "run", random.Random(5)
    prepare_resume(run, None)
    latest = 0
    for attempt in range(10):
        child = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(run), str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(seed.uniform(0.02, 0.4))
        child.kill()
        told = child.stdout.read().split()
        child.wait()
        child.stdout.close()
        acknowledged = max([latest, *map(int, told)])
        m = CheckpointManager(run_dir=run)
        found = m.latest() or 0
        assert acknowledged <= found <= acknowledged + 1
        latest = found
        if not found:
            prepare_resume(run, None)
            continue
        prepare_resume(run, found)
        m = CheckpointManager(run_dir=run)
        with PayloadStore(run / "payloads", owner=True) as store:
            state, pins = m.load(store=store)
            assert state["step"] == b"%d" % found and not pins.missing
            store.reclaim(pins.files[::2])
            answers = pins.link_back(pins.files)
            assert set(answers.values()) <= {"present", "linked"}, (attempt, answers)
        m.component_path(found, "trainer", verify=True)
        m.remove_leftovers()
        assert not [name for name in os.listdir(run / "checkpoints") if name.startswith(".")]
        for made in run.glob("shards_*"):
            os.rename(made, tmp_path / f"shards{attempt}_{made.name}")
    assert latest > 5
    assert Lineage.load(run).resumed_from == latest


def test_a_checkpoint_without_pins_links_nothing_back(run: Path, store: PayloadStore) -> None:
    """Bug: restoring a checkpoint that had nothing to pin failed, since there was no directory of pins."""
    m = CheckpointManager(run_dir=run, on_save_error="raise")
    both(m, store, 1, segments=[])
    _, pins = m.load(store=store)
    assert pins.link_back([]) == {}
