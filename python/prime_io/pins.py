"""Pins: the names that a checkpoint holds on payload files, and the way back into a store."""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from prime_io import _native
from prime_io.manifest import How, Manifest, Pin
from prime_io.slices import in_slices
from prime_io.steps import log

if TYPE_CHECKING:
    from prime_io.segment import PayloadSegment
    from prime_io.store import PayloadStore

PinMode = Literal["link", "copy", "skip"]

_BATCH = 1024

# What an fdatasync that failed leaves behind is unknown, and a second one says it is fine.
_LOST = frozenset(
    {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT}
)


class Pins:
    """The payload files of a loaded checkpoint."""

    def __init__(
        self, directory: Path, manifest: Manifest, store: PayloadStore, *, copy: bool = False
    ) -> None:
        self._directory = directory
        self._pins = manifest.pins
        self._store = store
        self._copy = copy
        self.step = manifest.step
        self.lineage = manifest.lineage
        self.missing = tuple(manifest.missing)

    def __repr__(self) -> str:
        return f"Pins(step={self.step}, files={len(self._pins)}, missing={len(self.missing)})"

    @property
    def files(self) -> tuple[str, ...]:
        """The files that were there when the checkpoint was cut. `missing` are those that were not."""
        return tuple(self._pins)

    def pin(self, file: str) -> Pin:
        """What the manifest says of one of `files`."""
        return self._pins[file]

    def link_back(self, files: Iterable[str], *, dry_run: bool = False) -> dict[str, str | Exception]:
        """Give `files` their names in the store again, in one batch; copied where links do not reach.

        Per file: "present", "linked", "copied" or "replaced"; FileNotFoundError if it is not pinned and not
        there, CorruptPayloadError if the pin is not what was saved. Files saved with `pin="skip"` have no
        pin: they are "present" or gone. `dry_run` says what would be done, "linked" for a copy too, and
        touches nothing.
        """
        wanted = list(dict.fromkeys(files))
        known = [file for file in wanted if file in self._pins]
        asked = [(file, self._pins[file].size, self._pins[file].checksums) for file in known]
        results = self._store.link_back(self._directory, asked, copy=self._copy, dry_run=dry_run)
        answers: dict[str, str | Exception] = dict(zip(known, results, strict=True))
        for file in wanted:
            if file not in answers:
                why = (
                    "was missing when the checkpoint was cut"
                    if file in self.missing
                    else "is not in the checkpoint"
                )
                answers[file] = FileNotFoundError(errno.ENOENT, f"link back: the file {why}", file)
        return answers


class PinResult:
    """What a save pinned."""

    def __init__(self) -> None:
        self.pins: dict[str, Pin] = {}
        self.missing: list[str] = []
        self.copied = 0


def pin_all(
    commit: _native.Commit,
    store: PayloadStore,
    *,
    segments: Sequence[PayloadSegment],
    spills: Sequence[PayloadSegment],
    mode: PinMode,
) -> PinResult:
    """Pin every file that `segments` and `spills` name, each once, in one batch per way of pinning.

    Spill files are linked (else copied) in every mode: without them the work itself would be lost. A file
    whose bytes could not be made durable counts as missing, now and in later saves: the store remembers,
    since to fsync it again would succeed and lie.
    """
    spilled = _by_file(spills)
    payloads = {file: sums for file, sums in _by_file(segments).items() if file not in spilled}
    result = PinResult()
    modes: tuple[PinMode, PinMode] = ("link", mode)
    for sums, how in zip((spilled, payloads), modes, strict=True):
        files = list(sums)
        # In slices: making a native call's arguments and results holds the interpreter, item by item.
        for part in in_slices(files, size=_BATCH):
            if how != "skip":
                part = _sync(store, part, result.missing)
            answers = _sizes(store, part) if how == "skip" else _pin(commit, store, part, copy=how == "copy")
            for file, answer in zip(part, answers, strict=True):
                if isinstance(answer, FileNotFoundError):
                    result.missing.append(file)
                elif isinstance(answer, Exception):
                    raise answer
                else:
                    size, done = answer
                    result.copied += done == "copy"
                    result.pins[file] = Pin(size, tuple(dict.fromkeys(sums[file])), done)
    return result


def probe_links(store: PayloadStore, checkpoints: Path, file: str | None = None) -> bool:
    """Whether a file of the store can be hard-linked into `checkpoints`: tried, and logged in one line.

    Without `file` it is one that the store's maker wrote; a payload of another process may be another user's.
    FileNotFoundError if it is gone.
    """
    target = checkpoints / _native.temporary_name()
    source = Path(store.native.root) / (file or "STORE")
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError as error:
        log.warning(
            "%s cannot be linked into %s (%s): pins will be copies, which cost as much space and writing as "
            "the payloads; put both on one filesystem%s, or use pin='skip'",
            source,
            checkpoints,
            error.strerror,
            " and let the workers' files be writable for the owner (group_writable=True)" if file else "",
        )
        return False
    os.unlink(target)
    log.info(
        "%s of %s are pinned by hard links in %s",
        "workers' files" if file else "payloads",
        store.native.root,
        checkpoints,
    )
    return True


def _by_file(segments: Sequence[PayloadSegment]) -> dict[str, tuple[str, ...]]:
    """The checksums of each file's segments. Tuples of strings: the garbage collector does not walk those."""
    sums: dict[str, tuple[str, ...]] = {}
    for part in in_slices(segments):
        for segment in part:
            found = sums.setdefault(segment.file, ())
            if segment.checksum:
                sums[segment.file] = (*found, segment.checksum)
    return sums


def _sync(store: PayloadStore, files: Sequence[str], missing: list[str]) -> list[str]:
    """Make the bytes of `files` durable; returns those for which it worked."""
    good: list[str] = []
    for file, error in zip(files, store.sync(files), strict=True):
        if error is None:
            good.append(file)
            continue
        if not isinstance(error, FileNotFoundError):
            if not isinstance(error, OSError) or error.errno not in _LOST:
                raise error
            log.error("%s; no checkpoint holds it", error)
        missing.append(file)
    return good


def _pin(
    commit: _native.Commit, store: PayloadStore, files: Sequence[str], *, copy: bool
) -> list[tuple[int, How] | Exception]:
    answers: list[tuple[int, How] | Exception] = []
    for answer in commit.pin(store.native, files, copy=copy):
        if isinstance(answer, Exception):
            answers.append(answer)
        else:
            answers.append((answer[0], "copy" if answer[1] == "copy" else "link"))
    return answers


def _sizes(store: PayloadStore, files: Sequence[str]) -> list[tuple[int, How] | Exception]:
    present, sizes, errors = store.native.probe(list(files), sizes=True)
    answers: list[tuple[int, How] | Exception] = []
    for file, there, size, code in zip(files, present, array("q", sizes), array("i", errors), strict=True):
        if there:
            answers.append((size, "skip"))
        elif code in (errno.ENOENT, errno.EINVAL):
            answers.append(FileNotFoundError(errno.ENOENT, "probe: no such payload file", file))
        else:
            answers.append(OSError(code, f"probe: {os.strerror(code)}", file))
    return answers
