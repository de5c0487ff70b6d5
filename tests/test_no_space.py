"""A full disk, at every step of a save and of a publish: nothing older is lost, and with room it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loop import FIELD, Run
from mounts import Mounts, mounts_below
from prime_io import CheckpointManager, Episode, Lineage, PayloadStore, Sample, Trace, prepare_resume
from runs import both, payload, save

KIB = 1024
FIRST = 1


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path / "mounts") as made:
        yield made


class Filler:
    """Takes all room of a filesystem but some, in blocks or in inodes."""

    def __init__(self, disk: Path) -> None:
        self._disk, self._file = disk, disk / "filler"
        self._names = disk / "names"

    def leave(self, kib: int) -> None:
        """Exactly so many KiB are free."""
        self.free()
        with self._file.open("wb") as file:
            size, step = 0, 1 << 20
            while step:
                try:
                    os.posix_fallocate(file.fileno(), size, step)
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    step = step // 2 if step > KIB else 0
                else:
                    size += step
            # What a failed try took beyond its end goes as well.
            file.truncate(max(size - kib * KIB, 0))

    def leave_inodes(self, count: int) -> None:
        self.free()
        self._names.mkdir()
        n = 0
        with contextlib.suppress(OSError):
            while True:
                (self._names / str(n)).touch()
                n += 1
        assert n > count
        for i in range(count):
            (self._names / str(i)).unlink()

    def free(self) -> None:
        self._file.unlink(missing_ok=True)
        if self._names.exists():
            for name in self._names.iterdir():
                name.unlink()
            self._names.rmdir()


def names(run: Path) -> set[str]:
    """Every file and directory of a run."""
    return {str(path.relative_to(run)) for path in run.rglob("*")}


def commit_trainer(life: Run, step: int) -> None:
    directory = life.manager.new_component_dir()
    (directory / "model").write_bytes(b"w")
    life.manager.commit_component(step, "trainer", directory)


class Full:
    """A run with work in its queue and open groups, one complete step, and a disk that fills up."""

    def __init__(self, disk: Path, *, pin: Any) -> None:
        self.run = disk / "run"
        self.filler = Filler(disk)
        prepare_resume(self.run, None)
        self.life = Run(self.run, max_steps=10_000, pin=pin)
        self.step = FIRST
        self.phases: set[str] = set()
        self.last = ""

    async def start(self, *, groups: int, members: int) -> None:
        # Nothing may be written by anybody else while room is measured.
        for group in range(groups):
            for member in range(4):
                await self.life.sink.add(self.episode(f"g{group}", member))
        for member in range(members):
            await self.life.sink.add(self.episode("open", member))
        await self.life.sink.drain()
        assert self.life.sink.queued == 4 * groups
        assert await self.cut()
        commit_trainer(self.life, FIRST)
        assert self.life.manager.steps() == [FIRST]

    def episode(self, group: str, member: int) -> Episode:
        rows = np.full((9, 3, 2), member, np.uint8)
        segments = list(self.life.store.write({FIELD: rows}, version=0).values())
        sample = Sample(np.zeros(10, np.int32), np.arange(10) > 3, np.zeros(10, np.float32), segments)
        traces = [Trace(f"{group}.{member}", float(member), [sample])]
        return Episode(traces[0].id, "env", group, 0, None, 0, traces, lineage=self.life.lineage.id)

    async def cut(self) -> bool:
        """Save the state as of `self.step`; whether that worked. Holds are as before when it is over."""
        life = self.life
        life.progress.step = self.step + 1
        held = dict(life.sink.ledger._holders)
        life.orchestrator._cut()
        assert life.sink.ledger._snapshots, "nothing that is held now can be freed meanwhile"
        await asyncio.gather(*life.orchestrator._saves)
        assert life.orchestrator._failure is None
        assert dict(life.sink.ledger._holders) == held
        assert not life.sink.ledger._snapshots
        await life.sink.drain()
        if life.orchestrator._sweeping is not None:
            await life.orchestrator._sweeping
        return bool(life.of("saved")[-1]["committed"])

    async def fail(self, caplog: pytest.LogCaptureFixture) -> bool:
        """One save on the full disk; False once there was room enough for it."""
        self.step += 1
        before, failed = names(self.run), self.life.manager.failed_saves
        caplog.clear()
        if await self.cut():
            return False
        assert self.life.manager.failed_saves == failed + 1
        assert names(self.run) == before, "a failed save leaves nothing"
        [record] = [r for r in caplog.records if "the run goes on" in r.getMessage()]
        assert record.exc_info is not None
        error = record.exc_info[1]
        assert isinstance(error, OSError) and error.errno == errno.ENOSPC, error
        self.last = phase(error.filename)
        self.phases.add(self.last)
        assert self.life.manager.steps() == [FIRST]
        return True

    def check_first(self) -> None:
        """The older step loads whole, and its pins are good."""
        fresh = CheckpointManager(run_dir=self.run)
        assert fresh.latest() == FIRST
        state, pins = fresh.load(store=self.life.store)
        assert msgspec.msgpack.decode(state["progress"])["step"] == FIRST + 1
        assert set(pins.link_back(pins.files).values()) == {"present"}
        fresh.component_path(FIRST, "orchestrator", verify=True)
        fresh.component_path(FIRST, "trainer", verify=True)

    async def with_room(self) -> None:
        """Space is free again: the next save succeeds and a resume from it has all work."""
        self.filler.free()
        self.step += 1
        assert await self.cut()
        commit_trainer(self.life, self.step)
        assert self.life.manager.latest() == self.step
        queued, holders = self.life.sink.queued_trace_ids(), self.life.sink.ledger.files()
        self.life.store.close()
        prepare_resume(self.run, self.step)
        again = Run(self.run, max_steps=10_000)
        report = await again.orchestrator.restore(self.step)
        assert again.sink.queued_trace_ids() == queued
        assert again.sink.ledger.files() == holders
        assert report.members_kept == report.members_in_checkpoint
        await again.sink.drain()
        again.store.close()


def phase(file: str) -> str:
    """What a save was doing when it met this name."""
    name = os.path.basename(file)
    if name.endswith(".safetensors"):
        return "pin"
    return re.sub(r"_[0-9]+$", "", name)


EVERY_STEP = {"checkpoints", "v0", "pin", "state.msgpack", "manifest.json", "step"}
BLOCK = {"ext4": 1, "tmpfs": 4}


@pytest.mark.parametrize("pin", ["link", "copy"])
@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_a_save_that_finds_no_room(
    mounts: Mounts, kind: str, pin: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise: ENOSPC at any step of a save costs that save alone; holds are freed, the next one succeeds."""
    if kind == "ext4":
        disk = mounts.image("ext4", 16 << 20, "-b", "1024", "-m", "0", "-O", "^resize_inode")
    else:
        disk = mounts.tmpfs("size=8m")

    async def main() -> set[str]:
        full = Full(disk, pin=pin)
        await full.start(groups=6, members=2)
        room = 0
        full.filler.leave(room)
        while await full.fail(caplog):
            full.check_first()
            # Coarsely through the copies of pins, by single blocks where everything else is written.
            room += 16 if pin == "copy" and room >= 32 and full.last == "pin" else BLOCK[kind]
            full.filler.leave(room)
        await full.with_room()
        return full.phases

    seen = asyncio.run(main())
    if kind == "ext4":
        # The last block, for the step's directory, may come with the manifest's; inodes tell (below).
        assert EVERY_STEP - {"step"} <= seen <= EVERY_STEP
    else:
        # Directories and links take no blocks there.
        assert seen == {"state.msgpack", "manifest.json"} | ({"pin"} if pin == "copy" else set())


