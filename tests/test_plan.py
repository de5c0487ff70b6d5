"""`prime-io plan`: what a resume would come to, before anything is started, with nothing touched."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import prime_io
from loop import Run, Trainer, until_killed
from prime_io import CheckpointManager, PayloadStore, Progress, RestoreReport, Snapshot, prepare_resume
from prime_io.cli import main
from prime_io.plan import plan
from prime_io.restore import sink_state
from runs import save, straggle, trainer
from work import SPECS, Bench

STEP = 7
SIZES = {"math": 2, "code": 3}


def listing(directory: Path) -> dict[str, tuple[Any, ...]]:
    """Everything below a directory that a write, a link or a touch would change."""
    found = {}
    for path in [directory, *directory.rglob("*")]:
        stat = path.lstat()
        body = path.read_bytes() if path.is_file() else None
        found[str(path)] = (
            stat.st_ino,
            stat.st_nlink,
            stat.st_mode,
            stat.st_mtime_ns,
            stat.st_ctime_ns,
            body,
        )
    return found


class Saved:
    """A run with one complete step: queued traces and open groups of two environments, then the kill."""

    def __init__(self, run: Path, *, pin: Any = "link") -> None:
        self.run, self.pin = run, pin
        prepare_resume(run, None)
        asyncio.run(self._make())

    async def _make(self) -> None:
        bench = Bench(
            self.run / "payloads",
            progress=Progress(step=STEP + 1),
            group_size=SIZES,
            max_off_policy_steps=9,
        )
        for version in (1, 4, 6, 8):
            await bench.fill(1, policy=version, version=version, env_name="math", pixels=version == 6)
        await bench.fill(1, size=3, policy=5, version=5, env_name="code")
        for group, env, policy in (("m", "math", 6), ("c", "code", 6), ("c", "code", 2)):
            await bench.sink.add(bench.episode(group, env_name=env, policy=policy, version=policy))
        await bench.sink.add(bench.episode("c2", env_name="code", policy=None, ok=False))
        work = list(bench.sink.work())
        spills = [segment for item in work for segment in item.spills()]
        spilled = {segment.file for segment in spills}
        self.manager = CheckpointManager(run_dir=self.run, pin=self.pin, on_save_error="raise")
        sink = bench.sink.state_dict({})
        queue = sink.pop("queue")
        parts = {"progress": bench.progress, "source": {}, "sink": sink, "queue": queue}
        self.state = {name: msgspec.msgpack.encode(part) for name, part in parts.items()}
        segments = [s for item in work for s in item.segments() if s.file not in spilled]
        await self.manager.save(Snapshot(STEP, self.state, segments, spills), store=bench.store)
        await bench.sink.drain()
        bench.store.close()
        trainer(self.manager, STEP)
        self.pins = self.manager.component_path(STEP, "orchestrator") / "payloads"
        self.live = self.run / "payloads"
        self.files = sorted(str(path.relative_to(self.live)) for path in self.live.glob("v*/*"))

    def restore(self, **options: Any) -> tuple[RestoreReport, dict[str, int], dict[str, list[str]]]:
        """The real thing."""

        async def go() -> tuple[RestoreReport, dict[str, int], dict[str, list[str]]]:
            prepare_resume(self.run, STEP)
            manager = CheckpointManager(run_dir=self.run, pin=self.pin)
            with PayloadStore(self.live, owner=True) as store:
                state, pins = manager.load(STEP, store=store)
                progress = msgspec.msgpack.decode(state["progress"], type=Progress)
                settings = {"group_size": SIZES, "progress": progress} | options
                sink = Bench.sink_of(store, **settings)
                report, requests = await sink.load_state_dict(sink_state(state, step=STEP), pins=pins)
                await sink.drain()
                asked = {request.group_id: request.rollouts for request in requests}
                return report, asked, sink.dropped_at_restore

        return asyncio.run(go())


def spoil(path: Path, how: str) -> None:
    """Damage one file, under this name alone."""
    body = path.read_bytes()
    path.unlink()
    if how == "cut":
        path.write_bytes(body[:-1])
    elif how == "empty":
        path.touch()
    elif how == "zeros":
        path.write_bytes(bytes(len(body)))
    elif how == "dangling":
        path.symlink_to("/nowhere")
    elif how == "copied":
        path.write_bytes(body)
    else:
        assert how == "gone"


def agree(saved: Saved, **options: Any) -> RestoreReport:
    """The plan, that it touched nothing, and that the restore which follows comes to the same."""
    before = listing(saved.run)
    made = plan(saved.run, fields=SPECS, **options)
    assert listing(saved.run) == before
    horizon = options.get("max_off_policy_steps", 10**6)
    report, requests, dropped = saved.restore(max_off_policy_steps=10**6 if horizon is None else horizon)
    report = msgspec.structs.replace(
        report, files_linked=report.files_linked + report.files_copied, files_copied=0
    )
    assert made.report == report
    assert made.requests == requests
    assert made.dropped == dropped
    assert len(made.lost_files) == report.files_lost
    for kind, n in msgspec.structs.asdict(report).items():
        if not kind.startswith("files_"):
            assert sum(counts.get(kind, 0) for counts in made.environments.values()) == n, kind
    return report


def test_the_plan_of_a_whole_run(tmp_path: Path) -> None:
    """Promise: the plan's numbers are those of the restore that follows, by environment, and nothing is touched."""
    saved = Saved(tmp_path / "run")
    made = plan(saved.run, max_off_policy_steps=4, fields=SPECS)
    assert made.environments == {
        "math": {
            "queued_in_checkpoint": 8,
            "queued_stale": 2,
            "queued_too_new": 2,
            "queued_kept": 4,
            "groups_in_checkpoint": 1,
            "members_in_checkpoint": 1,
            "members_kept": 1,
            "rollouts_requested": 1,
        },
        "code": {
            "queued_in_checkpoint": 3,
            "queued_kept": 3,
            "groups_in_checkpoint": 2,
            "members_in_checkpoint": 3,
            "members_kept": 2,
            "members_stale": 1,
            "rollouts_requested": 4,
        },
    }
    assert made.requests == {"m": 1, "c": 2, "c2": 2}
    report = agree(saved, max_off_policy_steps=4)
    assert (report.files_lost, report.files_linked) == (0, 0)


