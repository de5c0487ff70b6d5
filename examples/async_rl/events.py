"""An append-only log of what happened, one JSON line per event: the launcher judges the run by it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class EventLog:
    """Written by one process; a killed one leaves only whole lines behind."""

    def __init__(self, run: Path, process: str, lineage: str) -> None:
        directory = run / "events"
        directory.mkdir(exist_ok=True)
        self._fd = os.open(
            directory / f"{process}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
        )
        self._lineage = lineage

    def __call__(self, event: str, facts: dict[str, Any]) -> None:
        line = json.dumps({"event": event, "lineage": self._lineage, "t": time.time(), **facts})
        os.write(self._fd, line.encode() + b"\n")


class EventReader:
    """All events of a run so far; `poll` reads what is new."""

    def __init__(self, run: Path) -> None:
        self._directory = run / "events"
        self._read: dict[Path, int] = {}
        self.events: list[dict[str, Any]] = []

    def poll(self) -> list[dict[str, Any]]:
        new: list[dict[str, Any]] = []
        for path in sorted(self._directory.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            new += [json.loads(line) for line in whole.splitlines()]
        new.sort(key=lambda event: event["t"])
        self.events += new
        return new

    def of(self, event: str, lineage: str | None = None) -> Iterator[dict[str, Any]]:
        for e in self.events:
            if e["event"] == event and lineage in (None, e["lineage"]):
                yield e
