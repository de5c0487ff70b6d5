"""The streaming writer: the payload of a trace, written turn by turn and published at its end."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Final

import msgspec

from prime_io import _native
from prime_io.segment import PayloadSegment, whole_tensor
from prime_io.tensors import field_bytes

__all__ = ["FILLER", "PayloadWriter"]

FILLER: Final = "__pad__"
"""Tensors whose names start with this keep the others of a streamed file aligned; they hold zeros."""


class PayloadWriter:
    """Writes payload files of one policy version, append by append; made by `PayloadStore.writer`.

    Rows appended to a field belong to the tokens after those appended before: `pos` is the field's running
    number of rows, 0 for the first append, over all files of the writer. So a trace written turn by turn
    yields consecutive segments that are aligned with its tokens, and `coalesce`, `clip`, `covers` and
    `gather` see one run of rows.

    An append returns the handle to its rows at once, but they can be read only when their file has been
    published: by `close`, or before that, when the file's header (64 KiB, some hundreds of appends) is full
    and the next append begins another file. Use as a context manager: leaving it closes; an exception inside
    discards what is not published yet. Files that were full before stay, for the owner's sweep to find if
    nobody names them. A writer that is killed leaves a temporary, which readers never see and the sweep
    removes.

    The file is a valid safetensors file with a tensor `<field>.<n>` per append, 64-byte aligned. It is not
    synced: see `PayloadStore.sync`. Calls from several threads take turns; a forked child opens its own.
    """

    def __init__(self, native: _native.Writer) -> None:
        self._native: Final = native

    def __enter__(self) -> PayloadWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def append(self, field: str, rows: object) -> PayloadSegment:
        """Append rows to a field; the segment that they can be read by once the file is published.

        `rows` of shape [n, *row] are n rows (n may be 0), without axes a single one; dtype and row shape may
        differ between appends. See `tensors.to_bytes` for what may be written. It is copied to the file
        before this returns, with the GIL released.

        ValueError or TypeError for what is no tensor of the format: the writer stays as it was. ValueError
        once the writer is closed. OSError from the filesystem, ESTALE if the version was retired meanwhile:
        the file is removed, the segments in it are void, and the writer takes nothing more.
        """
        return self.append_many({field: rows})[field]

    def append_many(self, tensors: Mapping[str, object]) -> dict[str, PayloadSegment]:
        """Append rows to several fields at once, all in one file; a segment per field. Errors as in `append`.

        A ragged field must be written this way, `<field>.counts` and `<field>.values` together: the values
        then get the `pos` of their counts.
        """
        given = [(field, *field_bytes(field, rows)) for field, rows in tensors.items()]
        segments = {
            field: whole_tensor(field, file, dtype, shape, offset, checksum, pos=pos)
            for (field, dtype, shape, _), (file, offset, pos, checksum) in zip(
                given, self._native.append(given), strict=True
            )
        }
        for counts in list(segments.values()):
            values = segments.get(counts.field.removesuffix(".counts") + ".values")
            if counts.field.endswith(".counts") and values is not None:
                segments[values.field] = msgspec.structs.replace(values, pos=counts.pos)
        return segments

    def close(self) -> None:
        """Publish what was appended: from now on it can be read. Nothing appended: no file. Idempotent.

        OSError as in `append`; ValueError if an append failed, because its segments will never be valid.
        """
        self._native.close()

    def discard(self) -> None:
        """Remove what was not published yet; its segments are void. Idempotent, and nothing after `close`."""
        self._native.discard()
