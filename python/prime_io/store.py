"""The store: payload files, written once, read once, reclaimed by one process.

Workers `write`, trainers `gather`, the orchestrator (the *owner*) alone reclaims, sweeps and retires. Calls
on many files or segments cross into the native engine once and release the GIL for all of their I/O; a
missing file is an answer there, not an exception.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from prime_io import _native
from prime_io._native import CorruptPayloadError
from prime_io.segment import (
    ITEMSIZE,
    PayloadSegment,
    byte_range,
    check,
    ragged_pairs,
    result_layout,
    row_bytes,
    visible,
    widens,
)
from prime_io.tensors import destination, fill_item, from_buffer, layout, to_bytes

__all__ = ["Gather", "PayloadStore", "Probe", "Ragged", "SweepReport"]

Array = npt.NDArray[Any]
Valid = npt.NDArray[np.bool_]

GRACE_S: Final = 3600.0
"""How long a sweep spares what a process that is alive may still be writing or handing over, in seconds."""

_ANSWERS: Final = (0, errno.ENOENT, errno.ENODATA, errno.EINVAL)
_NAME: Final = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,200}(/(?!\.)[A-Za-z0-9._-]{1,200})*")
_VERSION: Final = re.compile(r"v(0|[1-9][0-9]*)/")


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


class Ragged(NamedTuple):
    """The rows of a ragged field."""

    counts: npt.NDArray[np.int64]
    """int64[hi - lo]: how many rows of `values` each token has; 0 where none are known."""
    values: Array
    """[counts.sum(), *row_shape]: the rows of all tokens, one token after the other."""
    valid: Valid
    """bool[hi - lo]: which tokens are covered by a segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """One request of `PayloadStore.gather_many`; the fields are the parameters of `PayloadStore.gather`."""

    segments: Iterable[PayloadSegment]
    field: str
    lo: int
    hi: int
    out: object = None
    fill: float | Literal["spread"] = 0
    dtype: str | None = None


class SweepReport(msgspec.Struct, frozen=True):
    """What a sweep found and did (or, with `dry_run`, would have done)."""

    kept: int
    """Payload files that a root names."""
    reclaimed: list[str]
    """Files unlinked: named by no root. Includes temporaries."""
    bytes: int
    """Their bytes."""
    spared: int
    """Files named by no root that are too young, or of a version that may still be written."""
    temporaries: int
    """How many of the reclaimed files were temporaries that a writer left behind."""
    foreign: int
    """Files that are not of this store; never touched."""
    errors: list[tuple[str, str]]
    """(file, message) for each that could not be unlinked; it stays."""


