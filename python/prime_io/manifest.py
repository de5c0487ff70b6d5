"""Manifests: what a committed component consists of, sealed.

A manifest is JSON sealed by a last member `xxh3`, the hash of all bytes before it, so that an edited byte is
seen. It is written last: a component without a good one is not there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from prime_io import _native
from prime_io.slices import in_slices

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 256 << 20
STATE = "state.msgpack"

How = Literal["link", "copy", "skip"]
_T = TypeVar("_T")

_PINS = b',"pins":{'  # last, before the seal; inside a string its quotes would be escaped
_SKIPPED = b'"how":"skip"'
_SEAL = re.compile(rb',"xxh3":"([0-9a-f]{16})"\}\n')
_SEAL_SIZE = len(',"xxh3":"0123456789abcdef"}\n')


class CorruptCheckpointError(ValueError):
    """A manifest or state file is not what was committed: torn, edited, missing or of another checkpoint."""


class FileStamp(msgspec.Struct, frozen=True, gc=False):
    """Size and XXH3-64 of a file of a component."""

    size: int
    xxh3: str


class Pin(msgspec.Struct, frozen=True, gc=False):
    """A pinned payload: its size, the checksums of the segments that name it, and how it was pinned."""

    size: int
    checksums: tuple[str, ...]
    how: How


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """The head of a manifest: whose it is."""

    format: int
    lineage: str
    step: int
    component: str


class Manifest(Stamp, frozen=True, kw_only=True, omit_defaults=True):
    """A whole manifest. `store` is the uuid of the store that the pins belong to."""

    store: str = ""
    files: dict[str, FileStamp] = msgspec.field(default_factory=dict)
    missing: list[str] = msgspec.field(default_factory=list)
    pins: dict[str, Pin] = msgspec.field(default_factory=dict)


class _Format(msgspec.Struct, frozen=True):
    format: int


def seal(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`."""
    pins = list(manifest.pins.items())
    body = [msgspec.json.encode(msgspec.structs.replace(manifest, pins={}))[:-1]]
    if pins:
        parts = [msgspec.json.encode(dict(part))[1:-1] for part in in_slices(pins)]
        body += [_PINS, b",".join(parts), b"}"]
    data = b"".join(body)
    data += b',"xxh3":"' + _native.xxh3(data).encode() + b'"}\n'
    if len(data) > MANIFEST_LIMIT:
        raise ValueError(
            f"save step {manifest.step}: its manifest of {len(data)} bytes is above the limit of "
            f"{MANIFEST_LIMIT}; queue fewer payload files or write larger ones"
        )
    return data


def unseal(data: bytes, path: str | Path, *, kind: type[_T]) -> _T:
    """Decode a manifest (or the head of one). CorruptCheckpointError naming `path` if it is damaged."""
    at = data.find(_PINS)
    head = data if at < 0 else data[:at] + b"}"  # one decode of all pins would hold the interpreter too long
    try:
        version = msgspec.json.decode(head, type=_Format).format
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(f"read {path}: torn or edited, not a manifest ({error})") from error
    if version != FORMAT:
        raise ValueError(
            f"read {path}: checkpoint format {version}, but this prime-io reads format {FORMAT}: use the "
            "release that wrote the checkpoint, or a newer one"
        )
    found = _SEAL.fullmatch(data[-_SEAL_SIZE:])
    if found is None or _native.xxh3(memoryview(data)[:-_SEAL_SIZE]).encode() != found[1]:
        raise CorruptCheckpointError(f"read {path}: torn or edited, its checksum does not fit")
    try:
        return msgspec.json.decode(data if issubclass(kind, Manifest) else head, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(f"read {path}: not a manifest ({error})") from error


def read_manifest(root: _native.Root, directory: str, where: Path, *, kind: type[_T]) -> _T:
    """Read `<directory>/manifest.json` of `root`; `where` is the full path of `directory`, for messages."""
    return unseal(_read(root, directory, where), where / MANIFEST, kind=kind)


def skipped_files(root: _native.Root, where: Path) -> set[str]:
    """The files that the manifest in `root` names without a pin of its own (`pin="skip"`)."""
    data = _read(root, "", where)
    if _SKIPPED not in data:
        unseal(data, where / MANIFEST, kind=Stamp)
        return set()
    pins = unseal(data, where / MANIFEST, kind=Manifest).pins
    return {file for part in in_slices(list(pins)) for file in part if pins[file].how == "skip"}


def _read(root: _native.Root, directory: str, where: Path) -> bytes:
    path = f"{directory}/{MANIFEST}" if directory else MANIFEST
    try:
        return root.read(path, limit=MANIFEST_LIMIT)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptCheckpointError(f"read {where / MANIFEST}: there is no manifest") from error
    except ValueError as error:
        raise CorruptCheckpointError(f"read {where / MANIFEST}: {error}") from error


def remove_unfinished(root: _native.Root) -> None:
    """Remove the manifest, whole or torn, of a commit of this directory that was killed before its rename. A
    file of that name that is not ours stays, and the engine refuses the directory."""
    try:
        data = root.read(MANIFEST, limit=MANIFEST_LIMIT)
    except FileNotFoundError:
        return
    ours = b'{"format":%d,"lineage":"' % FORMAT
    if ours.startswith(data[: len(ours)]):
        root.remove(MANIFEST)


def pack_state(state: Mapping[str, bytes | bytearray]) -> bytearray:
    """The bytes of `state.msgpack`: a map from part to bytes. Copied in pieces, as in `in_slices`."""
    packed = bytearray(b"\xdf" + len(state).to_bytes(4, "big"))
    for part, blob in state.items():
        if len(blob) >= 1 << 32:
            raise ValueError(
                f"save: state part {part!r} has {len(blob)} bytes, more than the 4 GiB of msgpack"
            )
        packed += msgspec.msgpack.encode(part) + b"\xc6" + len(blob).to_bytes(4, "big")
        for piece in in_slices(blob, size=1 << 20):
            packed += bytes(piece)
    return packed


def read_state(root: _native.Root, where: Path, manifest: Manifest) -> dict[str, bytes]:
    """The state parts of a component. CorruptCheckpointError names a torn, edited or lost file."""
    stamp = manifest.files.get(STATE)
    if stamp is None:
        raise CorruptCheckpointError(f"load {where / MANIFEST}: it names no {STATE}")
    try:
        data = root.read(STATE, limit=stamp.size)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"load {where / STATE}: the state file is gone") from error
    except ValueError as error:
        raise CorruptCheckpointError(f"load {where / STATE}: {error}") from error
    if len(data) != stamp.size or _native.xxh3(data) != stamp.xxh3:
        raise CorruptCheckpointError(f"load {where / STATE}: torn or edited, its checksum does not fit")
    try:
        return msgspec.msgpack.decode(data, type=dict[str, bytes])
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptCheckpointError(f"load {where / STATE}: not a map of parts ({error})") from error


def verify_files(root: _native.Root, where: Path, manifest: Manifest) -> None:
    """Read every state file of a component again. CorruptCheckpointError names the first bad one."""
    names = list(manifest.files)
    results: Sequence[tuple[int, str] | Exception] = root.hash(names)
    for name, found in zip(names, results, strict=True):
        if isinstance(found, FileNotFoundError):
            raise CorruptCheckpointError(f"verify {where / name}: the file is gone") from found
        if isinstance(found, Exception):
            raise found
        if found != (manifest.files[name].size, manifest.files[name].xxh3):
            raise CorruptCheckpointError(f"verify {where / name}: torn or edited, its checksum does not fit")
