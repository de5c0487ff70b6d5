"""The native engine. Private: only this package uses it.

Every call crosses the boundary once per batch and releases the GIL for all of its I/O. Batch calls return one
result per item (`probe` in columns), in order: the value, or the exception that item met (an instance, not raised).
`OSError`s carry `errno`, a message that names the operation, and `filename`. `Buffer` arguments must be
C-contiguous; destinations writable and of exactly the stated length.
"""

import builtins
from collections.abc import Sequence
from typing import Protocol, final

from typing_extensions import Buffer

__all__ = [
    "Commit",
    "CorruptPayloadError",
    "Root",
    "Slab",
    "Store",
    "Writer",
    "engine_counts",
    "owner_is_dead",
    "temporary_name",
    "try_uring",
    "xxh3",
]

class CorruptPayloadError(ValueError):
    """The bytes on disk are not those that were written: torn, short, edited, or another file's."""

class _Segment(Protocol):
    @property
    def file(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def pos(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def checksum(self) -> str: ...

@final
class Slab:
    """Pooled memory, exposed through the buffer protocol (bytes, writable). It goes back to its pool when
    the last view of it dies."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Store:
    """A store directory, opened confined: no path from data leaves it, no symlink in it is followed."""

    def __new__(
        cls,
        root: str,
        *,
        create: bool = True,
        owner: bool = False,
        run_id: str = "",
        group_writable: bool = False,
        engine: str = "auto",
    ) -> Store:
        """Open a store; with `create`, make `<root>/STORE` (uuid, format, run id) if there is none.

        `owner=True` takes `<root>/LOCK`: BlockingIOError(EAGAIN) naming the store if another process (or
        another Store of this one) has it. FileNotFoundError if it is not a store and `create` is false;
        ValueError for an unknown format, or for a `run_id` that is given and differs from the stored one.
        `engine`: "auto" | "threads" | "uring", for `gather`; OSError if "uring" is blocked here.
        """

    @property
    def root(self) -> str: ...
    @property
    def uuid(self) -> str:
        """32 hex digits."""

    @property
    def run_id(self) -> str: ...
    @property
    def owner(self) -> bool: ...
    def close(self) -> None:
        """Give up the lock and the directory. Later calls raise ValueError. Idempotent."""

    def publish(
        self,
        files: Sequence[tuple[int, Sequence[tuple[str, str, tuple[int, ...], Buffer]]]],
        *,
        durable: bool = False,
    ) -> list[tuple[str, list[tuple[int, str]]] | Exception]:
        """Write each (version, [(name, dtype, full shape, bytes)]) as one payload file.

        Result: (file relative to the store, [(offset from byte 0 of the file, checksum)] in input order).
        dtypes are numpy / ml_dtypes names; `bytes` are the little-endian C-order contents.
        """

    def writer(self, version: int) -> Writer:
        """A writer of payload files in `v<version>`, append by append. It outlives the store's handle."""

    def header(
        self, files: Sequence[str]
    ) -> list[tuple[int, list[tuple[str, str, tuple[int, ...], int, int, str]], dict[str, str]] | Exception]:
        """Read and check the headers of safetensors files.

        Result: (file size, [(name, dtype, full shape, offset from byte 0, bytes, checksum or "")], the
        file's `__metadata__`). CorruptPayloadError if it is not one or its size does not fit.
        """

    def probe(
        self, asked: list[str | _Segment], *, sizes: bool = False, method: str = "auto"
    ) -> tuple[bytearray, bytearray, bytearray]:
        """Which files are there: (present u8[n], size i64[n] or -1, errno i32[n]), native endian.

        A segment asks for its file, and that it reaches to the segment's end; a shorter file is not present,
        ENODATA. Missing: ENOENT. Not a regular file, a name that is not allowed, or a segment that cannot be
        (negative, overflow, unknown dtype): EINVAL; a symbolic link: ELOOP. Sizes are given if a segment is
        asked for, or with `sizes`, else -1. `method`: "auto" | "scan" | "stat" | "uring" (stat by io_uring,
        or by threads where that is blocked). TypeError for what is neither a name nor a segment. While it reads
        a long list, it lets other threads of the interpreter run every millisecond.
        """

    def gather(
        self,
        requests: Sequence[
            tuple[
                Sequence[_Segment], int, int, str, tuple[int, ...], bytes | None, Buffer | None, Buffer | None
            ]
        ],
        *,
        verify: bool = False,
    ) -> list[tuple[Slab | None, Slab | None] | Exception]:
        """Read rows [lo, hi) of each (segments, lo, hi, dtype, row shape, fill, out, valid).

        `fill` is one item of `dtype` as bytes, or None for "spread" (uncovered expert-id rows get distinct
        ids per row: 0, 1, 2, ... along the last axis). `out` (`(hi - lo) * row bytes`) and `valid`
        (`hi - lo`, u8) are destinations; where None, a pooled Slab is returned in its place. Later segments
        win. Integers widen to where every value fits (u8 to i16, not i8 to u16); other mixes of dtypes are
        ValueError, as are rows that exceed the row shape on some axis. Segments are checked (overflow,
        negative, file size) before anything is allocated or read; what is wrong with one is its request's
        error. `verify` checks the XXH3 of every touched 1 MiB block of segments that carry a checksum:
        CorruptPayloadError. A file too short for its segment: CorruptPayloadError.

        Raised at once, before any I/O: ValueError for lo, hi, dtype or row shape that cannot work, and for
        destinations that are read-only, not contiguous, of another length, or overlapping in a batch.
        A destination must not be used until the call returns; one whose request failed holds anything.
        Up to 8 threads read, or two rings of 64 reads each; besides its results a gather takes at most 16 MiB
        (or what one row takes). On KeyboardInterrupt reading stops within a few MiB per thread (16 per ring), then it
        is raised; what `out` holds is then undefined. Calls of up to 16 segments and 8 MiB run to their end.
        """

    def sync(self, files: Sequence[str]) -> list[OSError | ValueError | None]:
        """fdatasync each file; ValueError for a name that is not allowed. A failed one is never tried again: its
        bytes count as lost."""

    def reclaim(self, files: Sequence[str]) -> list[int | Exception]:
        """Unlink each file (owner only: PermissionError otherwise). Result: bytes freed, or -1 if it was
        already gone; ValueError for what is no `v<k>/<name>`, so that no name from data means STORE or LOCK."""

    def link_back(
        self,
        pins: str,
        files: Sequence[tuple[str, int, Sequence[str]]],
        *,
        copy: bool = False,
        dry_run: bool = False,
    ) -> list[str | Exception]:
        """Give pinned files their names in the store again: each (file, size, checksums) of directory `pins`.

        `checksums` are segment checksums that the file's header must hold. Result: "present" (same inode, or
        same size and checksums), "linked", "copied", or "replaced" (something else had the name). A pin that
        has another size or whose header lacks a checksum is CorruptPayloadError and is not linked; no pin and
        nothing right present is FileNotFoundError; what is no `v<k>/<name>` is a ValueError. Linking falls back
        to a copy as in `Commit.pin`. A directory `pins` that is missing holds no pin. `dry_run` touches nothing
        and answers "linked" for "copied" too.
        """

    def scan(self) -> list[tuple[str, int, int, str]]:
        """Everything in the version directories: (file, size, mtime in ns, kind), kind "payload", "temporary"
        (its writer may be alive), "dead" (a temporary whose writer is gone) or "foreign" (not ours, never
        touched)."""

    def versions(self) -> list[int]:
        """The version directories, ascending."""

    def retire(self, version: int) -> bool:
        """Take version directory v<version> out of the store by one rename (owner only); whether it was there."""

    def empty_trash(self) -> int:
        """Remove what was retired (owner only); the number of files."""

@final
class Writer:
    """Writes payload files append by append: a temporary that grows, one rename at the end.

    Nothing is visible before `close`, or before a full file made way for the next. Nothing is synced. Calls of
    several threads take turns. Dropped without `close`, it discards.
    """

    def append(
        self, tensors: Sequence[tuple[str, str, tuple[int, ...], Buffer]]
    ) -> list[tuple[str, int, int, str]]:
        """Append each (field, dtype, full shape, bytes) as a tensor `<field>.<n>`, n counting the field's appends.

        Result: (file relative to the store, offset from byte 0 of the file, rows of the field appended before,
        checksum). All tensors of a call are in one file; if its 64 KiB of header have no room for them, it is
        published first and the next begun. A tensor without axes is one row. ValueError for the caller's
        mistakes, which change nothing, and once the writer is closed. After an OSError (ESTALE: the version was
        retired) the file is removed, its segments are void and every later call but `discard` is a ValueError.
        """

    def close(self) -> None:
        """Publish what was appended; nothing if nothing was. Idempotent. OSError as in `append`."""

    def discard(self) -> None:
        """Remove what was not published. Idempotent; also done on drop."""

@final
class Commit:
    """One checkpoint component on its way to `<checkpoints>/step_<step>/<component>`.

    Built in a temporary sibling; nothing is visible before `finish` returns or the machine dies in it.
    """

    def __new__(cls, checkpoints: str, step: int, component: str, *, adopt: str | None = None) -> Commit:
        """Make the temporary directory; or adopt the existing directory `adopt` (same filesystem)."""

    def pin(
        self, store: Store, files: Sequence[str], *, copy: bool = False
    ) -> list[tuple[int, str] | Exception]:
        """Link (or copy) each file, whose bytes are durable (`Store.sync`), to `payloads/<file>`.

        Result: (size, "link" or "copy"). Linking falls back to a durable copy on EXDEV, EPERM, EMLINK, ENOSYS
        and EOPNOTSUPP; FileNotFoundError if the file is gone, OSError(EIO) if a sync of it has failed, ValueError
        for what is no `v<k>/<name>`. The names are durable with `finish`.
        """

    def write(self, name: str, data: Buffer) -> tuple[int, str]:
        """Write and fsync a state file: (size, XXH3-64 as 16 hex digits)."""

    def files(self) -> list[tuple[str, int, str]]:
        """fsync and hash every file of an adopted directory: (relative path, size, XXH3-64)."""

    def finish(self, manifest: Buffer) -> None:
        """Sync directories bottom-up, write and fsync `manifest.json` last, rename, sync `step_<N>` and
        `checkpoints`. FileExistsError if the component is there already."""

    def abort(self) -> None:
        """Remove what was made (an adopted directory stays). Idempotent; also done on drop."""

@final
class Root:
    """A directory of the run, for small files. Names are relative, confined, dots allowed only as `.tmp-*`
    and `.trash-*` first components."""

    def __new__(cls, path: str, *, create: bool = False) -> Root: ...
    def write(self, path: str, data: Buffer, *, durable: bool = True, exclusive: bool = False) -> None:
        """Write a file atomically (missing parents are made): temporary, written, renamed; file and parents
        are fsynced if `durable`. `exclusive`: FileExistsError if the name is taken."""

    def read(self, path: str, *, limit: int | None = None) -> bytes:
        """Read a whole regular file. ValueError if it is larger than `limit` bytes (None: 1 GiB)."""

    def list(self, path: str = "") -> builtins.list[tuple[str, bool]]:
        """(name, is a directory) of every entry, after revalidating the directory; [] if it is missing."""

    def rename(self, source: str, target: str) -> None:
        """Rename durably: missing parents of `target` are made, both parents fsynced. FileExistsError if
        `target` is taken."""

    def remove(self, path: str) -> None:
        """Remove a file or a whole tree without following links; missing is fine."""

    def hash(self, files: Sequence[str]) -> builtins.list[tuple[int, str] | Exception]:
        """(size, XXH3-64 as 16 hex digits) of each file."""

def engine_counts() -> dict[str, int]:
    """What this process has read: waves of files by "threads" and by "uring", waves that threads read since a
    ring was "blocked", files read around the page cache ("direct") and files that "refused" that."""

def try_uring() -> str:
    """Make a ring and close it: how it gets its completions, "deferred" | "cooperative" | "interrupting". OSError
    with what to do where io_uring is blocked (EPERM), missing (ENOSYS) or short of locked memory (ENOMEM)."""

def temporary_name() -> str:
    """A fresh `.tmp-<bootid8>-<pid>-<starttime>-<rand>`."""

def owner_is_dead(temporary: str) -> bool:
    """Whether the writer of a temporary (or trash) of that name is provably gone; False for names of another
    host, boot or pid namespace."""

def xxh3(data: Buffer) -> str:
    """XXH3-64 as 16 hex digits."""
