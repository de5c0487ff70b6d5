"""One case: a run and its kills, life after life, until one life reaches the end. Then the judge."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from prime_io import CheckpointManager, Lineage

from .events import EventLog, read_events
from .judge import judge
from .points import Kill
from .roles import Config, become

LIFE_S = 60.0
"""A life that takes longer hangs."""


class Case(msgspec.Struct, frozen=True):
    """`kills[i]` is what happens to life i; the first life without one lives to its end."""

    config: Config
    kills: list[Kill] = []
    solo: bool = False
    """All in one process, in virtual time."""
    rewind: bool = False
    """Resume from the oldest complete step instead of the newest."""
    expected: list[list[str]] | None = None
    """The trace ids of each step, where they do not depend on kills."""


class Result(msgspec.Struct):
    """What came of a case."""

    case: Case
    fired: list[str]
    violations: list[str]
    lives: int
    seconds: float
    counts: dict[str, dict[str, int]]
    """Calls per point, by role; of lives that were not killed."""
    halves: dict[str, list[str]]
    resumed_counts: dict[str, dict[str, int]]
    """The same, of lives that resumed."""
    rows: dict[str, int]
    steps: list[list[str]]
    """The trace ids of each step."""


def run_case(case: Case, directory: Path) -> Result:
    """Live it and judge it. The directory must not exist; it is removed unless something was violated."""
    started = time.monotonic()
    directory.mkdir(parents=True)
    # What is not the run's own must stay as it is.
    outside = {directory / "outside" / f"{i}.safetensors": b"%d" % i for i in range(3)}
    outside |= {directory / "run" / name: b"mine" for name in ("notes.txt", "checkpoints/notes.txt")}
    outside[directory / "run" / "payloads" / "v0" / "notes.txt"] = b"mine"
    for path, data in outside.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    before = {path: path.stat() for path in outside}

    lives = _Lives(case, directory)
    violations = lives.all()
    for path, data in outside.items():
        if (
            not path.exists()
            or path.read_bytes() != data
            or path.stat().st_mtime_ns != before[path].st_mtime_ns
        ):
            violations.append(f"a file that is not the run's own was touched: {path.name}")
    events = read_events(directory / "events.jsonl")
    verdict = judge(directory / "run", case.config, events, finished=not violations)
    result = Result(
        case,
        lives.fired,
        violations + verdict.violations,
        lives.number,
        time.monotonic() - started,
        {},
        {},
        {},
        verdict.rows,
        verdict.steps,
    )
    if case.expected is not None and not result.violations and verdict.steps != case.expected:
        wrong = [i + 1 for i, (a, b) in enumerate(zip(verdict.steps, case.expected, strict=False)) if a != b]
        result.violations.append(f"steps {wrong} trained other traces than a run that is not killed")
    for event in events:
        if event["event"] == "points":
            counts = result.resumed_counts if event["life"] else result.counts
            counts[event["role"]] = event["counts"]
            result.halves[event["role"]] = event["halves"]
    if not result.violations:
        shutil.rmtree(directory)
    return result


class _Lives:
    def __init__(self, case: Case, directory: Path) -> None:
        self.case, self.directory = case, directory
        self.number = 0
        self.fired: list[str] = []
        self._lingering: dict[int, float] = {}  # pid: when it is killed at last
        self._log: EventLog
        self._chance = random.Random(f"{case.config.seed}/{case.kills}")

    def all(self) -> list[str]:
        """Life after life; returns what went wrong, empty if the run has ended."""
        log = self._log = EventLog(self.directory / "events.jsonl", life=-1, role="launcher")
        try:
            while self.number < len(self.case.kills) + 3:
                kill = self.case.kills[self.number] if self.number < len(self.case.kills) else None
                ended = self._live(kill, log)
                self.number += 1
                if ended is not None:
                    return ended
            return [f"the run did not end within {self.number} lives"]
        finally:
            log.close()
            for pid in self._lingering:
                _end(pid)

    def _live(self, kill: Kill | None, log: EventLog) -> list[str] | None:
        """None: killed as planned. Else the run is over, well or not."""
        log("looks")  # what a straggler of the dead life completes from here on need not be seen
        step, steps = self._steps()
        log("resume", {"life_to_come": self.number, "step": step, "complete": steps})
        prepared = self._run(["prepare"], kill if kill and kill.role == "prepare" else None, step)
        if prepared != "ended":
            if isinstance(prepared, list) and self._steps()[1] != steps:
                log("too_late")  # a straggler has just made another step complete: choose again
                return None
            return prepared
        roles = ["orchestrator"] if self.case.solo else ["orchestrator", "trainer", "writer-0", "writer-1"]
        status = self._run(roles, None if kill and kill.role == "prepare" else kill, step)
        if (
            status == "ended"
            and kill is not None
            and kill.point == "term"
            and self._steps()[1][-1:] != [self.case.config.steps]
        ):
            return None  # it stopped as it was told
        return [] if status == "ended" else status

    def _steps(self) -> tuple[int | None, list[int]]:
        run = self.directory / "run"
        try:
            steps = CheckpointManager(run_dir=run, lineage=Lineage.load(run)).steps()
        except FileNotFoundError:
            return None, []
        if not steps:
            return None, []
        return (steps[0] if self.case.rewind else steps[-1]), steps

    def _run(self, roles: list[str], kill: Kill | None, step: int | None) -> list[str] | str | None:
        """Start processes and wait. "ended": all by themselves. None: killed. Else what went wrong."""
        pairs = {role: socket.socketpair() for role in roles if role.startswith("writer")}
        gate_read, gate_write = os.pipe()
        running: dict[int, str] = {}
        leader = 0

        def starter(role: str) -> Callable[[], int]:
            mine = [pairs[role][1]] if role in pairs else [a for a, _ in pairs.values()]
            if role not in pairs and role != "orchestrator":
                mine = []
            named = kill if kill is not None and kill.role == role else None

            def start() -> int:
                os.close(gate_write)
                for pair in pairs.values():
                    for sock in pair:
                        if sock not in mine:
                            sock.close()
                return become(
                    role,
                    self.directory,
                    self.case.config,
                    self.number,
                    kill=named,
                    sockets=mine,
                    step=step,
                    released=lambda: os.read(gate_read, 1),
                )

            return start

        for role in roles:
            pid = _fork(starter(role), group=leader)
            leader = leader or pid
            running[pid] = role
        os.close(gate_read)
        for pair in pairs.values():
            for sock in pair:
                sock.close()
        tracer = None
        if kill is not None and kill.point.startswith("syscall:"):
            tracer = _trace(next(pid for pid, role in running.items() if role == kill.role), kill)
        os.close(gate_write)
        try:
            return self._wait(running, kill)
        except BaseException:
            for pid in running:
                _end(pid)
            raise
        finally:
            if tracer is not None:
                tracer.kill()
                tracer.wait()

    def _wait(self, running: dict[int, str], kill: Kill | None) -> list[str] | str | None:
        started = time.monotonic()
        at = started + kill.nth / 1000 if kill is not None and kill.point in ("time", "term") else None
        killed_from: float | None = None
        alone = self.directory / f"alone-{self.number}"
        while running:
            now = time.monotonic()
            for pid in [pid for pid, until in self._lingering.items() if now > until]:
                _end(pid)
                del self._lingering[pid]
            if not self._lingering and not alone.exists():
                alone.touch()
            if at is not None and now > at:
                assert kill is not None
                at = None
                if kill.point == "term":
                    self.fired.append(str(kill))
                sent = signal.SIGTERM if kill.point == "term" else signal.SIGKILL
                for pid in [p for p, role in running.items() if kill.everything or role == kill.role]:
                    os.kill(pid, sent)  # not waited for yet, so the pid is still that process
            if killed_from is not None and now > killed_from:
                for pid in running:
                    _end(pid)
                return None
            for pid in list(running):
                done, status = os.waitpid(pid, os.WNOHANG)
                if not done:
                    continue
                role = running.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                # Told to stop before it could listen, a process dies of it.
                if code in (-signal.SIGKILL, -signal.SIGTERM) and kill is not None:
                    if role == kill.role or kill.everything:
                        self.fired += [str(kill)] if str(kill) not in self.fired[-1:] else []
                        if kill.everything:
                            killed_from = now
                        elif role == "orchestrator":
                            # The others learn of it in their own time, while the next life has begun.
                            self._log("lingers", {"lineage": Lineage.load(self.directory / "run").id})
                            for other in running:
                                self._lingering[other] = now + self._chance.uniform(0, 0.6)
                            return None
                        elif not role.startswith("writer"):
                            killed_from = now + self._chance.uniform(0, 0.3)
                elif code:
                    for other in running:
                        _end(other)
                    return [f"life {self.number}: {role} failed: {self._tail(role)}"]
            if now - started > LIFE_S:
                for pid in running:
                    _end(pid)
                return [f"life {self.number}: {', '.join(running.values())} hung"]
            time.sleep(0.003)
        return None if killed_from is not None else "ended"

    def _tail(self, role: str) -> str:
        path = self.directory / f"life-{self.number}-{role}.log"
        lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
        return lines[-1] if lines else "no output"


def _fork(main: Callable[[], int], *, group: int) -> int:
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, group or pid)
        return pid
    status = 2
    try:
        os.setpgid(0, group)
        status = main()
        threading._shutdown()  # type: ignore[attr-defined]  # as at the end of any interpreter: threads are joined
    finally:
        os._exit(status)


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def can_trace() -> bool:
    """Whether strace is there and may attach."""
    if shutil.which("strace") is None:
        return False
    command = ["strace", "-f", "-e", "trace=none", "-e", "inject=getcwd:retval=1", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _trace(pid: int, kill: Kill) -> subprocess.Popen[bytes]:
    """Let strace kill `pid` when a thread of it enters the nth of some system calls."""
    names = kill.point.removeprefix("syscall:")
    inject = f"inject={names}:signal=SIGKILL:when={kill.nth}"
    tracer = subprocess.Popen(
        ["strace", "-f", "-p", str(pid), "-o", "/dev/null", "-e", f"trace={names}", "-e", inject],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert tracer.stderr is not None
    tracer.stderr.readline()  # "Process <pid> attached"
    return tracer
