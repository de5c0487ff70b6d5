"""What is saved, and what saving it came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from prime_io.slices import let_go

if TYPE_CHECKING:
    from prime_io.segment import PayloadSegment


@dataclass(frozen=True)
class Snapshot:
    """One instant of a run: encoded state by part, the payload segments it names, and those of spill files.

    Frozen when made: what the caller does to its dicts and lists afterwards does not reach the checkpoint.
    """

    step: int
    state: Mapping[str, bytes | bytearray]
    segments: Sequence[PayloadSegment]
    spills: Sequence[PayloadSegment] = ()

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError(f"snapshot: step {self.step} is negative")
        state = {}
        for part, blob in self.state.items():
            if not isinstance(blob, bytes | bytearray | memoryview):
                raise TypeError(f"snapshot: state[{part!r}] is a {type(blob).__name__}; encode it to bytes")
            state[part] = bytes(blob)
        object.__setattr__(self, "state", MappingProxyType(state))
        object.__setattr__(self, "segments", list(self.segments))
        object.__setattr__(self, "spills", list(self.spills))

    def let_go(self) -> None:
        """Give up the segments once it is saved. In a thread: there are tens of thousands of them."""
        for items in (self.segments, self.spills):
            assert isinstance(items, list), "made in __post_init__"
            let_go(items)


@dataclass(frozen=True)
class SaveReport:
    """What a save wrote. `pinned` counts all pins, `copied` those among them that are not links."""

    step: int
    pinned: int
    copied: int
    missing: tuple[str, ...]
    state_bytes: int
    seconds: float
    path: Path = field(repr=False)
