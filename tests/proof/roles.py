"""The processes of a life: who prepares it, orchestrator, trainer, writers. Or all in one, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prime_io import (
    CheckpointManager,
    Dispatcher,
    Environment,
    Episode,
    Exchange,
    FieldSpec,
    Lineage,
    OpenGroup,
    Orchestrator,
    PayloadSegment,
    PayloadStore,
    Policy,
    Progress,
    Rollout,
    SaveReport,
    Snapshot,
    TaskRequest,
    TrainSink,
    TrainSource,
    prepare_resume,
)
from prime_io.testing import FIELD, PRESETS, FakeLoad, FakeTrainer, run_virtual

from .ablations import ABLATIONS
from .events import EventLog
from .points import Kill, Points, during, install


class Config(msgspec.Struct, frozen=True):
    """A run, small enough to be lived through a thousand times."""

    seed: int = 0
    steps: int = 7
    checkpoint_every: int = 2
    group_size: int = 4
    batch_size: int = 8
    max_inflight: int = 13
    max_off_policy_steps: int = 3
    keep_last: int = 1
    pin: str = "link"
    shape: str = "qwen3-30b-a3b"
    traces: int = 1
    error_rate: float = 0.05
    straggler_rate: float = 0.08
    straggler_s: float = 0.12
    delay_s: tuple[float, float] = (0.001, 0.015)
    step_s: float = 0.03
    save_s: float = 0.02
    """How long a save waits before it begins, as behind another one."""
    quiet: bool = False
    """Batches are cut only when nothing is in flight: then ids per step do not depend on time."""
    filter_zero_advantages: bool = True
    ablation: str = ""

    def load(self, store: PayloadStore) -> FakeLoad:
        return FakeLoad(
            store=store,
            shape=PRESETS[self.shape],
            seed=self.seed,
            tokens=(12, 32),
            traces=self.traces,
            delay_s=self.delay_s,
            error_rate=self.error_rate,
            straggler_rate=self.straggler_rate,
            straggler_s=self.straggler_s,
        )

    def source(self) -> TrainSource:
        envs = [
            Environment("math", list(range(7)), self.group_size, 2.0),
            Environment("code", list(range(100, 111)), self.group_size),
        ]
        return TrainSource(envs=envs, seed=self.seed)


class Sink(TrainSink):
    """Tells what was added; waits for quiet if told to."""

    log: EventLog
    quiet: Callable[[], bool] | None = None

    async def add(self, episode: Episode) -> None:
        await super().add(episode)
        self.log("added", {"traces": [trace.id for trace in episode.traces]})

    def ready(self) -> bool:
        return (self.quiet is None or self.quiet()) and super().ready()


class Source(TrainSource):
    """Tells what was drawn."""

    log: EventLog

    def next_task(self, step: int) -> TaskRequest:
        new = not self.resumed
        request = super().next_task(step)
        if new:
            self.log("drawn", {"group": request.group_id, "task": request.task})
        return request


class Manager(CheckpointManager):
    """A save takes its time to begin."""

    wait_s = 0.0

    async def save(self, snapshot: Snapshot, *, store: PayloadStore) -> SaveReport | None:
        await asyncio.sleep(self.wait_s)
        return await super().save(snapshot, store=store)


class Writers:
    """The orchestrator's end of the writers' sockets."""

    def __init__(self, sockets: Sequence[socket.socket], load: FakeLoad) -> None:
        self._sockets = sockets
        self._load = load
        self._links: list[_Link] = []

    async def start(self) -> None:
        for sock in self._sockets:
            reader, writer = await asyncio.open_connection(sock=sock)
            self._links.append(_Link(reader, writer))

    async def __call__(self, rollout: Rollout) -> Episode:
        links = [link for link in self._links if link.alive]
        if not links:
            raise ConnectionError("no writer is left")
        payload = await min(links, key=lambda link: len(link.waiting)).ask(rollout)
        return self._load.episode(rollout, payload)

    async def close(self) -> None:
        """Returns when the writers are gone."""
        for link in self._links:
            with contextlib.suppress(OSError):
                link.writer.write_eof()
        await asyncio.gather(*(link.receiving for link in self._links))
        for link in self._links:
            link.writer.close()


Payload = dict[str, list[PayloadSegment]]


class _Answer(msgspec.Struct, array_like=True):
    number: int
    payload: Payload | None
    error: str = ""


class _Link:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.waiting: dict[int, asyncio.Future[Payload]] = {}
        self.alive = True
        self._number = 0
        self.receiving = asyncio.ensure_future(self._receive())

    async def ask(self, rollout: Rollout) -> Payload:
        self._number += 1
        number, future = self._number, asyncio.get_running_loop().create_future()
        self.waiting[number] = future
        _send(self.writer, (number, rollout))
        try:
            return await future
        finally:
            self.waiting.pop(number, None)

    async def _receive(self) -> None:
        try:
            while True:
                answer = msgspec.msgpack.decode(await _receive(self.reader), type=_Answer)
                future = self.waiting.get(answer.number)
                if future is None or future.done():
                    continue  # nobody waits any more: what it wrote is for the sweep
                if answer.payload is None:
                    future.set_exception(RuntimeError(answer.error))
                else:
                    future.set_result(answer.payload)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.alive = False
            for future in self.waiting.values():
                if not future.done():
                    future.set_exception(ConnectionError("the writer is gone"))


async def orchestrate(
    run: Path, config: Config, log: EventLog, sockets: Sequence[socket.socket], *, alone: Path
) -> None:
    """`alone`: appears when no process of a former life is left. Without sockets, everything is in here."""
    lineage = Lineage.load(run)
    log.lineage = lineage.id
    store = PayloadStore(run / "payloads", owner=True)
    progress, policy = Progress(), Policy()
    load = config.load(store)
    writers = Writers(sockets, load)
    source = Source(envs=config.source().envs.values(), seed=config.seed)
    sink = Sink(
        store=store,
        progress=progress,
        policy=policy,
        group_size=config.group_size,
        batch_size=config.batch_size,
        max_off_policy_steps=config.max_off_policy_steps,
        fields={FIELD: FieldSpec(align="token-1")},
        filter_zero_advantages=config.filter_zero_advantages,
        lineage=lineage.id,
    )
    source.log = sink.log = log
    dispatcher = Dispatcher(
        source=source,
        run_episode=writers if sockets else load,
        policy=policy,
        progress=progress,
        max_inflight=config.max_inflight,
        max_off_policy_steps=config.max_off_policy_steps,
        lineage=lineage.id,
    )
    manager = Manager(run_dir=run, keep_last=config.keep_last, pin=config.pin, lineage=lineage)  # type: ignore[arg-type]
    manager.wait_s = config.save_s

    def told(event: str, facts: Any) -> None:
        if event == "cut":
            known: dict[str, OpenGroup] = dispatcher.open_train_groups() | sink.open_groups
            facts = {
                **{name: facts[name] for name in ("step", "queued", "members", "drawn", "inflight")},
                "open": {g: [len(o.members), o.cancelled, o.target] for g, o in known.items()},
            }
        log(event, facts)

    orchestrator = Orchestrator(
        exchange=Exchange(lineage),
        store=store,
        source=source,
        dispatcher=dispatcher,
        sink=sink,
        manager=manager,
        progress=progress,
        policy=policy,
        max_steps=config.steps,
        checkpoint_every=config.checkpoint_every,
        on_event=told,
        poll_s=0.004,
    )
    forget = sink.on_consumed

    def consumed(group_id: str) -> None:
        log("consumed", {"group": group_id})
        assert forget is not None
        forget(group_id)

    sink.on_consumed = consumed
    if config.quiet:
        rounds = _Rounds(dispatcher, sink)
        sink.quiet = rounds.quiet
        dispatcher.may_open = rounds.limit(dispatcher.may_open)
    if config.ablation in ABLATIONS:
        ABLATIONS[config.ablation](orchestrator)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, orchestrator.stop)
    if lineage.resumed_from is not None:
        await orchestrator.restore(lineage.resumed_from)
    await writers.start()
    trainer = None if sockets else asyncio.ensure_future(train(run, config, log, store=store))
    if trainer is None:
        await orchestrator.run()
    else:
        running = asyncio.ensure_future(orchestrator.run())
        await asyncio.wait([running, trainer], return_when=asyncio.FIRST_EXCEPTION)
        for task in (trainer, running):
            if task.done():
                task.result()
    await dispatcher.close()
    await writers.close()
    while not alone.exists():
        await asyncio.sleep(0.01)
    await orchestrator.finish()
    counters = {name: n for name, n in sink.counters.items() if n}
    log("finished", {"counters": counters, "held": len(sink.ledger)})
    store.close()


class _Rounds:
    """New groups are opened three at a time, when everything has arrived: the order of arrivals is the load's."""

    GROUPS = 3

    def __init__(self, dispatcher: Dispatcher, sink: TrainSink) -> None:
        self._dispatcher, self._sink = dispatcher, sink
        self._left = 0

    def quiet(self) -> bool:
        return not (
            self._dispatcher.open_train_groups() or self._dispatcher.emitted or self._sink.open_groups
        )

    def limit(self, may_open: Callable[[], bool]) -> Callable[[], bool]:
        def limited() -> bool:
            if not may_open():
                return False
            if self.quiet():
                self._left = self.GROUPS
            self._left -= 1
            return self._left >= 0

        return limited


