"""What is promised, in one place: a row per line, each with its rival and the least ratio that holds it.

A ratio is the rival's time over ours, the best round of each, so more is better; 0.85 against memcpy says 0.85
of its rate. `make bench-check` fails where one falls below its floor. The ratio of the rows of
memory and of waiting is allowed over used. A floor of 0 is a row without a target.
"""

from __future__ import annotations

from typing import NamedTuple


class Target(NamedTuple):
    """One line of the table. `check`: the floor of the short form, where its size alone makes another."""

    work: str
    against: str
    floor: float
    check: float | None = None


_WARM = "gather 64 traces x 12.6 MB, warm, pooled destination"
_SLOW = "0.5 ms per call"
_SLEEPS = "a trainer whose step sleeps 1.25 reads of a micro-batch"

TARGETS: dict[str, Target] = {
    "probe.exists": Target("probe 100,000 names in 8 directories, 10 % missing", "os.path.exists loop", 6),
    "probe.scandir": Target("the same", "os.scandir into a set", 2.5),
    "probe.stat": Target("the same with sizes", "os.stat loop in try/except", 3),
    "probe.few": Target("probe 10 names in a directory of 100,000", "os.path.exists loop", 1 / 1.2),
    "probe.slow": Target(f"probe 10,000 names, {_SLOW}, 10 % missing", "os.path.exists loop", 100, check=50),
    "gather.memcpy": Target(_WARM, "memcpy of the same bytes, same threads", 0.85),
    "gather.read": Target("the same", "open().read() + np.frombuffer", 8),
    "gather.preadv": Target("the same", "os.preadv into reused buffers, thread pool", 1),
    "gather.verify": Target("the same with verify=True", "the same without", 1 / 1.15),
    "gather.first": Target("the same, first use (fresh pages)", "np.fromfile", 1.5),
    "gather.micro": Target(
        "one micro-batch for the trainer, narrow, pooled", "np.full(int32), pread, cast (dtypes differ)", 5
    ),
    "gather.micro32": Target("the same, int32 from both", "the same", 1.5),
    "gather.files": Target("gather 20,000 segments of 4 KiB in 20,000 files", "open/pread/close loop", 2.2),
    "gather.few_files": Target("the same in 200 files", "open/pread/close loop", 8),
    "gather.scattered": Target("the same, no two of them neighbours", "open/pread/close loop", 0),
    "gather.cold": Target("gather 4 GiB, caches dropped", "the best fio read job on the same files", 0.9),
    "publish.warm": Target(
        "publish 64 x 12.6 MB, not durable, checksummed", "safetensors.numpy.save_file", 1.25
    ),
    "publish.durable": Target(
        "publish 1,000 x 64 KiB, durable, one batch", "write, fsync, rename, fsync of the directory, each", 5
    ),
    "reclaim.link": Target("link 10,000 in one directory", "os.link loop", 1),
    "reclaim.unlink": Target("unlink 10,000 in one directory", "os.unlink loop", 1),
    "reclaim.slow_link": Target(f"link 10,000 over 16 directories, {_SLOW}", "os.link loop", 8),
    "reclaim.slow_unlink": Target(f"unlink 10,000 over 16 directories, {_SLOW}", "os.unlink loop", 8),
    "reclaim.retire": Target(
        "retire a version of 10,000 files: until the caller goes on", "shutil.rmtree", 20
    ),
    "reclaim.free": Target("the same: until the space is free", "shutil.rmtree", 1),
    "checkpoint.state": Target(
        "checkpoint of 512 traces, 2,048 segments: state, durable", "torch.save, fsync, rename, fsync", 3
    ),
    "checkpoint.pins": Target("its pins: 512 links, synced", "os.link + fsync loop", 2),
    # The start is once a run: it weighs six times as much in the short form.
    "loader.waiting": Target(f"waiting in {_SLEEPS}", "5 % of its time", 1, check=0.4),
    "loader.unverified": Target("the same with verify=False", "the same", 1, check=0.4),
    "loader.int32": Target("the same, widened to int32 on the CPU", "the same", 0),
    "loader.cpu": Target("the same, the step a matmul on one thread", "the same", 0),
    "loader.time": Target(_SLEEPS, "pread, cast to int32, then step", 1.8),
    "loader.narrow": Target("the same", "pread into reused memory, narrow, then step", 0),
    "bounds.memory": Target("peak memory of a gather of 805 MB, above its result", "16 MiB", 1),
    "bounds.files": Target("gather and probe of 500 files", "ulimit -n 64", 1),
    "bounds.ticks": Target(
        "ticks of another Python thread, beside the worst verb", "its ticks when idle", 0.25
    ),
}
