"""The ranks of a trainer, and how they agree.

All of it happens on the caller's thread, in a gloo group of its own: it neither waits for CUDA nor mixes with the
trainer's collectives. One primitive: everybody says something short and hears what everybody said.
"""

from __future__ import annotations

import time
import zlib
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

__all__ = ["Ranks", "Said"]


class Said(NamedTuple):
    """What one rank said."""

    message: bytes
    ready: bool


class Ranks:
    """This process's place among the trainer's ranks.

    `dp` and `cp` are (rank, size) of the data- and context-parallel dimension, as a DeviceMesh gives them. Ranks
    of equal `dp` and `cp` (tensor-parallel ones) read the same. Default `dp`: every rank for itself.

    Made by all processes of the default process group at the same point of their programs, since it creates a
    gloo group; without an initialised `torch.distributed` there is one rank. `timeout_s` bounds how long a rank
    waits for the others at a micro-batch boundary: make it longer than the longest step (compilation included).

    ValueError on every rank if the places do not make a full grid.
    """

    def __init__(
        self,
        *,
        dp: tuple[int, int] | None = None,
        cp: tuple[int, int] = (0, 1),
        timeout_s: float = 600.0,
    ) -> None:
        spread = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if spread else (0, 1)
        self.dp_rank, self.dp_size = dp or (self.rank, self.size)
        self.cp_rank, self.cp_size = cp
        self.timeout_s = timeout_s
        self._group: Any = None
        if self.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._check()

    @classmethod
    def alone(cls, *, dp: tuple[int, int] = (0, 1), cp: tuple[int, int] = (0, 1)) -> Ranks:
        """A place from which nothing is agreed with anybody: no group, one rank speaks for itself."""
        self = cls.__new__(cls)
        self.rank, self.size, self.timeout_s, self._group = 0, 1, 0.0, None
        self.dp_rank, self.dp_size = dp
        self.cp_rank, self.cp_size = cp
        return self

    def _check(self) -> None:
        place = (self.dp_rank, self.dp_size, self.cp_rank, self.cp_size)
        said = self.tell(",".join(map(str, place)).encode(), step=0, at="construction")
        places = [tuple(map(int, s.message.split(b","))) for s in said]
        grid = {(d, c) for d in range(self.dp_size) for c in range(self.cp_size)}
        found = [(d, c) for d, _, c, _ in places]
        if (
            any((ds, cs) != (self.dp_size, self.cp_size) for _, ds, _, cs in places)
            or set(found) != grid
            or any(found.count(p) * len(grid) != self.size for p in grid)
        ):
            raise ValueError(
                f"the {self.size} ranks do not make a grid: (dp rank, dp size, cp rank, cp size) are {places}; every "
                "place must be taken, by equally many ranks"
            )

    def tell(self, message: bytes = b"", *, step: int, at: str, ready: bool = False) -> list[Said]:
        """Say `message` to every rank; returns what each said, in order of rank.

        One small all_gather; messages are sent only where there are any. `step` and `at` say where this rank is.

        ConnectionError if a rank is gone, TimeoutError if one does not answer, RuntimeError if one is
        elsewhere: the loader cannot go on after any of them. Signals get through while it waits.
        """
        if self._group is None:
            return [Said(message, ready)]
        end = time.monotonic() + self.timeout_s
        place = zlib.crc32(at.encode())
        mine = torch.tensor([step, place, len(message), ready], dtype=torch.int64)
        heads = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(lambda: dist.all_gather(heads, mine, group=self._group, async_op=True), end, step, at)
        heard = [[int(x) for x in head] for head in heads]
        for rank, (its_step, its_place, _, _) in enumerate(heard):
            if (its_step, its_place) != (step, place):
                raise RuntimeError(
                    f"rank {rank} is in step {its_step}, but rank {self.rank} is in step {step}, {at}: all ranks "
                    "must iterate all micro-batches of a step and call done() for it"
                )
        said = []
        for rank, (_, _, length, its_ready) in enumerate(heard):
            data = torch.empty(length, dtype=torch.uint8)
            if length:
                if rank == self.rank:
                    data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
                self._wait(
                    lambda data=data, rank=rank: dist.broadcast(data, rank, group=self._group, async_op=True),
                    end,
                    step,
                    at,
                )
            said.append(Said(data.numpy().tobytes(), bool(its_ready)))
        return said

    def _wait(self, start: Any, end: float, step: int, at: str) -> None:
        """Wait for a collective in short slices, so that signals get through."""
        where = f"step {step}, {at}: rank {self.rank} waited for the other ranks"
        try:
            work = start()
            pause = 2e-5
            while not work.is_completed():
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"{where} for {self.timeout_s:g} s: one hangs, or its step takes longer than timeout_s"
                    )
                time.sleep(pause)
                pause = min(2 * pause, 0.005)
            work.wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ConnectionError(f"{where}, and one is gone: {reason}; restart all ranks") from error

    def close(self) -> None:
        """Give the group up. Idempotent."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