class PayloadStore:
    """A directory of payload files.

    `create` makes it if it is missing. `owner=True` takes the store's lock, which the one process that
    deletes must hold: BlockingIOError if another has it. `run_id` ties the store to a run: ValueError if it
    is another's. `group_writable=True` lets writers and the owner be different users of one group.

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
    ) -> None:
        self.native: Final = _native.Store(
            os.fspath(root), create=create, owner=owner, run_id=run_id, group_writable=group_writable
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
        if not 0 <= version < 2**63:
            raise ValueError(f"version is {version}: it counts training steps, from 0")
        files = [(version, [_tensor(name, obj) for name, obj in tensors.items()]) for tensors in batch]
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
                    name: _segment(name, file, dtype, shape, offset, checksum)
                    for (name, dtype, shape, _), (offset, checksum) in zip(tensors, places, strict=True)
                }
            )
            if durable:
                self._durable.add(file)
        return results

    def sync(self, files: Iterable[str]) -> list[OSError | None]:
        """Make the bytes of published files durable, and remember it; one result per file.

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

        So files of other writers are read by handle too. They start at `pos` 0. FileNotFoundError if it is
        gone, CorruptPayloadError if it is no safetensors file or its size does not fit its header.
        """
        [result] = self.native.header([file])
        if isinstance(result, Exception):
            raise result
        return {
            name: _segment(name, file, dtype, shape, offset, checksum)
            for name, dtype, shape, offset, _, checksum in result[1]
        }

    def read(self, segment: PayloadSegment, *, out: object = None, verify: bool = False) -> Array:
        """All rows of one segment: [rows, *shape] in its own dtype.

        `out` and `verify` as in `gather`. FileNotFoundError if the file is gone, CorruptPayloadError if it is
        too short for the segment, ValueError for a segment that cannot be.
        """
        check(segment, negative_pos=True)
        at_zero = msgspec.structs.replace(segment, pos=0)
        request = Gather(segments=[at_zero], field=segment.field, lo=0, hi=segment.rows, out=out)
        [result] = self.gather_many([request], verify=verify)
        if isinstance(result, Exception):
            raise result
        return result[0]

    def read_many(self, segments: Iterable[PayloadSegment], *, verify: bool = False) -> list[Array]:
        """All rows of each segment, in one crossing; the first exception that any of them met is raised."""
        requests = [
            Gather(segments=[msgspec.structs.replace(s, pos=0)], field=s.field, lo=0, hi=max(s.rows, 0))
            for s in segments
        ]
        arrays = []
        for result in self.gather_many(requests, verify=verify):
            if isinstance(result, Exception):
                raise result
            arrays.append(result[0])
        return arrays

    def checksums(self, files: Sequence[str]) -> list[frozenset[str]]:
        """The checksums of each file's tensors by its header, in one crossing; empty if it is gone or torn."""
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
        results: list[tuple[Array, Valid] | Exception | None] = []
        plans: list[_Plan] = []
        for request in requests:
            try:
                plans.append(_Plan(request, at=len(results)))
                results.append(None)
            except (ValueError, TypeError) as e:
                results.append(e)
        if plans:
            answers = self.native.gather([plan.native() for plan in plans], verify=verify)
            for plan, answer in zip(plans, answers, strict=True):
                if isinstance(answer, Exception):
                    results[plan.at] = answer
                else:
                    results[plan.at] = plan.wrap(*answer)
        return [r for r in results if r is not None]

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
        own = [s for s in segments if s.field in (f"{field}.counts", f"{field}.values")]
        if not 0 <= lo <= hi:
            raise ValueError(f"rows [{lo}, {hi}) are no range: 0 <= lo <= hi must hold")
        owner = np.full(hi - lo, -1, np.int64)
        counts = [s for s in own if s.field == f"{field}.counts"]
        pairs = ragged_pairs(own, field)
        for i, c in enumerate(counts):
            owner[max(c.pos - lo, 0) : max(c.pos + c.rows - lo, 0)] = i
        asked = [i for i in np.unique(owner).tolist() if i >= 0]
        whole = [pairs[i].counts for i in asked]
        requests = [Gather(segments=[c], field=c.field, lo=0, hi=c.rows) for c in whole]
        known = self.gather_many(requests, verify=verify)
        result = np.zeros(hi - lo, np.int64)
        ends: dict[int, npt.NDArray[np.int64]] = {}
        for i, answer in zip(asked, known, strict=True):
            if isinstance(answer, Exception):
                raise answer
            c, pair = counts[i], pairs[i]
            sums = _running_sum(answer[0], pair.values)
            ends[i] = sums
            mine = np.flatnonzero(owner == i)
            rows = mine + (lo - c.pos + pair.skipped)
            result[mine] = sums[rows + 1] - sums[rows]
        parts: list[PayloadSegment] = []
        total = 0
        cuts = np.flatnonzero(np.diff(owner, prepend=-2, append=-2)).tolist()
        for first, end in pairwise(cuts):
            i = int(owner[first])
            if i < 0:
                continue
            v, row = pairs[i].values, first + lo - counts[i].pos + pairs[i].skipped
            begin, stop = int(ends[i][row]), int(ends[i][row + end - first])
            offset = v.offset + begin * row_bytes(v.dtype, v.shape)
            parts.append(msgspec.structs.replace(v, offset=offset, pos=total, rows=stop - begin))
            total += stop - begin
        valid: Valid = owner >= 0
        if not parts:
            parts = [msgspec.structs.replace(s, pos=0, rows=0) for s in own if s.field == f"{field}.values"]
        values, _ = self.gather(parts, f"{field}.values", 0, total, dtype=dtype, verify=verify)
        return Ragged(result, values, valid)

    def probe(self, asked: Iterable[str | PayloadSegment], *, sizes: bool = False) -> Probe:
        """Which files are there, in one batch; a segment also asks that the file reaches to its end.

        Sizes are given where any segment is asked for, or with `sizes`. A segment that cannot be (overflow,
        unknown dtype) is not present, EINVAL. Never raises for what it finds; see `Probe.errno`.
        """
        names: list[str] = []
        needs: list[int] = []
        wrong: list[int] = []
        with_needs = sizes
        for i, item in enumerate(asked):
            if isinstance(item, str):
                names.append(item)
                needs.append(0)
                continue
            with_needs = True
            names.append(item.file)
            try:
                needs.append(byte_range(item)[1])
            except ValueError:
                needs.append(0)
                wrong.append(i)
        present, size, code = self.native.probe(names, needs=needs if with_needs else None, sizes=with_needs)
        result = Probe(
            np.frombuffer(present, np.bool_), np.frombuffer(size, np.int64), np.frombuffer(code, np.int32)
        )
        result.present[wrong], result.errno[wrong] = False, errno.EINVAL
        return result

    # --- deleting: the owner only ---

    def reclaim(self, files: Iterable[str]) -> list[int | Exception]:
        """Unlink files that nobody holds; per file the bytes freed, -1 if it was gone, or the exception.

        PermissionError if this object is not the owner.
        """
        names = list(files)
        done = iter(self.native.reclaim([f for f in names if "/" in f]))
        self._durable.difference_update(names)
        return [next(done) if "/" in f else _no_payload(f) for f in names]

    def link_back(
        self,
        pins: str | os.PathLike[str],
        files: Sequence[tuple[str, int, Sequence[str]]],
        *,
        copy: bool = False,
    ) -> list[str | Exception]:
        """Give pinned files their names in the store again: each (file, size, checksums) of directory `pins`.

        Per file "present" (same inode, or same size and checksums), "linked", "copied", "replaced"
        (something else had the name), or the exception: CorruptPayloadError for a pin of another size or
        without one of the checksums, FileNotFoundError if there is neither pin nor file.
        """
        done = iter(self.native.link_back(os.fspath(pins), [f for f in files if "/" in f[0]], copy=copy))
        results = [next(done) if "/" in f else _no_payload(f) for f, _, _ in files]
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
        if before is not None and before < 0:
            raise ValueError(f"before is {before}: versions count from 0")
        if not grace_s >= 0:
            raise ValueError(f"grace_s is {grace_s}: it is a number of seconds")
        listed = self.native.scan()
        live = set(_roots(roots() if callable(roots) else roots))
        old = time.time_ns() - int(grace_s * 1e9)
        kept = spared = foreign = temporaries = size_of_all = 0
        doomed: list[tuple[str, int, bool]] = []
        for file, size, mtime_ns, kind in listed:
            if kind == "foreign":
                foreign += 1
            elif file in live:
                kept += 1
            elif kind == "dead":
                doomed.append((file, size, True))
            elif kind == "temporary":
                if before is None and mtime_ns <= old:
                    doomed.append((file, size, True))
                else:
                    spared += 1
            elif before is None or (_version(file) < before and mtime_ns <= old):
                doomed.append((file, size, False))
            else:
                spared += 1
        results: Sequence[int | Exception]
        results = [size for _, size, _ in doomed] if dry_run else self.reclaim(f for f, _, _ in doomed)
        reclaimed: list[str] = []
        errors: list[tuple[str, str]] = []
        for (file, _, temporary), result in zip(doomed, results, strict=True):
            if isinstance(result, Exception):
                errors.append((file, str(result)))
            elif result >= 0:
                reclaimed.append(file)
                size_of_all += result
                temporaries += temporary
        return SweepReport(kept, reclaimed, size_of_all, spared, temporaries, foreign, errors)

    def versions(self) -> list[int]:
        """The versions that have a directory, ascending."""
        return self.native.versions()

    def retire(self, version: int) -> int:
        """Remove the version directory `v<version>` with all that is in it; the number of files removed.

        For versions that nobody writes and no root names. PermissionError if this object is not the owner.
        """
        count = self.native.retire(version)
        prefix = f"v{version}/"
        self._durable.difference_update([f for f in self._durable if f.startswith(prefix)])
        return count


