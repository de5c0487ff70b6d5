"""Which engine reads and looks for files here, and why."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Literal

from prime_io import _native

__all__ = ["EngineReport", "engine_report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What `engine_report` found; `str` tells it in a few lines. The counts are of this process."""

    reads: Literal["threads", "io_uring when cold"]
    """What `engine="auto"` reads with: io_uring for what is not in the page cache, if it can be had."""
    probes: Literal["directory reads and statx on threads"]
    """What looks for files: io_uring has no faster way, as the kernel serves its statx from threads too."""
    why: str
    """How the kernel delivers completions, or why io_uring cannot be had and what to do."""
    errno: int
    """0, or the error of making a ring: EPERM blocked, ENOSYS missing, ENOMEM too little locked memory."""
    kernel: str
    """The release of the kernel."""
    thread_waves: int
    """Batches of files, within the limit on open files, read by threads."""
    uring_waves: int
    """Batches of files read by io_uring."""
    blocked_waves: int
    """Batches that threads read because no ring could be made."""
    direct_files: int
    """Files read around the page cache (O_DIRECT)."""
    direct_refused: int
    """Files whose filesystem refused that, when asked or at the first read; they were read through it."""

    def __str__(self) -> str:
        return (
            f"reads: {self.reads} ({self.why}; Linux {self.kernel})\n"
            f"probes: {self.probes}\n"
            f"so far: {self.thread_waves} waves by threads ({self.blocked_waves} for want of a ring), "
            f"{self.uring_waves} by io_uring; {self.direct_files} files around the page cache, "
            f"{self.direct_refused} refused"
        )


def engine_report() -> EngineReport:
    """What reads here, why, and what this process has counted. Makes a ring to find out, and closes it."""
    counts, code = _native.engine_counts(), 0
    try:
        why = f"its completions are {_native.try_uring()}"
    except OSError as e:
        why, code = str(e.strerror), e.errno or 0
    return EngineReport(
        reads="threads" if code else "io_uring when cold",
        probes="directory reads and statx on threads",
        why=why,
        errno=code,
        kernel=platform.release(),
        thread_waves=counts["threads"],
        uring_waves=counts["uring"],
        blocked_waves=counts["blocked"],
        direct_files=counts["direct"],
        direct_refused=counts["refused"],
    )
