"""The orchestrator process: owns the store, queues by handle, never touches a payload byte."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import signal
from pathlib import Path

import msgspec
import numpy as np

from prime_io import (
    CheckpointManager,
    Dispatcher,
    Environment,
    Episode,
    Exchange,
    FieldSpec,
    Lineage,
    Orchestrator,
    PayloadSegment,
    PayloadStore,
    Policy,
    PolicySpan,
    Progress,
    Rollout,
    Sample,
    Trace,
    TrainSink,
    TrainSource,
)

from . import task
from .events import EventLog
from .pool import Message, WorkerPool
from .settings import ROUTED_EXPERTS, WORDS, Settings


def segments_of(message: Message) -> list[PayloadSegment]:
    return msgspec.msgpack.decode(message["payload"], type=list[PayloadSegment])


async def tell_the_queue(log: EventLog, sink: TrainSink) -> None:
    """What the launcher goes by when it chooses its moment."""
    while True:
        log("queue", {"traces": sink.queued})
        await asyncio.sleep(0.05)


async def orchestrate(run: Path, socket: Path) -> None:
    settings, lineage = Settings.load(run), Lineage.load(run)
    log = EventLog(run, "orchestrator", lineage.id)
    store = PayloadStore(run / "payloads", owner=True)
    exchange = Exchange(lineage)
    progress, policy = Progress(), Policy()
    train_words, _ = task.words()
    source = TrainSource(envs=[Environment(WORDS, train_words, settings.group_size)], seed=settings.seed)
    pool = WorkerPool(
        socket,
        capacity=settings.worker_batch,
        on_late=lambda message: sink.discard(segments_of(message)),
    )

    async def run_episode(rollout: Rollout) -> Episode:
        number = f"{settings.seed}/{rollout.group_id}/{rollout.member}"
        chance = random.Random(number)
        result = await pool.run(
            {
                "word": rollout.task,
                "seed": chance.getrandbits(48),
                "policy": policy.version,
                "dispatch": rollout.dispatch_version,
            }
        )
        if chance.random() < 0.1:
            await asyncio.sleep(chance.random() * settings.straggler_s)
        name = f"{rollout.group_id}.{rollout.member}.{lineage.id[:6]}"
        sample = Sample(
            token_ids=np.asarray(result["tokens"], np.int32),
            mask=np.asarray(result["mask"], np.bool_),
            logprobs=np.asarray(result["logprobs"], np.float32),
            payload=segments_of(result),
        )
        return Episode(
            id=name,
            env_name=rollout.env_name,
            group_id=rollout.group_id,
            task=rollout.task,
            policy=PolicySpan(result["version"], result["version"]),
            dispatch_version=rollout.dispatch_version,
            traces=[Trace(name, None, [sample])],
            lineage=result["lineage"],
        )

    async def verify(episode: Episode) -> None:
        """The reward. A real verifier runs code or asks a model, and takes its time."""
        await asyncio.sleep(settings.verifier_s)
        for trace in episode.traces:
            sample = trace.samples[0]
            trace.reward = task.reward(episode.task, sample.token_ids[sample.mask].tolist())

    sink = TrainSink(
        store=store,
        progress=progress,
        policy=policy,
        group_size={WORDS: settings.group_size},
        batch_size=settings.batch_size,
        max_off_policy_steps=settings.max_off_policy_steps,
        fields={ROUTED_EXPERTS: FieldSpec(align="token-1")},
        score_episode=verify,
        lineage=lineage.id,
    )
    dispatcher = Dispatcher(
        source=source,
        run_episode=run_episode,
        policy=policy,
        progress=progress,
        max_inflight=settings.max_inflight,
        max_off_policy_steps=settings.max_off_policy_steps,
        lineage=lineage.id,
    )
    manager = CheckpointManager(run_dir=run, keep_last=settings.keep_last, pin=settings.pin)
    orchestrator = Orchestrator(
        exchange=exchange,
        store=store,
        source=source,
        dispatcher=dispatcher,
        sink=sink,
        manager=manager,
        progress=progress,
        policy=policy,
        max_steps=settings.steps,
        checkpoint_every=settings.checkpoint_every,
        on_event=lambda event, facts: log(event, dict(facts)),
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, orchestrator.stop)
    await asyncio.to_thread(manager.remove_leftovers)
    if lineage.resumed_from is not None:
        await orchestrator.restore(lineage.resumed_from)
    await pool.start()
    pulse = asyncio.ensure_future(tell_the_queue(log, sink))
    await orchestrator.run()
    pulse.cancel()
    await dispatcher.close()
    await pool.close()
    await orchestrator.finish()
    log("finished", {"counters": dict(sink.counters)})
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--socket", type=Path, required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="orchestrator: %(name)s: %(message)s")
    asyncio.run(orchestrate(args.run, args.socket))


if __name__ == "__main__":
    main()