class _Plan:
    """A checked request on its way through the engine."""

    def __init__(self, request: Gather, *, at: int) -> None:
        lo, hi, out = request.lo, request.hi, request.out
        if not 0 <= lo <= hi < 2**63:
            raise ValueError(f"rows [{lo}, {hi}) of {request.field!r} are no range: 0 <= lo <= hi must hold")
        self.at = at
        own = [s for s in request.segments if s.field == request.field]
        self.lo, self.hi = lo, hi
        self.dtype, self.row = _result(request, own)
        self.segments = visible(own, lo, hi)
        nbytes = (hi - lo) * row_bytes(self.dtype, self.row)
        self.fill = None if request.fill == "spread" else fill_item(request.fill, self.dtype)
        self.out = None if out is None else destination(out, nbytes)

    def native(
        self,
    ) -> tuple[list[PayloadSegment], int, int, str, tuple[int, ...], bytes | None, memoryview | None, None]:
        """The request as `_native.Store.gather` takes it."""
        return self.segments, self.lo, self.hi, self.dtype, self.row, self.fill, self.out, None

    def wrap(self, rows: _native.Slab | None, valid: _native.Slab | None) -> tuple[Array, Valid]:
        """The arrays over what `_native.Store.gather` gave back."""
        assert valid is not None
        if rows is None:
            assert self.out is not None
            array = from_buffer(self.out, self.dtype, (self.hi - self.lo, *self.row))
        else:
            array = from_buffer(rows, self.dtype, (self.hi - self.lo, *self.row))
        return array, from_buffer(valid, "bool", (self.hi - self.lo,))


