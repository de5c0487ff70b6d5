"""Filesystems of their own for tests, by real mounts; they are gone when the test is over."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: it mounts filesystems or changes users")


def need(tool: str, package: str) -> None:
    """Skip unless a program is there."""
    if shutil.which(tool) is None:
        pytest.skip(f"needs {tool} (Debian: {package})")


class Mounts:
    """Mounts below one directory."""

    def __init__(self, root: Path) -> None:
        need_root()
        self._root = root
        self._mounted: list[Path] = []
        self._servers: list[subprocess.Popen[str]] = []

    def tmpfs(self, options: str) -> Path:
        return self._mount(["-t", "tmpfs", "-o", options, "tmpfs"])

    def image(self, kind: str, size: int, *options: str) -> Path:
        """A fresh filesystem of `size` bytes in a file, by loop device."""
        need(f"mkfs.{kind}", {"vfat": "dosfstools", "ext4": "e2fsprogs"}[kind])
        self._root.mkdir(parents=True, exist_ok=True)
        file = self._root / f"image{len(self._mounted)}"
        with file.open("wb") as image:
            image.truncate(size)
        subprocess.run([f"mkfs.{kind}", *options, str(file)], check=True, capture_output=True)
        return self._mount(["-t", kind, "-o", "loop", str(file)])

    def bind(self, source: Path) -> Path:
        """A second mount of a directory: the same st_dev, and no links between the two."""
        source.mkdir(parents=True, exist_ok=True)
        return self._mount(["--bind", str(source)])

    def without_links(self, error: str) -> Path:
        """A FUSE mount whose every link fails with `error`."""
        return self._fuse("fuse_without_links.py", self._behind(), error)

    def refusing_reads(self) -> Path:
        """A FUSE mount where the first read of every payload, past its first byte, fails with EINVAL."""
        return self._fuse("fuse_refuses_reads.py", self._behind())

    def with_faults(self, source: Path, control: Path) -> Path:
        """A FUSE mount of `source` whose reads do what the file `control` says."""
        control.write_text("")
        return self._fuse("fuse_with_faults.py", source, str(control))

    def _behind(self) -> Path:
        source = self._root / f"behind{len(self._mounted)}"
        source.mkdir(parents=True)
        return source

    def _fuse(self, script: str, source: Path, *arguments: str) -> Path:
        here = Path(__file__).parent / script
        if not os.path.exists("/dev/fuse"):
            pytest.skip("needs /dev/fuse")
        if subprocess.run([sys.executable, "-c", "import fuse"], capture_output=True, check=False).returncode:
            pytest.skip("needs fusepy (pip) and libfuse2 (Debian: fuse, libfuse2)")
        where = self._root / f"mount{len(self._mounted)}"
        where.mkdir(parents=True)
        server = subprocess.Popen(
            [sys.executable, str(here), str(source), str(where), *arguments],
            stderr=subprocess.PIPE,
            text=True,
        )
        self._servers.append(server)
        end = time.monotonic() + 20
        while not os.path.ismount(where):
            if server.poll() is not None or time.monotonic() > end:
                server.kill()
                pytest.skip(f"FUSE cannot be mounted here: {server.communicate()[1].strip()}")
            time.sleep(0.02)
        self._mounted.append(where)
        return where

    def _mount(self, arguments: list[str]) -> Path:
        where = self._root / f"mount{len(self._mounted)}"
        where.mkdir(parents=True)
        done = subprocess.run(["mount", *arguments, str(where)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"mount {' '.join(arguments)} is not possible here: {done.stderr.strip()}")
        self._mounted.append(where)
        return where

    def close(self) -> None:
        """Unmount everything; a mount that is busy goes when its last user does."""
        for where in reversed(self._mounted):
            if subprocess.run(["umount", str(where)], capture_output=True, check=False).returncode:
                subprocess.run(["umount", "-l", str(where)], check=True)
        self._mounted.clear()
        for server in self._servers:
            try:
                server.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.communicate()
        self._servers.clear()


@contextmanager
def mounts_below(root: Path) -> Iterator[Mounts]:
    made = Mounts(root)
    try:
        yield made
    finally:
        made.close()
