"""What went wrong on one rank, in a form that every rank can be told and raise alike."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Literal

import msgspec

from ._native import CorruptPayloadError


class Lost(msgspec.Struct, frozen=True, array_like=True):
    """A field of a sample that is not there to be read: the file is gone, or too short (errno ENODATA)."""

    sample: int
    field: str
    file: str
    errno: int

    def why(self) -> str:
        """In words."""
        return "is too short" if self.errno == errno.ENODATA else os.strerror(self.errno)

    def exception(self, where: str) -> Exception:
        """CorruptPayloadError if it is too short, else the OSError."""
        if self.errno == errno.ENODATA:
            return CorruptPayloadError(f"{where}: {self.file}")
        return OSError(self.errno, where, self.file)


class Failure(msgspec.Struct, frozen=True):
    """An exception as data."""

    kind: Literal["os", "corrupt", "value", "other"]
    text: str
    errno: int = 0
    file: str | None = None

    @classmethod
    def of(cls, error: Exception, where: str = "") -> Failure:
        """Of an exception; `where` is put before its text."""
        where = where and f"{where}: "
        if isinstance(error, OSError) and error.errno is not None:
            return cls("os", f"{where}{error.strerror}", error.errno, error.filename)
        kind: Literal["corrupt", "value", "other"] = "other"
        if isinstance(error, CorruptPayloadError):
            kind = "corrupt"
        elif isinstance(error, ValueError):
            kind = "value"
        return cls(kind, f"{where}{error}" if kind != "other" else f"{where}{type(error).__name__}: {error}")

    def exception(self, where: str = "") -> Exception:
        """OSError (FileNotFoundError and so on, by errno), CorruptPayloadError, ValueError or RuntimeError."""
        text = f"{where}: {self.text}" if where else self.text
        if self.kind == "os":
            return OSError(self.errno, text, self.file)
        if self.kind == "corrupt":
            return CorruptPayloadError(text)
        return ValueError(text) if self.kind == "value" else RuntimeError(text)


class Findings(msgspec.Struct, frozen=True):
    """What a rank found before a step."""

    lost: list[Lost] = []
    failure: Failure | None = None


def first_failure(failures: Sequence[tuple[int, Failure]], where: str) -> Exception:
    """The exception that all ranks raise when some of them, (rank, failure), failed."""
    rank, failure = failures[0]
    more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
    return failure.exception(f"{where}, rank {rank}{more}")
