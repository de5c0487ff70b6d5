"""The orchestrator's side of the inference workers: a Unix socket, one message per rollout and result."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prime_io.state import decode_state, encode_state

Message = dict[str, Any]


async def read_message(reader: asyncio.StreamReader) -> Message:
    size = int.from_bytes(await reader.readexactly(4), "little")
    message = decode_state(await reader.readexactly(size))
    assert isinstance(message, dict)
    return message


def frame(message: Message) -> bytes:
    body = encode_state(message)
    return len(body).to_bytes(4, "little") + body


class WorkerPool:
    """Hands jobs to whichever worker has room; a worker that dies fails its jobs.

    `on_late(result)`: the result of a rollout that was cancelled meanwhile.
    """

    def __init__(self, path: Path, *, capacity: int, on_late: Callable[[Message], object]) -> None:
        self._path, self._capacity, self._on_late = path, capacity, on_late
        self._waiting: deque[tuple[int, Message]] = deque()
        self._results: dict[int, asyncio.Future[Message]] = {}
        self._workers: dict[asyncio.StreamWriter, set[int]] = {}
        self._next = 0
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def run(self, job: Message) -> Message:
        number, self._next = self._next, self._next + 1
        future = self._results[number] = asyncio.get_running_loop().create_future()
        self._waiting.append((number, job))
        self._assign()
        try:
            return await future
        finally:
            del self._results[number]

    def _assign(self) -> None:
        while self._waiting and self._workers:
            writer = min(self._workers, key=lambda w: len(self._workers[w]))
            if len(self._workers[writer]) >= self._capacity:
                return
            number, job = self._waiting.popleft()
            if number in self._results:
                self._workers[writer].add(number)
                writer.write(frame({"job": number, **job}))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        jobs = self._workers[writer] = set()
        self._assign()
        try:
            while True:
                result = await read_message(reader)
                number = result["job"]
                jobs.discard(number)
                future = self._results.get(number)
                if future is None or future.done():
                    self._on_late(result)
                else:
                    future.set_result(result)
                self._assign()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            del self._workers[writer]
            writer.close()
            for number in jobs:
                future = self._results.get(number)
                if future is not None and not future.done():
                    future.set_exception(ConnectionError("the inference worker has died"))

    async def close(self) -> None:
        """Let the workers go, and wait until they went: they leave when no more job can come."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._workers):
            writer.write_eof()
        while self._workers:
            await asyncio.sleep(0.01)
