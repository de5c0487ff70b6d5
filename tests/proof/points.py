"""Where a process may be killed: before, halfway through, or after the nth of the calls that change a disk.

The calls are those of the native engine. `install` puts proxies in the place of its classes, in the process under
test only; the library has no hooks for this.
"""

from __future__ import annotations

import contextvars
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

import prime_io.checkpoint
from prime_io import Orchestrator, PayloadStore, _native

from .events import EventLog

phase: contextvars.ContextVar[str] = contextvars.ContextVar("phase", default="")


class Kill(msgspec.Struct, frozen=True):
    """SIGKILL of `role` at the `nth` call named `point`. `everything`: all processes of the life with it.

    Other points: "time" (`nth` ms after the start), "syscall:<names>" (the nth of them in one thread), and
    "term", which is SIGTERM after `nth` ms: the life ends in order, and another one goes on.
    """

    role: str
    point: str
    nth: int
    when: str = "before"
    everything: bool = True

    def __str__(self) -> str:
        """One line for people."""
        alone = "" if self.everything or self.point == "term" else " (alone)"
        return f"{self.role}: {self.when} {self.point} #{self.nth}{alone}"


class Points:
    """Counts the named calls of one process, and kills it at one of them."""

    def __init__(self, kill: Kill | None, log: EventLog) -> None:
        self._kill = kill
        self._log = log
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.halves: set[str] = set()

    def step(self, name: str, call: Callable[[], Any], half: Callable[[], object] | None = None) -> Any:
        name = f"{where}/{name}" if (where := phase.get()) else name
        with self._lock:
            self.counts[name] += 1
            n = self.counts[name]
            if half is not None:
                self.halves.add(name)
        kill = self._kill
        if kill is None or kill.point != name or kill.nth != n:
            return call()
        if kill.when == "half" and half is not None:
            half()
        elif kill.when == "after":
            call()
        self._log("killed", {"kill": str(kill)})
        (os.killpg if kill.everything else os.kill)(
            os.getpgrp() if kill.everything else os.getpid(), signal.SIGKILL
        )
        raise AssertionError("unreachable")

    def report(self) -> None:
        """Say what was counted, for those who plan where to kill."""
        self._log("points", {"counts": dict(self.counts), "halves": sorted(self.halves)})


@contextmanager
def during(name: str) -> Iterator[None]:
    """Names of points in here begin with `<name>/`, in threads that are given this context too."""
    token = phase.set(name)
    try:
        yield
    finally:
        phase.reset(token)


def install(points: Points) -> None:
    """From here on, this process goes through `points`."""
    step = points.step
    native_store, native_commit, native_root = _native.Store, _native.Commit, _native.Root

    class Proxy:
        real: Any

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    class Store(Proxy):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.real = native_store(*args, **options)

        def publish(self, files: Any, **options: Any) -> Any:
            spill = any("." in name or name == "native" for _, tensors in files for name, *_ in tensors)
            return step(
                "publish.spill" if spill else "publish.payload",
                lambda: self.real.publish(files, **options),
                lambda: _torn(Path(self.real.root) / f"v{files[0][0]}"),
            )

        def sync(self, files: Any) -> Any:
            return step("sync", lambda: self.real.sync(files), lambda: self.real.sync(_first(files)))

        def reclaim(self, files: Any) -> Any:
            files = list(files)
            return step("reclaim", lambda: self.real.reclaim(files), lambda: self.real.reclaim(_first(files)))

        def link_back(self, pins: str, files: Any, **options: Any) -> Any:
            return step(
                "link_back",
                lambda: self.real.link_back(pins, files, **options),
                lambda: self.real.link_back(pins, _first(files), **options),
            )

        def scan(self) -> Any:
            return step("scan", self.real.scan)

        def probe(self, files: Any, **options: Any) -> Any:
            return step("probe", lambda: self.real.probe(files, **options))

    class Commit(Proxy):
        def __init__(
            self, checkpoints: str, number: int, component: str, *, adopt: str | None = None
        ) -> None:
            self.verb = "save" if adopt is None else "commit"
            self.real = step(
                f"{self.verb}.begin", lambda: native_commit(checkpoints, number, component, adopt=adopt)
            )

        def pin(self, store: Any, files: Any, **options: Any) -> Any:
            pin = self.real.pin
            return step(
                "save.pin",
                lambda: pin(store.real, files, **options),
                lambda: pin(store.real, _first(files), **options),
            )

        def write(self, name: str, data: Any) -> Any:
            return step("save.write", lambda: self.real.write(name, data))

        def files(self) -> Any:
            return step("commit.files", self.real.files)

        def finish(self, manifest: Any) -> None:
            step(f"{self.verb}.finish", lambda: self.real.finish(manifest))

    class Root(Proxy):
        def __init__(self, path: str, **options: Any) -> None:
            self.path = Path(path)
            self.real = native_root(path, **options)

        def write(self, path: str, data: Any, **options: Any) -> None:
            step(
                f"write.{_kind(path)}",
                lambda: self.real.write(path, data, **options),
                lambda: _torn((self.path / path).parent),
            )

        def rename(self, source: str, target: str) -> None:
            step(f"rename.{_kind(target)}", lambda: self.real.rename(source, target))

        def remove(self, path: str) -> None:
            step(
                f"remove.{_kind(path)}",
                lambda: self.real.remove(path),
                lambda: _half_of(self.path / path),
            )

    _native.Store, _native.Commit, _native.Root = Store, Commit, Root  # type: ignore[misc,assignment]
    _in_phase(PayloadStore, "sweep", "sweep")
    _in_phase(prime_io.checkpoint, "apply_retention", "retention")
    restore = Orchestrator.restore

    async def restored(self: Orchestrator, number: int) -> Any:
        with during("restore"):
            return await restore(self, number)

    Orchestrator.restore = restored  # type: ignore[method-assign]


def _in_phase(owner: Any, name: str, called: str) -> None:
    function = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        with during(called):
            return function(*args, **options)

    setattr(owner, name, wrapped)


def _first(files: Any) -> Any:
    return list(files)[: len(files) // 2]


def _torn(directory: Path) -> None:
    """What a writer leaves that dies before its rename."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _native.temporary_name()).write_bytes(b"\0" * 100)


def _half_of(tree: Path) -> None:
    names = sorted(path for path in tree.rglob("*") if path.is_file()) if tree.is_dir() else []
    for path in names[: (len(names) + 1) // 2]:
        path.unlink()


def _kind(path: str) -> str:
    if path.startswith(".trash-"):
        return "trash"
    if path.startswith(".tmp-"):
        return "temporary"
    first = path.partition("/")[0]
    return {"batches": "batch", "acks": "ack"}.get(first, first)
