"""What happened, told outside the run: one line per event, appended by whoever it happened to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class EventLog:
    """All processes of a case append to one file; a killed one leaves whole lines behind."""

    def __init__(self, path: Path, *, life: int, role: str, lineage: str = "") -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._head = {"life": life, "role": role}
        self.lineage = lineage

    def __call__(self, event: str, facts: Mapping[str, Any] | None = None) -> None:
        line = {"event": event, **self._head, "lineage": self.lineage, **(facts or {})}
        os.write(self._fd, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        os.close(self._fd)


def read_events(path: Path) -> list[Event]:
    """All events in the order in which they were written."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]
