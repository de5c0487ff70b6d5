"""What a resume keeps, holds and asks for again. Usable alone, by a framework with its own sink.

`survivors` filters restored work by what the store still has, `Ledger` counts who needs which file,
`missing_rollouts` and `pin_set` answer for one group and one snapshot. No file is deleted here.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from .segment import FieldSpec, PayloadSegment, byte_range
from .types import OpenGroup

if TYPE_CHECKING:
    from .store import Probe

T = TypeVar("T")

_PAYLOAD = re.compile(r"v(0|[1-9][0-9]{0,17})/(?!\.)[A-Za-z0-9._-]{1,200}", re.ASCII)
LOST = ("missing", "short", "corrupt")


class HasSegments(Protocol):
    """Anything that names segments: a queued trace, a stored episode."""

    def segments(self) -> Iterable[PayloadSegment]:
        """Its segments."""
        ...


class HasPayloads(Protocol):
    """Where segments are looked for: a `PayloadStore`, or what one is going to be."""

    def probe(self, asked: Sequence[PayloadSegment]) -> Probe:
        """As `PayloadStore.probe`."""
        ...

    def checksums(self, files: Sequence[str]) -> list[frozenset[str]]:
        """As `PayloadStore.checksums`."""
        ...


S = TypeVar("S", bound=HasSegments)


def survivors(
    items: Sequence[S],
    *,
    store: HasPayloads,
    fields: Mapping[str, FieldSpec] | None = None,
    without: Callable[[S, frozenset[PayloadSegment]], S] | None = None,
    on_loss: Callable[[S, str], object] = lambda item, why: None,
) -> tuple[list[S], Counter[str]]:
    """The items whose required segments can be read, in order, and a count of what became of the others.

    All files are probed in one batch and the headers of those present checked in another; no payload byte is
    read and the GIL is released. The report counts, per dropped item, one of "missing" (a file is gone),
    "short" (it ends before a segment) or "corrupt" (its header is not the one the segment was made from), and
    per item that lost only fields whose `FieldSpec.required` is false, "optional": such an item is replaced by
    `without(item, lost segments)`. Fields not in `fields` are required. `on_loss(item, why)` is told of each
    item that is counted. An error that is not an answer (EACCES, EIO, ESTALE, ...) is raised: nothing may be
    dropped because of it.
    """
    verdicts = _judge({segment for item in items for segment in item.segments()}, store)
    kept: list[S] = []
    report: Counter[str] = Counter()
    for item in items:
        lost = [(verdicts[segment], segment) for segment in item.segments() if verdicts[segment]]
        fatal = [verdict for verdict, segment in lost if _required(segment.field, fields)]
        if fatal:
            why = min(fatal, key=LOST.index)
        elif lost and without is not None:
            why = "optional"
            kept.append(without(item, frozenset(segment for _, segment in lost)))
        else:
            kept.append(item)
            continue
        report[why] += 1
        on_loss(item, why)
    return kept, report


def missing_rollouts(group: OpenGroup) -> int:
    """How many rollouts a resume has to ask for again; errored and cancelled ones count as delivered."""
    return max(0, group.target - len(group.members) - group.cancelled)


def pin_set(items: Iterable[HasSegments]) -> dict[str, list[PayloadSegment]]:
    """The distinct files of a snapshot, each with the segments that name it."""
    files: dict[str, list[PayloadSegment]] = {}
    for item in items:
        for segment in item.segments():
            files.setdefault(segment.file, []).append(segment)
    return files


class Ledger:
    """Who needs which payload file: a count of holders per file, on the event loop's thread only.

    Work holds its files while it waits, a shipped batch until it was trained. While a snapshot is open (from the
    cut until its save is over), files whose last holder lets go wait for it: so a cut costs nothing per file, and
    releases wait for saves. A file that nobody needs any more waits in the ledger until `take_free`.

    Where many files are let go at once (a batch was trained, a save is over), only the first few are seen to then
    and there, the others by `take_free`, as many at a time as its caller asks for. Until then they count as needed.
    """

    AT_ONCE: Final = 256
    """How many files are seen to in one go: well under a millisecond of the event loop."""

    def __init__(self) -> None:
        self._holders: dict[str, int] = {}  # 0: only an open snapshot needs it
        self._sizes: dict[str, int] = {}
        self._versions: Counter[int] = Counter()
        self._shipped: dict[int, list[tuple[str, ...]]] = {}
        self._leaving: deque[str] = deque()  # holds that are given up
        self._closed: set[str] = set()  # let go while snapshots were open that are closed now
        self._snapshots: list[set[str]] = []  # open ones, the oldest first; what was let go since
        self._free: set[str] = set()
        self.bytes = 0
        """The size of all files in the ledger together, as far as their segments tell."""

    def __contains__(self, file: str) -> bool:
        return file in self._holders

    def __len__(self) -> int:
        return len(self._holders)

    def files(self) -> set[str]:
        """Every file that is needed: the roots of a sweep."""
        return set(self._holders)

    def hold(self, segments: Iterable[PayloadSegment]) -> tuple[str, ...]:
        """One more holder for each distinct file; returns them, to be given to `release` once."""
        sizes: dict[str, int] = {}
        for segment in segments:
            sizes[segment.file] = max(byte_range(segment)[1], sizes.get(segment.file, 0))
        versions = {file: version_of(file) for file in sizes}  # raises before anything is held
        for file, size in sizes.items():
            if file not in self._holders:
                self._holders[file] = self._sizes[file] = 0
                self._versions[versions[file]] += 1
                self._free.discard(file)
            elif not self._holders[file]:
                for waiting in (*self._snapshots, self._closed):
                    waiting.discard(file)
            self._holders[file] += 1
            if size > self._sizes[file]:
                self.bytes += size - self._sizes[file]
                self._sizes[file] = size
        return tuple(sizes)

    def release(self, files: Iterable[str]) -> None:
        """One holder less for each file."""
        for file in files:
            assert self._holders.get(file), f"{file} released more often than held"
            self._holders[file] -= 1
            if not self._holders[file]:
                if self._snapshots:
                    self._snapshots[-1].add(file)
                else:
                    self._let_go(file)

    def release_later(self, files: Iterable[str]) -> None:
        """As `release`, for many files at once."""
        self._leaving.extend(files)
        self._settle(self.AT_ONCE)

    def discard(self, segments: Iterable[PayloadSegment]) -> None:
        """Files that came with work nobody takes: free at once, unless somebody needs them."""
        self.release(self.hold(segments))

    def open_snapshot(self) -> set[str]:
        """From now on nothing is free that is held now, until `close_snapshot` gets this back."""
        snapshot: set[str] = set()
        self._snapshots.append(snapshot)
        return snapshot

    def close_snapshot(self, snapshot: set[str]) -> None:
        """The snapshot is saved, or has failed. What waited for it waits for older ones that are still open."""
        at = next(i for i, known in enumerate(self._snapshots) if known is snapshot)
        del self._snapshots[at]
        if at:
            self._snapshots[at - 1] |= snapshot
            return
        self._closed |= snapshot
        self._settle(self.AT_ONCE)

    def ship(self, step: int, held: Iterable[str]) -> None:
        """Holds that pass to batch `step`, until `trained`."""
        self._shipped.setdefault(step, []).append(tuple(held))

    def trained(self, step: int) -> None:
        """Batches up to `step` were read and trained; cumulative, repeating it is harmless."""
        for shipped in [s for s in self._shipped if s <= step]:
            for held in self._shipped.pop(shipped):
                self._leaving.extend(held)
        self._settle(self.AT_ONCE)

    @property
    def has_free(self) -> bool:
        """Whether `take_free` would return any."""
        return bool(self._free or self._leaving or self._closed)

    def take_free(self, limit: int | None = None) -> list[str]:
        """The files nobody needs any more, at most `limit` of them; the caller reclaims them.

        With a limit it may return none while `has_free` still says that there are: ask again.
        """
        self._settle(limit)
        n = len(self._free) if limit is None else min(limit, len(self._free))
        return sorted(self._free.pop() for _ in range(n))

    def oldest_version(self) -> int | None:
        """The least k over the `v<k>` of needed files."""
        return min(self._versions, default=None)

    def _settle(self, limit: int | None) -> None:
        """See to at most `limit` of the files that were let go."""
        left = len(self._leaving) + len(self._closed) if limit is None else limit
        while self._leaving and left > 0:
            self.release((self._leaving.popleft(),))
            left -= 1
        while self._closed and left > 0:
            file = self._closed.pop()
            if not self._holders[file]:
                self._let_go(file)
            left -= 1

    def _let_go(self, file: str) -> None:
        del self._holders[file]
        self.bytes -= self._sizes.pop(file)
        self._free.add(file)
        version = version_of(file)
        self._versions[version] -= 1
        if not self._versions[version]:
            del self._versions[version]


def version_of(file: str) -> int:
    """The k of `v<k>/<name>`. ValueError for any other path: names come from other machines."""
    match = _PAYLOAD.fullmatch(file)
    if match is None:
        raise ValueError(f"payload file {file!r} is not a plain name in a version directory (v<k>/<name>)")
    return int(match[1])


def _required(field: str, fields: Mapping[str, FieldSpec] | None) -> bool:
    spec = (fields or {}).get(field)
    return True if spec is None else spec.required


def _judge(segments: set[PayloadSegment], store: HasPayloads) -> dict[PayloadSegment, str]:
    """What is wrong with each segment: "" or one of LOST."""
    ordered = list(segments)
    probe = store.probe(ordered)
    probe.raise_errors(ordered)
    verdicts = {
        segment: "" if present else ("short" if size >= 0 else "missing")
        for segment, present, size in zip(ordered, probe.present, probe.size, strict=True)
    }
    checked = sorted({s.file for s, verdict in verdicts.items() if not verdict and s.checksum})
    checksums = dict(zip(checked, store.checksums(checked), strict=True))
    for segment, verdict in verdicts.items():
        if not verdict and segment.checksum and segment.checksum not in checksums[segment.file]:
            verdicts[segment] = "corrupt"
    return verdicts
