"""The store: payload files, written once, read once, reclaimed by one process.

Workers `write`, trainers `gather`, the orchestrator (the *owner*) alone reclaims, sweeps and retires. Calls
on many files or segments cross into the native engine once and release the GIL for all of their I/O; a
missing file is an answer there, not an exception.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from prime_io import _native
from prime_io._native import CorruptPayloadError
from prime_io.gather import Array, Gather, Ragged, Valid, gather_many, gather_ragged
from prime_io.segment import PayloadSegment, check, whole_tensor
from prime_io.sweep import GRACE_S, SweepReport, sweep
from prime_io.tensors import field_bytes
from prime_io.writer import FILLER, PayloadWriter

__all__ = ["CorruptPayloadError", "Gather", "PayloadStore", "PayloadWriter", "Probe", "Ragged", "SweepReport"]


_ANSWERS: Final = (0, errno.ENOENT, errno.ENODATA, errno.EINVAL)


class Probe(NamedTuple):
    """What is there, one item per file or segment asked for, in order."""

    present: Valid
    """bool[n]: a regular file, and not shorter than its segment needs."""
    size: npt.NDArray[np.int64]
    """int64[n]: bytes of the file, or -1 where it is missing or sizes were not asked for."""
    errno: npt.NDArray[np.int32]
    """int32[n]: 0, or why not: ENOENT missing, ENODATA too short, EINVAL no regular file or no valid name or
    segment. Anything else (EACCES, EIO, ELOOP, ESTALE) is an error: the file may well be there."""

    def raise_errors(self, asked: Sequence[str | PayloadSegment]) -> None:
        """Raise the first error that is no answer; `asked` is what was probed, for its name."""
        for i in np.flatnonzero(~np.isin(self.errno, _ANSWERS)).tolist():
            item, code = asked[i], int(self.errno[i])
            name = item if isinstance(item, str) else item.file
            raise OSError(code, f"probe: {os.strerror(code)}; whether the file is there is not known", name)


class PayloadStore:
    """A directory of payload files.

    `create` makes it if it is missing. `owner=True` takes the store's lock, which the one process that
    deletes must hold: BlockingIOError if another has it. `run_id` ties the store to a run: ValueError if it
    is another's. `group_writable=True` lets writers and the owner be different users of one group.

    `engine` reads: "auto" takes io_uring for what is not in the page cache (large pieces then go around it) and
    threads for the rest, and threads for all where io_uring is blocked; "threads" and "uring" force one. Results
    and errors are the same. OSError where "uring" is forced and blocked; see `engine_report`.

    Safe to use from several threads. A context manager; closing gives the lock up.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        create: bool = True,
        owner: bool = False,
        run_id: str = "",
        group_writable: bool = False,
        engine: Literal["auto", "threads", "uring"] = "auto",
    ) -> None:
        self.native: Final = _native.Store(
            os.fspath(root),
            create=create,
            owner=owner,
            run_id=run_id,
            group_writable=group_writable,
            engine=engine,
        )
        self._durable: set[str] = set()

    def __repr__(self) -> str:
        return f"PayloadStore({self.root!r}, owner={self.owner})"

    def __enter__(self) -> PayloadStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def root(self) -> str:
        """The directory, as it was given."""
        return self.native.root

    @property
    def uuid(self) -> str:
        """The identity of the store: 32 hex digits, made with it."""
        return self.native.uuid

    @property
    def run_id(self) -> str:
        """The run that the store belongs to, or ""."""
        return self.native.run_id

    @property
    def owner(self) -> bool:
        """Whether this object holds the store's lock."""
        return self.native.owner

    def close(self) -> None:
        """Give up the lock and the directory; later calls raise ValueError. Idempotent."""
        self.native.close()

    # --- writing ---

    def write(
        self, tensors: Mapping[str, object], *, version: int, durable: bool = False
    ) -> dict[str, PayloadSegment]:
        """Publish tensors as one file `v<version>/<unique>.safetensors`; returns a segment per field.

        A tensor of shape [n, *row] becomes n rows at `pos` 0 (`shift` them to their tokens); one without
        axes becomes a single row of shape (). See `tensors.to_bytes` for what may be written. The segments
        are valid when this returns; with `durable`, they also survive a crash of the machine. ValueError or
        TypeError for what is no tensor of the format, OSError from the filesystem; no file is left then.
        """
        [result] = self.write_many([tensors], version=version, durable=durable)
        if isinstance(result, Exception):
            raise result
        return result

    def write_many(
        self, batch: Iterable[Mapping[str, object]], *, version: int, durable: bool = False
    ) -> list[dict[str, PayloadSegment] | Exception]:
        """Publish several files at once: per mapping its segments, or the exception that it met.

        As `write`. A mapping that is no set of tensors raises at once, before anything is written.
        """
        _check_version(version)
        files = [
            (version, [(name, *field_bytes(name, obj)) for name, obj in tensors.items()]) for tensors in batch
        ]
        if any(not tensors for _, tensors in files):
            raise ValueError("no tensors to write: a sample without payload needs no file")
        results: list[dict[str, PayloadSegment] | Exception] = []
        for (_, tensors), result in zip(files, self.native.publish(files, durable=durable), strict=True):
            if isinstance(result, Exception):
                results.append(result)
                continue
            file, places = result
            results.append(
                {
                    name: whole_tensor(name, file, dtype, shape, offset, checksum)
                    for (name, dtype, shape, _), (offset, checksum) in zip(tensors, places, strict=True)
                }
            )
            if durable:
                self._durable.add(file)
        return results

    def writer(self, *, version: int) -> PayloadWriter:
        """A writer that takes rows append by append, for traces that grow turn by turn.

        Its files go to `v<version>`; see `PayloadWriter`. It stays usable when this store is closed.
        """
        _check_version(version)
        return PayloadWriter(self.native.writer(version))

    def sync(self, files: Iterable[str]) -> list[OSError | ValueError | None]:
        """Make the bytes of published files durable, and remember it; one result per file.

        ValueError for a name that is not allowed.

        Files known to be durable cost nothing. A file whose sync failed is never tried again: its bytes
        count as lost.
        """
        names = list(files)
        todo = [f for f in dict.fromkeys(names) if f not in self._durable]
        done = dict(zip(todo, self.native.sync(todo), strict=True)) if todo else {}
        self._durable.update(f for f, error in done.items() if error is None)
        return [done.get(f) for f in names]

    def is_durable(self, file: str) -> bool:
        """Whether this object wrote or synced the file durably. False says only that it does not know."""
        return file in self._durable

    # --- reading ---

    def segments(self, file: str) -> dict[str, PayloadSegment]:
        """A segment per tensor of any safetensors file in the store, by its header.

        So files of other writers are read by handle too. They start at `pos` 0 and have the names of their
        tensors, `<field>.<n>` in the file of a `PayloadWriter`, whose fillers are left out. FileNotFoundError
        if it is gone, CorruptPayloadError if it is no safetensors file or its size does not fit its header.
        """
        [result] = self.native.header([file])
        if isinstance(result, Exception):
            raise result
        return {
            name: whole_tensor(name, file, dtype, shape, offset, checksum)
            for name, dtype, shape, offset, _, checksum in result[1]
            if not name.startswith(FILLER)
        }

    def read(self, segment: PayloadSegment, *, out: object = None, verify: bool = False) -> Array:
        """All rows of one segment: [rows, *shape] in its own dtype.

        `out` and `verify` as in `gather`. FileNotFoundError if the file is gone, CorruptPayloadError if it is
        too short for the segment, ValueError for a segment that cannot be.
        """
        [result] = self.gather_many([_whole(segment, out)], verify=verify)
        if isinstance(result, Exception):
            raise result
        return result[0]

    def read_many(self, segments: Iterable[PayloadSegment], *, verify: bool = False) -> list[Array]:
        """All rows of each segment, in one crossing; the first exception that any of them met is raised."""
        arrays = []
        for result in self.gather_many([_whole(segment) for segment in segments], verify=verify):
            if isinstance(result, Exception):
                raise result
            arrays.append(result[0])
        return arrays

    def checksums(self, files: Sequence[str]) -> list[frozenset[str]]:
        """The checksums of each file's tensors by its header, in one crossing; none if it is gone or torn."""
        found = []
        for result in self.native.header(files):
            if isinstance(result, OSError) and not isinstance(result, FileNotFoundError):
                raise result
            tensors = [] if isinstance(result, Exception) else result[1]
            found.append(frozenset(tensor[5] for tensor in tensors if tensor[5]))
        return found

    def gather(
        self,
        segments: Iterable[PayloadSegment],
        field: str,
        lo: int,
        hi: int,
        *,
        out: object = None,
        fill: float | Literal["spread"] = 0,
        dtype: str | None = None,
        verify: bool = False,
    ) -> tuple[Array, Valid]:
        """Rows [lo, hi) of a field: (rows [hi - lo, *row_shape], valid bool[hi - lo]).

        Segments of other fields are passed over. Later segments win, whole rows at a time. dtype and row
        shape are those of `result_layout`: the widest dtype and the elementwise greatest row shape; narrower
        rows fill the leading entries. `fill` is in all other entries, `valid` marks the covered rows;
        "spread" gives uncovered rows the ids 0, 1, 2, ... along the last axis. `dtype` widens integers.

        `out` is a numpy array, a PyTorch CPU tensor (pinned or not) or a writable buffer. An array or tensor
        of shape [hi - lo, *row] decides dtype and row shape (both at least as wide as those of the
        segments), anything else gives its leading bytes. `rows` is then an array over its memory. Without
        `out`, the result owns pooled memory, given back when its last view dies.

        `verify` checks the XXH3 of every 1 MiB block that is touched. The GIL is released while reading.

        FileNotFoundError for a file that is gone; CorruptPayloadError for one that is too short or fails
        verification; ValueError for segments that cannot be, or an `out` that does not fit.
        """
        request = Gather(segments=segments, field=field, lo=lo, hi=hi, out=out, fill=fill, dtype=dtype)
        [result] = self.gather_many([request], verify=verify)
        if isinstance(result, Exception):
            raise result
        return result

    def gather_many(
        self, requests: Iterable[Gather], *, verify: bool = False
    ) -> list[tuple[Array, Valid] | Exception]:
        """Several gathers in one crossing: per request (rows, valid), or the exception that it met.

        As `gather`. A request that failed leaves anything in its `out`; the others are served.
        """
        return gather_many(self.native, requests, verify=verify)

    def gather_ragged(
        self,
        segments: Iterable[PayloadSegment],
        field: str,
        lo: int,
        hi: int,
        *,
        dtype: str | None = None,
        verify: bool = False,
    ) -> Ragged:
        """Tokens [lo, hi) of a ragged field, that is of `<field>.counts` and `<field>.values`.

        Later counts win, and bring their own values. Tokens that no counts cover have count 0 and are not
        valid. `dtype` widens the values. Two crossings: the counts, then the values. Errors as in `gather`;
        CorruptPayloadError also where the counts ask for more rows than the values segment has.
        """
        return gather_ragged(self.native, segments, field, lo, hi, dtype=dtype, verify=verify)

    def probe(self, asked: Iterable[str | PayloadSegment], *, sizes: bool = False) -> Probe:
        """Which files are there, in one batch; a segment also asks that the file reaches to its end.

        Sizes are given where any segment is asked for, or with `sizes`. A segment that cannot be (overflow,
        unknown dtype) is not present, EINVAL. Never raises for what it finds; see `Probe.errno`.
        """
        if isinstance(asked, str):
            raise TypeError(f"probe asks for several files at once: [{asked!r}]")
        present, size, code = self.native.probe(
            asked if isinstance(asked, list) else list(asked), sizes=sizes
        )
        return Probe(
            np.frombuffer(present, np.bool_), np.frombuffer(size, np.int64), np.frombuffer(code, np.int32)
        )

    # --- deleting: the owner only ---

    def reclaim(self, files: Iterable[str]) -> list[int | Exception]:
        """Unlink files that nobody holds; per file the bytes freed, -1 if it was gone, or the exception.

        Only files of version directories, `v<k>/<name>`: anything else is a ValueError in its place.
        PermissionError if this object is not the owner.
        """
        names = list(files)
        results = self.native.reclaim(names)
        self._durable.difference_update(names)
        return results

    def link_back(
        self,
        pins: str | os.PathLike[str],
        files: Sequence[tuple[str, int, Sequence[str]]],
        *,
        copy: bool = False,
        dry_run: bool = False,
    ) -> list[str | Exception]:
        """Give pinned files their names in the store again: each (file, size, checksums) of directory `pins`.

        Per file "present" (same inode, or same size and checksums), "linked", "copied", "replaced"
        (something else had the name), or the exception: CorruptPayloadError for a pin of another size or
        without one of the checksums, FileNotFoundError if there is neither pin nor file, ValueError for a name
        that is not `v<k>/<name>`. `dry_run` says what would be done, "linked" for a copy too, and touches
        nothing.
        """
        results = self.native.link_back(os.fspath(pins), files, copy=copy, dry_run=dry_run)
        if dry_run:
            return results
        # A pin was made durable before its checkpoint was; a link to it has the same bytes.
        linked = [f for (f, _, _), r in zip(files, results, strict=True) if r == "linked"]
        self._durable.update(linked)
        return results

    def sweep(
        self,
        *,
        roots: Iterable[str] | Callable[[], Iterable[str]],
        before: int | None = None,
        grace_s: float = GRACE_S,
        dry_run: bool = False,
    ) -> SweepReport:
        """Find what no root names, and unlink it.

        `roots` are the files that must stay: those of every live segment, open snapshot and checkpoint. A
        callable is called once the store has been listed, so that what was published and taken up
        meanwhile is not lost; pass one whenever anybody may be writing. If it raises, nothing is touched.

        `before=None` says that nobody writes (after a restore and before the first dispatch, or when all
        workers have left): every payload file that no root names goes, whatever its age. `before=v` says
        that only versions below v are no longer written: of those, files older than `grace_s` go, by their
        modification time, so that a file just published and not yet reported stays.

        Temporaries: those whose writer is known to be dead go, those that somebody may be writing go only
        if nobody writes (`before=None`) and they have not been written to for `grace_s`. Everything else
        that is not of the store is left alone. PermissionError unless owner.
        """
        if not self.owner:
            raise PermissionError(
                errno.EPERM, "only the owner sweeps: open the store with owner=True", self.root
            )
        if not dry_run:
            # Of an owner killed while it made the store: beside the version directories, which are listed below.
            root = _native.Root(self.root)
            for name, _ in root.list():
                if name.startswith(".tmp-") and _native.owner_is_dead(name):
                    root.remove(name)
        return sweep(
            self.native.scan, self.reclaim, roots=roots, before=before, grace_s=grace_s, dry_run=dry_run
        )

    def versions(self) -> list[int]:
        """The versions that have a directory, ascending."""
        return self.native.versions()

    def retire(self, version: int) -> bool:
        """Take the version directory `v<version>` out of the store, by one rename; whether it was there.

        For versions that nobody writes and no root names: a writer that is still in it gets OSError(ESTALE).
        `empty_trash` frees the space, in a thread if need be. PermissionError if this object is not the owner.
        """
        retired = self.native.retire(version)
        prefix = f"v{version}/"
        self._durable.difference_update([f for f in self._durable.copy() if f.startswith(prefix)])
        return retired

    def empty_trash(self) -> int:
        """Remove what was retired, also by an owner that died before it could; the number of files.

        PermissionError if this object is not the owner. The GIL is released.
        """
        return self.native.empty_trash()


def _whole(segment: PayloadSegment, out: object = None) -> Gather:
    """The request for all rows of a segment."""
    check(segment, negative_pos=True)
    at_zero = msgspec.structs.replace(segment, pos=0)
    return Gather(segments=[at_zero], field=segment.field, lo=0, hi=segment.rows, out=out)


def _check_version(version: int) -> None:
    if not 0 <= version < 2**63:
        raise ValueError(f"version is {version}: it counts training steps, from 0")
