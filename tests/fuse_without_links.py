"""A FUSE filesystem that passes everything through and refuses links, as object stores behind FUSE do.

python fuse_without_links.py <source> <mount point> <errno name>
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import fuse


class WithoutLinks(fuse.Operations):  # type: ignore[misc]
    def __init__(self, root: str, code: int) -> None:
        self._root, self._code = root, code

    def __call__(self, op: str, path: str, *args: Any) -> Any:
        if not hasattr(self, op):
            raise fuse.FuseOSError(errno.EFAULT)
        return getattr(self, op)(self._at(path) if op != "link" else path, *args)

    def _at(self, path: str) -> str:
        return self._root + path

    def link(self, target: str, source: str) -> int:
        raise fuse.FuseOSError(self._code)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        stat = os.lstat(path)
        names = ("atime", "ctime", "gid", "mode", "mtime", "nlink", "size", "uid", "ino")
        return {f"st_{name}": getattr(stat, f"st_{name}") for name in names}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(path)]

    def create(self, path: str, mode: int) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(path, length)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        os.fsync(fh)

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, self._at(new))

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(path, mode)


if __name__ == "__main__":
    source, where, name = sys.argv[1:]
    fuse.FUSE(WithoutLinks(source, getattr(errno, name)), where, foreground=True, use_ino=True)
