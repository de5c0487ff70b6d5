"""Ranks as processes with a gloo group, and what each of them does in the tests of `PayloadLoader`."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loading import FIELDS, Arrays, arrays_of, check
from prime_io import Exchange, Lineage, PayloadStore, TrainBatch

Say = Callable[[Any], None]
Work = Callable[[Path, Say, dict[str, Any]], None]


def run_ranks(
    work: Work, n: int, root: Path, out: Path, timeout_s: float = 60, **options: Any
) -> list[list[Any]]:
    """Run `work` on n ranks; what each said, last of all how it ended: "ok", or (exception, text).

    Ranks are forked by a server that has PyTorch loaded, as a launcher's would not be: it saves seconds a test.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "prime_io.loader"])
    out.mkdir()
    ranks = [
        context.Process(target=_rank, args=(work, r, n, root, out, options), daemon=True) for r in range(n)
    ]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + timeout_s
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
    hung = [r for r, rank in enumerate(ranks) if rank.is_alive()]
    for rank in ranks:
        rank.kill()
    assert not hung, f"ranks {hung} hang"
    return [[json.loads(line) for line in (out / f"rank{r}").read_text().splitlines()] for r in range(n)]


def _rank(work: Work, rank: int, n: int, root: Path, out: Path, options: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with (out / f"rank{rank}").open("w", buffering=1) as said:

        def say(what: Any) -> None:
            said.write(json.dumps(what) + "\n")

        dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=n)
        try:
            work(root, say, options)
            say("ok")
        except Exception as error:
            say([type(error).__name__, str(error)])
        # Without destroy_process_group: a group with a dead member must not be waited for either.
        said.flush()
        os._exit(0)


class OneReader(Exchange):
    """Only rank 0 looks for batches and acknowledges."""

    def look_for(self, step: int) -> tuple[TrainBatch | None, bool]:
        _only_rank_0()
        return super().look_for(step)

    def acknowledge(self, step: int, reader: str) -> None:
        _only_rank_0()
        super().acknowledge(step, reader)


def _only_rank_0() -> None:
    import torch.distributed as dist

    assert dist.get_rank() == 0, "one rank reads and acknowledges for all"


def made_of(step: int, lengths: list[int]) -> dict[str, list[Arrays]]:
    """What `Run.batch` wrote."""
    return {f"t{step}.{i}": [arrays_of(1000 * step + i, n)] for i, n in enumerate(lengths)}


def loader_on(root: Path, options: dict[str, Any]) -> Any:
    """A loader of this rank: `dp` by `cp` places in rank-major order, any further ranks tensor-parallel."""
    import torch.distributed as dist

    from prime_io import PayloadLoader, Ranks

    dp, cp = options["split"]
    tp = dist.get_world_size() // (dp * cp)
    rank = dist.get_rank()
    place = Ranks(dp=(rank // (cp * tp), dp), cp=(rank // tp % cp, cp), timeout_s=options.get("gloo_s", 30))
    return PayloadLoader(
        PayloadStore(root / "payloads", create=False),
        OneReader(Lineage.load(root)),
        FIELDS,
        seq_len=64,
        start=options["start"][rank] if isinstance(options["start"], list) else options["start"],
        multiple=8,
        lookahead=2,
        ranks=place,
    )


def train(root: Path, say: Say, options: dict[str, Any]) -> None:
    """All steps, every row compared; says per micro-batch what it was."""
    with loader_on(root, options) as loader:
        for step in loader:
            made = made_of(step.number, options["lengths"])
            say(["step", step.number, step.count, step.masked])
            for mb in step:
                names = check(mb, made)
                say([mb.step, mb.index, names, mb.lo, mb.hi, [s.trace_id for s in mb.samples if s.masked]])
            loader.done(step.number)


def lose_during_the_step(root: Path, say: Say, options: dict[str, Any]) -> None:
    """Rank 0 deletes every file once the first micro-batch is there."""
    import torch.distributed as dist

    with loader_on(root, options) as loader:
        for mb in next(iter(loader)):
            say([mb.index])
            if mb.index == 0 and dist.get_rank() == 0:
                for file in options["files"]:
                    Path(file).unlink()
            dist.barrier()


def die(root: Path, say: Say, options: dict[str, Any]) -> None:
    """The last rank is killed in the middle of a step, or hangs there until the others have given up."""
    import torch.distributed as dist

    with loader_on(root, options) as loader:
        for mb in next(iter(loader)):
            say([mb.index])
            if mb.index == 0 and dist.get_rank() == dist.get_world_size() - 1:
                if options["how"] == "hang":
                    time.sleep(3 * options["gloo_s"])
                os.kill(os.getpid(), signal.SIGKILL)


def lose_step(root: Path, say: Say, options: dict[str, Any]) -> None:
    """Rank 1 leaves its loop early and calls done."""
    import torch.distributed as dist

    with loader_on(root, options) as loader:
        step = next(iter(loader))
        if dist.get_rank() == 1:
            step.taken = step.count
            loader.done(1)
        for _ in step:
            pass
        loader.done(1)


def interrupted(root: Path, say: Say, options: dict[str, Any]) -> None:
    """Rank 0 waits for one that hangs, and is told to stop."""
    import torch.distributed as dist

    with loader_on(root, options) as loader:
        step = iter(next(iter(loader)))
        next(step)
        if dist.get_rank() == 1:
            time.sleep(options["gloo_s"])
            return
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            next(step)
        except KeyboardInterrupt:
            say("interrupted")