@pytest.mark.parametrize("pin", ["link", "copy"])
def test_a_save_that_finds_no_inode(mounts: Mounts, pin: str, caplog: pytest.LogCaptureFixture) -> None:
    """Promise: running out of inodes, which on tmpfs links need too, costs one save at any of its steps."""

    async def main() -> set[str]:
        full = Full(mounts.tmpfs("size=16m,nr_inodes=2000"), pin=pin)
        await full.start(groups=2, members=1)
        for inodes in range(1000):
            full.filler.leave_inodes(inodes)
            if not await full.fail(caplog):
                break
            full.check_first()
        await full.with_room()
        return full.phases

    assert asyncio.run(main()) == EVERY_STEP


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_publishing_without_room(mounts: Mounts, kind: str) -> None:
    """Promise: a payload that finds no room is an OSError that says ENOSPC and names it, and no file is left."""
    if kind == "ext4":
        disk = mounts.image("ext4", 16 << 20, "-b", "1024", "-m", "0", "-O", "^resize_inode")
    else:
        disk = mounts.tmpfs("size=8m")
    filler = Filler(disk)
    with PayloadStore(disk / "payloads", owner=True) as store:
        [kept] = store.write({FIELD: np.ones((9, 3, 2), np.uint8)}, version=0).values()
        failed = 0
        for rows, durable in ((8 << 10, False), (8 << 10, True), (700 << 10, False), (700 << 10, True)):
            tensors = {FIELD: np.ones((rows, 1), np.uint8)}
            for kib in [*range(0, 32, BLOCK[kind]), *range(32, 2048, 60)]:
                filler.leave(kib)
                before = names(disk)
                try:
                    [segment] = store.write(tensors, version=0, durable=durable).values()
                except OSError as error:
                    assert error.errno == errno.ENOSPC and error.filename.startswith("v0/")
                    assert "publish" in str(error)
                    assert names(disk) == before
                    failed += 1
                    continue
                assert store.read(segment, verify=True).all()
                store.reclaim([segment.file])
                break
            else:
                raise AssertionError("there never was room enough")
        assert failed > 20
        # Of a batch, each has its own answer; the large one may have the room that the small one needs.
        filler.leave(40)
        small, large = (np.ones((rows, 1), np.uint8) for rows in (100, 500 << 10))
        answers = store.write_many([{"a": large}, {"a": small}], version=0)
        assert isinstance(answers[0], OSError) and answers[0].errno == errno.ENOSPC
        small_one = answers[1]
        assert isinstance(small_one, dict) or (
            isinstance(small_one, OSError) and small_one.errno == errno.ENOSPC
        )
        # A version without room for its directory.
        if kind == "ext4":
            filler.leave(0)
            with pytest.raises(OSError, match="No space left"):
                store.write({"a": small}, version=1)
            assert store.versions() == [0]
        filler.free()
        assert store.read(kept, verify=True).all()
        assert store.write({"a": small}, version=1)


