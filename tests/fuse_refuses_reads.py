"""A FUSE filesystem that passes everything through, but whose first read of every file fails with EINVAL.

python fuse_refuses_reads.py <source> <mount point>
"""

from __future__ import annotations

import errno
import sys

import fuse

from fuse_without_links import WithoutLinks


class RefusesReads(WithoutLinks):
    def __init__(self, root: str) -> None:
        super().__init__(root, errno.EPERM)
        self._refused: set[str] = set()

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        if path.endswith(".safetensors") and offset > 0 and path not in self._refused:
            self._refused.add(path)
            raise fuse.FuseOSError(errno.EINVAL)
        return super().read(path, size, offset, fh)


if __name__ == "__main__":
    source, where = sys.argv[1:]
    # Nothing is cached, so that every read of a caller is one of this server's.
    fuse.FUSE(RefusesReads(source), where, foreground=True, use_ino=True, direct_io=True)