def test_without_the_horizon_nothing_is_judged_stale(tmp_path: Path) -> None:
    """Promise: staleness is not guessed: without --max-off-policy-steps all work that is not too new counts."""
    saved = Saved(tmp_path / "run")
    assert plan(saved.run).max_off_policy_steps is None
    report = agree(saved)
    assert (report.queued_stale, report.queued_kept, report.members_kept) == (0, 9, 4)


@pytest.mark.parametrize("pin", ["link", "copy", "skip"])
def test_pins_stand_in_for_what_was_reclaimed(tmp_path: Path, pin: str) -> None:
    """Promise: files that were trained and reclaimed after the cut count as there if they are pinned."""
    saved = Saved(tmp_path / "run", pin=pin)
    for file in saved.files:
        (saved.live / file).unlink()
    for directory in saved.live.glob("v*"):
        directory.rmdir()
    report = agree(saved, max_off_policy_steps=4)
    if pin == "skip":
        assert report.queued_kept == 0 and report.queued_missing == 7
    else:
        assert (report.queued_kept, report.files_lost) == (7, 0)
        assert report.files_linked > 10


@pytest.mark.parametrize("how", ["gone", "cut", "empty", "zeros", "dangling", "copied"])
@pytest.mark.parametrize("where", ["live", "pins", "both"])
def test_the_plan_of_a_damaged_run(tmp_path: Path, where: str, how: str) -> None:
    """Promise: deleted, truncated and replaced files and pins are planned as they will be restored."""
    saved = Saved(tmp_path / "run")
    for file in saved.files[::2]:
        for place in ("live", "pins") if where == "both" else (where,):
            # Damage of a link alone, not of the inode that both names share.
            spoil(getattr(saved, place) / file, how)
    if where == "both" and how == "dangling":
        with pytest.raises(OSError, match="not known"):
            plan(saved.run, fields=SPECS)
        with pytest.raises(OSError, match="not known"):
            saved.restore()
        return
    report = agree(saved, max_off_policy_steps=6)
    lost = report.queued_missing + report.queued_short + report.queued_corrupt
    assert (lost > 0) == (where == "both" and how != "copied")


@pytest.mark.parametrize("seed", range(6))
def test_the_plan_of_a_run_damaged_at_random(tmp_path: Path, seed: int) -> None:
    """Promise: whatever mix of damage a run has, plan and restore agree in every number."""
    chance = random.Random(seed)
    saved = Saved(tmp_path / "run", pin=chance.choice(["link", "copy"]))
    for file in saved.files:
        for place in (saved.live, saved.pins):
            how = chance.choice(["", "", "gone", "gone", "cut", "empty", "zeros", "copied"])
            if how:
                spoil(place / file, how)
    report = agree(saved, max_off_policy_steps=chance.choice([None, 2, 6]))
    assert report.files_lost and report.files_replaced


def test_the_plan_of_a_killed_loop(tmp_path: Path) -> None:
    """Promise: the plan of a run that was killed is what `Orchestrator.restore` reports."""

    async def main() -> None:
        prepare_resume(tmp_path, None)
        first = Run(tmp_path, max_steps=50)
        await until_killed(first, Trainer(tmp_path, slower_than=first, dies_after=5))
        while (before := listing(tmp_path)) != listing(tmp_path):
            await asyncio.sleep(0.1)  # threads of the dropped loop end in their own time
        made = plan(tmp_path, max_off_policy_steps=6)
        assert listing(tmp_path) == before
        assert made.report.files_linked, "the queue of the cut was trained since"
        prepare_resume(tmp_path, made.step)
        second = Run(tmp_path, max_steps=9)
        assert await second.orchestrator.restore(made.step) == made.report
        [restored] = second.of("restored")
        assert restored["requests"] == made.requests
        await second.dispatcher.close()
        await second.sink.drain()
        second.store.close()

    asyncio.run(main())