async def _opened(run: Path) -> PayloadStore:
    """The store, once its owner has made it."""
    while not (run / "payloads" / "STORE").exists():
        await asyncio.sleep(0.005)
    return PayloadStore(run / "payloads", create=False)


async def train(run: Path, config: Config, log: EventLog, *, store: PayloadStore | None = None) -> None:
    lineage = Lineage.load(run)  # at once: while the store is waited for, another life may begin
    log.lineage = lineage.id
    load = config.load(store or await _opened(run))
    trainer = FakeTrainer(
        run, load=load, store=load.store, lineage=lineage, step_s=config.step_s, poll_s=0.004, on_event=log
    )
    await trainer.run()


async def write(run: Path, config: Config, log: EventLog, sock: socket.socket) -> None:
    """One writer: rollouts in, segments out, until the orchestrator has had enough or is gone."""
    log.lineage = Lineage.load(run).id
    load = config.load(await _opened(run))
    reader, writer = await asyncio.open_connection(sock=sock)
    tasks: set[asyncio.Task[None]] = set()

    async def work(number: int, rollout: Rollout) -> None:
        try:
            answer = _Answer(number, await load.work(rollout))
        except Exception as error:
            answer = _Answer(number, None, f"{type(error).__name__}: {error}")
        _send(writer, answer)

    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            number, rollout = msgspec.msgpack.decode(await _receive(reader), type=tuple[int, Rollout])
            task = asyncio.ensure_future(work(number, rollout))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
        writer.close()