def test_rule_13_a_spill_without_room_is_asked_for_again(mounts: Mounts) -> None:
    """Rule 13: a spill that meets ENOSPC is counted, its payload released, and the member asked for again."""

    async def main() -> None:
        full = Full(mounts.image("ext4", 16 << 20, "-b", "1024", "-m", "0"), pin="link")
        sink = full.life.sink
        episode = full.episode("g", 0)
        full.filler.leave(2)
        await sink.add(episode)
        await sink.drain()
        assert sink.counters["spill_failed"] == 1
        assert [(r.group_id, r.rollouts) for r in sink.requests] == [("g", 1)]
        assert len(sink.ledger) == 0
        assert not [kind for *_, kind in full.life.store.native.scan() if kind != "foreign"]
        full.filler.free()
        for member in range(4):
            await sink.add(full.episode("g", member))
        assert sink.queued == 4
        await sink.drain()
        full.life.store.close()

    asyncio.run(main())


def test_a_trainers_commit_without_room(mounts: Mounts) -> None:
    """Promise: ENOSPC in commit_component leaves the trainer's directory, and the same call works with room."""
    disk = mounts.image("ext4", 16 << 20, "-b", "1024", "-m", "0", "-O", "^resize_inode")
    run, filler = disk / "run", Filler(disk)
    prepare_resume(run, None)
    manager = CheckpointManager(run_dir=run)
    with PayloadStore(run / "payloads", owner=True) as store:
        save(manager, store, 1)
        directory = manager.new_component_dir()
        # A manifest of several blocks, so that it can fail in its middle.
        for shard in range(40):
            (directory / f"shard_{shard:03d}_of_a_model_with_a_long_name").write_bytes(b"w" * 10)
        failed = 0
        for kib in range(100):
            filler.leave(kib)
            before = names(run)
            try:
                manager.commit_component(1, "trainer", directory)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                assert names(run) == before and manager.steps() == []
                failed += 1
            else:
                break
        assert failed > 2 and manager.steps() == [1]
        manager.component_path(1, "trainer", verify=True)


def test_a_resume_without_room(mounts: Mounts) -> None:
    """Rule 10: ENOSPC in prepare_resume leaves the run as it was, or the resume to be done again; none is lost."""
    disk = mounts.image("ext4", 16 << 20, "-b", "1024", "-m", "0", "-O", "^resize_inode")
    run, filler = disk / "run", Filler(disk)
    prepare_resume(run, None)
    manager = CheckpointManager(run_dir=run)
    with PayloadStore(run / "payloads", owner=True) as store:
        both(manager, store, 1, 2, 3, segments=[payload(store, 1)])
    contents = {path.name for path in run.rglob("*") if path.is_file()}
    failed = 0
    for kib in range(100):
        filler.leave(kib)
        life = Lineage.load(run).id
        try:
            prepare_resume(run, 2)
        except OSError as error:
            assert error.errno == errno.ENOSPC
            failed += 1
            # A new life sees no step above the one resumed from; without one, nothing has changed.
            seen = CheckpointManager(run_dir=run).steps()
            assert seen == ([1, 2, 3] if Lineage.load(run).chain[0].id == Lineage.load(run).id else [1, 2])
            assert {path.name for path in run.rglob("*") if path.is_file()} == contents
        else:
            assert Lineage.load(run).id != life
            break
    assert failed
    assert CheckpointManager(run_dir=run).steps() == [1, 2]
    assert {path.name for path in run.rglob("*") if path.is_file()} == contents