def test_the_plan_takes_no_lock(tmp_path: Path) -> None:
    """Promise: a run that is still going can be asked, and it does not notice."""
    saved = Saved(tmp_path / "run")
    with PayloadStore(saved.live, owner=True) as store:
        assert plan(saved.run).step == STEP
        assert store.owner
    assert plan(saved.run).next_step == STEP + 1


def test_an_optional_field_is_only_named_so_by_the_caller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise: --optional FIELD plans like a sink whose FieldSpec says that the field is not required."""
    saved = Saved(tmp_path / "run")
    made = plan(saved.run)
    for file in saved.files:
        if b"pixels" in (saved.live / file).read_bytes()[:4096]:
            (saved.live / file).unlink()
            (saved.pins / file).unlink()
    assert plan(saved.run).report.queued_missing == 2
    assert main(["plan", str(saved.run), "--optional", "pixels"]) == 0
    assert "kept without an optional field that is gone: 2" in capsys.readouterr().out
    assert agree(saved).queued_kept == made.report.queued_kept


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: a person reads what is kept, dropped and asked for again, by environment."""
    saved = Saved(tmp_path / "run")
    assert main(["plan", str(saved.run), "--max-off-policy-steps", "4"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert "resume of" in " ".join(lines[0]) and lines[0][-1] == str(STEP + 1)
    assert ["queued", "traces", "in", "checkpoint", "kept", "stale", "too", "new"] in lines
    assert ["code", "3", "3", "0", "0"] in lines
    assert ["math", "8", "4", "2", "2"] in lines
    assert ["all", "11", "7", "2", "2"] in lines
    assert ["code", "2", "0", "3", "2", "1", "4"] in lines
    assert main(["plan", str(saved.run)]) == 0
    assert "staleness was not judged" in capsys.readouterr().out


def test_json_holds_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: --json is the whole plan, with ids of dropped work and the files that are lost."""
    saved = Saved(tmp_path / "run")
    lost = saved.files[0]
    (saved.live / lost).unlink()
    (saved.pins / lost).unlink()
    assert main(["plan", str(saved.run), "--json", "--step", str(STEP)]) == 0
    out = json.loads(capsys.readouterr().out)
    made = plan(saved.run)
    assert out == msgspec.to_builtins(made)
    assert list(out["lost_files"]) == [lost]
    assert out["max_off_policy_steps"] is None


def _no_run(run: Path) -> None:
    pass


def _no_checkpoints(run: Path) -> None:
    prepare_resume(run, None)
    (run / "checkpoints").rmdir()


def _nothing_complete(run: Path) -> None:
    prepare_resume(run, None)
    with PayloadStore(run / "payloads", owner=True) as store:
        save(CheckpointManager(run_dir=run), store, 3)


def _torn(run: Path) -> None:
    path = Saved(run).pins.parent / "state.msgpack"
    path.write_bytes(path.read_bytes()[:-1])


def _no_store(run: Path) -> None:
    os.rename(Saved(run).live, run / "elsewhere")


def _left(run: Path) -> None:
    """Only a life that was left has a complete step."""
    prepare_resume(run, None)
    late = CheckpointManager(run_dir=run)
    straggle(late)
    prepare_resume(run, None)
    with PayloadStore(run / "payloads", owner=True) as store:
        save(late, store, 4)
        trainer(late, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_no_run, "no LINEAGE"),
        (_no_checkpoints, "nothing to resume: the run has no complete step"),
        (_nothing_complete, "nothing to resume: the run has no complete step"),
        (_left, "nothing to resume: the run has no complete step"),
        (_torn, "state.msgpack: torn or edited"),
        (_no_store, "open store: No such file or directory"),
    ],
)
def test_nothing_to_resume_is_a_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], None],
    message: str,
) -> None:
    """Promise: exit code 1 and one sentence on stderr, and still nothing is made."""
    make(tmp_path / "run")
    before = listing(tmp_path)
    assert main(["plan", str(tmp_path / "run")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("prime-io: ") and err.count("\n") == 1
    assert message in err
    assert listing(tmp_path) == before


def test_a_step_that_is_not_complete_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: --step of an incomplete step names the complete ones."""
    saved = Saved(tmp_path / "run")
    assert main(["plan", str(saved.run), "--step", "99"]) == 1
    assert f"those are [{STEP}]" in capsys.readouterr().err


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: `prime-io --version` and `prime_io.__version__` are what pip knows."""
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    version = importlib.metadata.version("prime-io")
    assert capsys.readouterr().out == f"prime-io {version}\n" and prime_io.__version__ == version


def test_the_command_is_there(tmp_path: Path) -> None:
    """Promise: `python -m prime_io.cli` is the command, with exit codes for scripts."""
    command = [sys.executable, "-m", "prime_io.cli", "plan"]
    for argument, code in (("--help", 0), (str(tmp_path), 1)):
        done = subprocess.run([*command, argument], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
