"""`make demo`: start a run, kill all of it with SIGKILL at a hard moment, resume it, judge it."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from prime_io import Lineage, prepare_resume

from .events import EventReader
from .judge import Moment, Verdict, judge
from .life import Life
from .settings import Settings

THRESHOLD = 0.75
"""Held-out greedy reward that the full demo has to reach."""

ATTEMPTS = 3

SHORT = {
    "steps": 12,
    "batch_size": 16,
    "max_inflight": 16,
    "group_size": 4,
    "checkpoint_every": 2,
    "workers": 1,
    "warm_start_steps": 60,
    "held_out": 32,
    "step_s": 0.5,
    "verifier_s": 0.033,
}


class Demo:
    def __init__(self, run: Path, settings: Settings, console: Console) -> None:
        self.run_dir, self.settings, self.console = run, settings, console
        self.events = EventReader(run)
        self.lives: list[Lineage] = []
        chance = random.Random(f"kill/{settings.seed}")
        self.not_before = chance.randint(settings.checkpoint_every, max(settings.steps // 2, 1))
        self.pause_s = chance.random() * settings.step_s / 2
        self.held: set[int] = set()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            console=console,
        )
        self.task = self.bar.add_task("starting", total=settings.steps)

    def first_life(self) -> Moment | None:
        """Run until a moment that is hard to survive, then kill everything. None if no such moment came."""
        self.lives.append(prepare_resume(self.run_dir, None))
        life = Life(self.run_dir, self.settings, 1)
        try:
            while life.running():
                self.show("training")
                self.make_it_hard(life)
                moment = Moment.look(self.run_dir, self.lives[0], self.events)
                if moment and moment.step >= self.not_before and not moment.lacks(self.settings):
                    break
                time.sleep(0.05)
            time.sleep(self.pause_s)
        finally:
            life.close()
        self.show("stopped")
        moment = Moment.look(self.run_dir, self.lives[0], self.events)
        if moment is None or moment.trained == self.settings.steps or moment.lacks(self.settings):
            return None
        return moment

    def make_it_hard(self, life: Life) -> None:
        """See to it that the next checkpoint's cut has a full queue and results that nobody has consumed.

        As busy nodes do, first the trainer stands still until two batches wait, then the orchestrator until
        the weights are out that let the batch of that checkpoint ship: it finds them together with the
        results that came meanwhile.
        """
        trained = [(e["step"], e["t"]) for e in self.events.of("trained_batch")]
        step, at = trained[-1] if trained else (0, 0.0)
        if time.time() < at + 0.4 * self.settings.step_s:
            return  # the moment to kill at may be coming right now
        due = step + 3  # a batch ships when the policy is two steps behind it, and that one is being trained
        if due % self.settings.checkpoint_every or due in self.held:
            return
        if not self.not_before <= due < self.settings.steps:
            return
        self.held.add(due)
        life.hold("trainer")
        self.wait_until(life, lambda: self.queued() >= 2 * self.settings.batch_size)
        life.hold("orchestrator")
        life.let_go("trainer")
        self.wait_until(life, lambda: any(e["step"] > step for e in self.events.of("trained_batch")))
        life.let_go("orchestrator")

    def queued(self) -> int:
        return next((e["traces"] for e in reversed(self.events.events) if e["event"] == "queue"), 0)

    def wait_until(self, life: Life, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and life.running():
            self.show("training")
            if condition():
                return
            time.sleep(0.02)

    def second_life(self, moment: Moment) -> None:
        """Resume from the newest complete step and run to the end."""
        self.lives.append(prepare_resume(self.run_dir, moment.step))
        life = Life(self.run_dir, self.settings, 2)
        try:
            while life.running():
                self.show("resumed")
                time.sleep(0.1)
            self.show("done")
        finally:
            life.close()

    def show(self, what: str) -> None:
        self.events.poll()
        step = max((e["step"] for e in self.events.of("trained_batch", self.lives[-1].id)), default=None)
        if step is None:
            self.bar.update(self.task, description=f"{what} (processes start)")
        else:
            self.bar.update(self.task, description=what, completed=step)

    def judge(self, moment: Moment, expected_missing: set[str], *, threshold: float | None) -> Verdict:
        return judge(
            self.run_dir,
            self.settings,
            self.events,
            self.lives,
            moment,
            expected_missing,
            threshold=threshold,
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.async_rl", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pin", choices=("link", "copy", "skip"), default="link")
    parser.add_argument(
        "--run", type=Path, help="a new directory for the run; kept. Default: a temporary one"
    )
    parser.add_argument("--short", action="store_true", help="a few steps, no reward threshold")
    args = parser.parse_args()
    settings = Settings(seed=args.seed, pin=args.pin)
    if args.short:
        settings = msgspec.structs.replace(settings, **SHORT)
    directory = args.run or Path(tempfile.mkdtemp(prefix="prime-io-demo-run-"))
    console = Console()
    began = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.threads))
    for attempt in range(1, ATTEMPTS + 1):
        run = directory / f"attempt-{attempt}"
        if run.exists():
            parser.error(f"--run {directory} holds a run already; give a new directory")
        run.mkdir(parents=True)
        settings.save(run)
        demo = Demo(run, settings, console)
        with demo.bar:
            moment = demo.first_life()
            if moment is not None:
                expected_missing = moment.unpinned_and_gone(run)
                demo.second_life(moment)
                break
        console.print("no moment came that was hard enough to kill the run at; once more")
    else:
        console.print("giving up: nothing was shown")
        return 1
    verdict = demo.judge(moment, expected_missing, threshold=None if args.short else THRESHOLD)
    verdict.row("wall time", f"{time.monotonic() - began:.0f} s")
    table = Table(title=f"seed {settings.seed}, pin={settings.pin}", show_header=False)
    for name, value in verdict.rows:
        table.add_row(name, value)
    console.print(table)
    for promise in verdict.broken:
        console.print(f"[red]broken:[/] {promise}")
    if verdict.broken:
        console.print(f"the run is kept in {run}")
        return 1
    console.print("every invariant held")
    if args.run is None:
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
