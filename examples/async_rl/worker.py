"""An inference worker process: samples in bfloat16 with the current policy, writes routed experts by handle."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from prime_io import Exchange, Lineage, PayloadSegment, PayloadStore

from . import task
from .events import EventLog
from .model import Generation, MoETransformer, generate
from .pool import Message, frame, read_message
from .settings import ROUTED_EXPERTS, Settings
from .weights import load_weights


class Worker:
    def __init__(self, run: Path) -> None:
        self.settings, self.lineage = Settings.load(run), Lineage.load(run)
        self.exchange = Exchange(self.lineage)
        self.store = PayloadStore(run / "payloads", create=False)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model: MoETransformer
        self.version = -1

    def load_weights(self, version: int) -> None:
        """The orchestrator has seen this version published, or a newer one that replaced it."""
        while version > self.version:
            try:
                weights = load_file(self.exchange.weights_dir(version) / "model.safetensors")
            except FileNotFoundError:
                newest = self.exchange.newest_weights()
                if newest is None or newest <= version:
                    raise
                version = newest
                continue
            self.model = load_weights(weights, device=self.device)
            self.version = version

    def rollouts(self, jobs: list[Message]) -> tuple[list[Message], int]:
        """One batch of rollouts, their payloads published by one call; also the payload bytes."""
        self.load_weights(max(job["policy"] for job in jobs))
        generations = generate(
            self.model,
            [task.prompt_of(job["word"]) for job in jobs],
            task.MAX_NEW,
            1.0,
            [job["seed"] for job in jobs],
            eos=task.EOS,
        )
        results = []
        for version in {job["dispatch"] for job in jobs}:
            mine = [(job, g) for job, g in zip(jobs, generations, strict=True) if job["dispatch"] == version]
            written = self.store.write_many([{ROUTED_EXPERTS: g.routing} for _, g in mine], version=version)
            results += [
                self.result(job, g, segments) for (job, g), segments in zip(mine, written, strict=True)
            ]
        return results, sum(g.routing.numel() for g in generations)

    def result(self, job: Message, g: Generation, segments: dict[str, PayloadSegment] | Exception) -> Message:
        if isinstance(segments, Exception):
            raise segments
        return {
            "job": job["job"],
            "tokens": g.tokens.numpy(),
            "mask": g.mask.numpy(),
            "logprobs": g.logprobs.numpy(),
            "payload": msgspec.msgpack.encode(list(segments.values())),
            "version": self.version,
            "lineage": self.lineage.id,
        }


async def work(run: Path, socket: Path, name: str) -> None:
    worker = Worker(run)
    log = EventLog(run, name, worker.lineage.id)
    while not socket.exists():  # the orchestrator listens once it has restored
        await asyncio.sleep(0.05)
    reader, writer = await asyncio.open_unix_connection(socket)
    pending: asyncio.Queue[Message | None] = asyncio.Queue()

    async def receive() -> None:
        try:
            while True:
                pending.put_nowait(await read_message(reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            pending.put_nowait(None)

    receiving = asyncio.ensure_future(receive())
    while (job := await pending.get()) is not None:
        jobs = [job]
        await asyncio.sleep(0.005)  # what else has just come joins the batch
        while not pending.empty() and len(jobs) < worker.settings.worker_batch:
            more = pending.get_nowait()
            if more is None:
                pending.put_nowait(None)
                break
            jobs.append(more)
        results, written = await asyncio.to_thread(worker.rollouts, jobs)
        log("rollouts", {"n": len(jobs), "bytes": written})
        for result in results:
            writer.write(frame(result))
        await writer.drain()
    await receiving


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--name", required=True)
    args = parser.parse_args()
    torch.set_num_threads(Settings.load(args.run).threads)
    asyncio.run(work(args.run, args.socket, args.name))


if __name__ == "__main__":
    main()
