"""A FUSE filesystem that passes everything through, and whose reads do what a file beside it says.

python fuse_with_faults.py <source> <mount point> <control file>

The control file holds "slow <seconds>" or "<errno name> <how many reads>"; empty: no fault.
"""

from __future__ import annotations

import errno
import sys
import threading
import time
from pathlib import Path

import fuse

from fuse_without_links import WithoutLinks


class WithFaults(WithoutLinks):
    def __init__(self, root: str, control: Path) -> None:
        super().__init__(root, errno.EPERM)
        self._control, self._lock = control, threading.Lock()

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        with self._lock:
            kind, _, number = self._control.read_text().partition(" ")
            if kind.startswith("E"):
                left = int(number) - 1
                self._control.write_text(f"{kind} {left}" if left else "")
                raise fuse.FuseOSError(getattr(errno, kind))
        if kind == "slow":
            time.sleep(float(number))
        return bytes(super().read(path, size, offset, fh))


if __name__ == "__main__":
    source, where, control = sys.argv[1:]
    fuse.FUSE(WithFaults(source, Path(control)), where, foreground=True, use_ino=True, direct_io=True)
