"""A filesystem whose every call takes 0.5 ms: see slowfs.c, compiled with the C compiler that Rust links with."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MICROSECONDS = 500


@contextmanager
def slowfs(root: Path) -> Iterator[tuple[Path, Path]]:
    """(directory, the same directory at 0.5 ms per call), below `root`."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and /dev/fuse: it mounts a FUSE filesystem")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler for benches/slowfs.c")
    behind, slow, server = root / "behind", root / "slow", root / "slowfs"
    for directory in (behind, slow):
        directory.mkdir(parents=True)
    code = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-O2", "-pthread", str(code), "-o", str(server)], check=True)
    process = subprocess.Popen([str(server), str(behind), str(slow), str(MICROSECONDS)])
    try:
        end = time.monotonic() + 10
        while not os.path.ismount(slow):
            if process.poll() is not None or time.monotonic() > end:
                pytest.skip("FUSE cannot be mounted here")
            time.sleep(0.02)
        yield behind, slow
    finally:
        subprocess.run(["umount", "-l", str(slow)], capture_output=True, check=False)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
