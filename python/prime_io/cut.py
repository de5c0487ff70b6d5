"""`Cut`: one instant of a run, taken on the event loop, made into what a checkpoint saves off it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from .segment import PayloadSegment
from .slices import in_slices
from .snapshot import Snapshot
from .types import QueuedTrace, StoredEpisode

_decode_trace = msgspec.msgpack.Decoder(QueuedTrace).decode


class Cut(NamedTuple):
    """One instant of the run, in a form that costs the event loop next to nothing."""

    step: int
    parts: dict[str, bytes]
    queue: list[msgspec.Raw]
    members: list[StoredEpisode]

    def snapshot(self) -> Snapshot:
        """The cut as a checkpoint takes it: packed, and with the segments to pin. Off the event loop."""
        segments: list[PayloadSegment] = []
        spills: list[PayloadSegment] = []
        everything: list[msgspec.Raw | StoredEpisode] = [*self.queue, *self.members]
        for part in in_slices(everything, size=32):
            for item in part:
                work: QueuedTrace | StoredEpisode
                work = item if isinstance(item, StoredEpisode) else _decode_trace(item)
                segments += work.segments()
                spills += work.spills()
        return Snapshot(self.step, self.state(), segments, spills)

    def state(self) -> dict[str, bytes]:
        """Its encoded parts, the queue among them."""
        return {**self.parts, "queue": msgspec.msgpack.encode(self.queue)}
