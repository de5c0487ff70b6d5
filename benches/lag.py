"""How late an event loop is: a ticker beside the work, and a second process that ticks at the same time.

Both loops wake every millisecond. The second process shares the machine with the work but not the interpreter:
what both show is a lack of CPUs (others' load, and the work's own native threads: few cores have no room for eight),
what only the first shows is the doing of whoever held the interpreter.

On a machine that others load, neither says much. So each late wake-up is also charged to this process: *own* is
the CPU time that its Python threads (the loop's too) used between the moment the wake-up was due and the moment
it came, at most the lag itself. It is what would be left on an idle machine, or more: a thread that was busy in
native code, without the interpreter, is charged as well.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

T = TypeVar("T")
PERIOD_S = 1e-3
P99_MS, MAX_MS = 5.0, 20.0


class Lag(NamedTuple):
    """Milliseconds later than asked for, over `ticks` wake-ups."""

    ticks: int
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, late_s: Sequence[float]) -> Lag:
        late = sorted(1e3 * s for s in late_s)
        n = len(late)
        return cls(n, late[n // 2], late[min(n - 1, n * 99 // 100)], late[-1])

    @property
    def good(self) -> bool:
        return self.p99 < P99_MS and self.max < MAX_MS

    def __str__(self) -> str:
        return f"p50 {self.p50:6.2f}  p99 {self.p99:6.2f}  max {self.max:7.2f} ms"


class Tick(NamedTuple):
    due: float
    late: float
    own: float


class Ticker:
    """Ticks on the running loop between `start` and `stop`."""

    def __init__(self) -> None:
        self.ticks: list[Tick] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._tick())

    def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()

    def between(self, start: float, end: float) -> tuple[Lag, Lag]:
        """The lag of the ticks due in that time of `time.monotonic`, and what of it is our own."""
        ticks = [tick for tick in self.ticks if start <= tick.due <= end]
        return Lag.of([tick.late for tick in ticks]), Lag.of([tick.own for tick in ticks])

    async def _tick(self) -> None:
        used = cpu_seconds()
        while True:
            due = time.monotonic() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            late = time.monotonic() - due
            now = cpu_seconds()
            own = sum(seconds - used.get(thread, 0.0) for thread, seconds in now.items())
            self.ticks.append(Tick(due, late, min(late, own)))
            used = now


def cpu_seconds() -> dict[int, float]:
    """CPU time of every Python thread so far."""
    return {
        thread.ident: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None and thread.is_alive()
    }


class Beside:
    """The control: a process that does nothing but tick. Linux has one monotonic clock for all of them."""

    def __enter__(self) -> Beside:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ticking\n"
        return self

    def between(self, start: float, end: float) -> Lag:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{start} {end}\n")
        self._process.stdin.flush()
        ticks, p50, p99, worst = self._process.stdout.readline().split()
        return Lag(int(ticks), float(p50), float(p99), float(worst))

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Row(NamedTuple):
    name: str
    seconds: float
    loop: Lag
    own: Lag
    beside: Lag

    @property
    def verdict(self) -> str:
        return "PASS" if self.loop.good else "over: no CPU free" if self.own.good else "over"


async def measure(name: str, work: Awaitable[T]) -> tuple[Row, T]:
    """Await `work` with both tickers running; the loop is alive before and after."""
    ticker = Ticker()
    with Beside() as beside:
        ticker.start()
        await asyncio.sleep(0.05)
        start = time.monotonic()
        result = await work
        end = time.monotonic()
        await asyncio.sleep(0.05)  # what is due before the end may come after it
        ticker.stop()
        row = Row(name, end - start, *ticker.between(start, end), beside.between(start, end))
    return row, result


def show(capsys: pytest.CaptureFixture[str], title: str, rows: Sequence[Row]) -> None:
    load = " ".join(Path("/proc/loadavg").read_text().split()[:3])
    with capsys.disabled():
        print(f"\n{title}  [load {load}; target p99 < {P99_MS:g} ms, max < {MAX_MS:g} ms]")
        for row in rows:
            print(
                f"  {row.name:31s} {row.seconds:6.2f} s  {row.loop}  {row.loop.ticks:5d} ticks  {row.verdict}"
            )
            print(f"  {'  of it our own':31s} {'':8s}  {row.own}")
            print(f"  {'  a process beside it':31s} {'':8s}  {row.beside}  {row.beside.ticks:5d} ticks")


def extra(rows: Sequence[Row]) -> dict[str, object]:
    """The same for the benchmark's JSON."""
    return {
        row.name: {
            "seconds": row.seconds,
            "loop": row.loop._asdict(),
            "own": row.own._asdict(),
            "beside": row.beside._asdict(),
        }
        for row in rows
    }


def _beside() -> None:
    async def main() -> None:
        ticker = Ticker()
        ticker.start()
        print("ticking", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            start, end = map(float, line.split())
            print(*ticker.between(start, end)[0], flush=True)

    asyncio.run(main())


if __name__ == "__main__":
    _beside()
