"""One life of the run: a trainer, an orchestrator and inference workers, as real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from .settings import Settings


class Life:
    """Starts the processes; they end by themselves, or by `kill`."""

    def __init__(self, run: Path, settings: Settings, number: int) -> None:
        self._sockets = Path(tempfile.mkdtemp(prefix="prime-io-demo-"))  # a socket's path must be short
        self._logs = run / "logs"
        self._logs.mkdir(exist_ok=True)
        self._number = number
        socket = str(self._sockets / "workers")
        self.processes = {"orchestrator": self._start("orchestrator", "orchestrate", run, "--socket", socket)}
        self.processes["trainer"] = self._start("trainer", "trainer", run)
        for i in range(settings.workers):
            name = f"worker-{i}"
            self.processes[name] = self._start(name, "worker", run, "--socket", socket, "--name", name)

    def _start(self, name: str, module: str, *args: object) -> subprocess.Popen[bytes]:
        with self._log(name).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", f"examples.async_rl.{module}", *map(str, args)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _log(self, name: str) -> Path:
        return self._logs / f"life-{self._number}-{name}.log"

    def running(self) -> bool:
        """Whether any process still runs. RuntimeError, with the end of its log, if one has failed."""
        for name, process in self.processes.items():
            if process.poll() not in (None, 0):
                tail = self._log(name).read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{name} ended with status {process.returncode}:\n{tail}")
        return any(process.poll() is None for process in self.processes.values())

    def hold(self, name: str) -> None:
        """Stop a process where it is, as a busy node does for a moment."""
        os.kill(self.processes[name].pid, signal.SIGSTOP)

    def let_go(self, name: str) -> None:
        os.kill(self.processes[name].pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to every process at once, as when a node goes."""
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._sockets, ignore_errors=True)