def _result(request: Gather, segments: Sequence[PayloadSegment]) -> tuple[str, tuple[int, ...]]:
    """dtype and row shape of the result: those of the segments, or of an `out` that is shaped for it."""
    field, lo, hi = request.field, request.lo, request.hi
    if not segments and request.out is None:
        raise ValueError(
            f"no segment of {field!r} to take the row shape from: pass an `out` array of the wanted shape"
        )
    if request.out is None:
        return result_layout(segments, lo, hi, dtype=request.dtype)
    name, shape = layout(request.out)
    if segments and len(shape) == 1 and ITEMSIZE[name] == 1:
        return result_layout(segments, lo, hi, dtype=request.dtype)  # plain bytes
    if not shape or shape[0] < hi - lo:
        raise ValueError(f"out is too short: its shape {shape} does not hold {hi - lo} rows of {field!r}")
    row = shape[1:]
    if not segments:
        return name, row
    dtype, least = result_layout(segments, lo, hi, dtype=request.dtype)
    if name == f"uint{8 * ITEMSIZE[dtype]}":
        name = dtype  # the bits of a type that numpy does not have
    if not widens(dtype, name):
        raise ValueError(f"out has dtype {name}, which does not hold the {dtype} of {field!r}")
    if len(row) != len(least) or any(n < m for n, m in zip(row, least, strict=True)):
        raise ValueError(f"out has rows of shape {row}, which do not hold the {least} of {field!r}")
    return name, row


def _tensor(name: str, obj: object) -> tuple[str, str, tuple[int, ...], memoryview]:
    try:
        return name, *to_bytes(obj)
    except (ValueError, TypeError) as e:
        raise type(e)(f"field {name!r}: {e}") from None


def _segment(
    name: str, file: str, dtype: str, shape: tuple[int, ...], offset: int, checksum: str
) -> PayloadSegment:
    """The segment of a whole tensor; one without axes is a single row."""
    rows, row = (shape[0], shape[1:]) if shape else (1, ())
    return PayloadSegment(name, file, offset, 0, rows, dtype, row, checksum)


def _running_sum(counts: Array, values: PayloadSegment) -> npt.NDArray[np.int64]:
    """[0, counts[0], counts[0] + counts[1], ...], none of which exceeds the rows of the values."""
    if len(counts) and (counts.min() < 0 or counts.max() > values.rows):
        asked = int(counts.min() if counts.min() < 0 else counts.max())
    else:
        sums = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, dtype=np.int64, out=sums[1:])
        # Each count fits, so that a sum that overflows is less than the one before it.
        if sums[-1] <= values.rows and (np.diff(sums) >= 0).all():
            return sums
        asked = int(counts.sum(dtype=object))
    raise CorruptPayloadError(
        f"{values.file}: the counts ask for {asked} rows of {values.field!r}, which has {values.rows}"
    )


def _no_payload(file: str) -> ValueError:
    """STORE and LOCK lie beside the version directories: no name from data may mean them."""
    return ValueError(f"{file!r} is no payload file: those lie in the store's version directories")


def _roots(files: Iterable[str]) -> Iterator[str]:
    """The root files, each a plain relative name: another spelling of it would not keep its file."""
    if isinstance(files, str | bytes):
        raise TypeError("roots is a single string: pass an iterable of files, or a callable returning one")
    for file in files:
        if not isinstance(file, str):
            raise TypeError(
                f"a root is a {type(file).__name__}: pass the segments' files, see `segment.files`"
            )
        if not _NAME.fullmatch(file):
            raise ValueError(
                f"the root {file!r} is not a file's name relative to the store: nothing was swept"
            )
        yield file


def _version(file: str) -> int:
    match = _VERSION.match(file)
    return int(match[1]) if match else 2**63