def prepare(run: Path, step: int | None, log: EventLog) -> None:
    with during("prepare"):
        log.lineage = prepare_resume(run, step).id
    log("prepared", {"step": step})


def become(
    role: str,
    case: Path,
    config: Config,
    life: int,
    *,
    kill: Kill | None,
    sockets: Sequence[socket.socket] = (),
    step: int | None = None,
    released: Callable[[], object] = lambda: None,
) -> int:
    """The body of a process; returns its exit status."""
    log = EventLog(case / "events.jsonl", life=life, role=role)
    output = os.open(case / f"life-{life}-{role}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", force=True)
    run = case / "run"
    points = Points(kill, log)
    try:
        install(points)
        released()
        if role == "prepare":
            prepare(run, step, log)
        elif role == "orchestrator":
            alone = case / f"alone-{life}"
            main = orchestrate(run, config, log, sockets, alone=alone)
            asyncio.run(main) if sockets else run_virtual(main)
        elif role == "trainer":
            asyncio.run(train(run, config, log))
        else:
            asyncio.run(write(run, config, log, sockets[0]))
        points.report()
    except BaseException as error:
        traceback.print_exc()
        log("failed", {"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def _send(writer: asyncio.StreamWriter, message: object) -> None:
    data = msgspec.msgpack.encode(message)
    writer.write(len(data).to_bytes(4, "big") + data)


async def _receive(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
