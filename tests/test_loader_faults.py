"""`PayloadLoader` on a filesystem whose reads fail or take long, by a real FUSE mount."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from loading import EXPERTS, FIELDS, Run, check
from mounts import mounts_below
from prime_io import PayloadStore
from work import wait_until

pytest.importorskip("torch", reason="the loader makes tensors: pip install 'prime-io[torch]'")

from prime_io import PayloadLoader, Ranks


class Faulty(NamedTuple):
    run: Run
    store: PayloadStore
    """The run's store, through the mount."""
    control: Path

    def loader(self) -> PayloadLoader:
        return PayloadLoader(
            self.store, self.run.exchange, FIELDS, seq_len=64, start=1, lookahead=1, ranks=Ranks.alone()
        )


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Faulty]:
    run = Run(tmp_path / "run")
    with mounts_below(tmp_path / "mounts") as mounts:
        mount = mounts.with_faults(Path(run.store.root), tmp_path / "control")
        with PayloadStore(mount, create=False) as store:
            yield Faulty(run, store, tmp_path / "control")
    run.store.close()


@pytest.mark.parametrize("ragged", [False, True])
def test_a_stale_handle_is_opened_again(faulty: Faulty, ragged: bool) -> None:
    """ESTALE in the middle of a read (a file server was restarted) is not the end: the file is opened once more."""
    made = faulty.run.batch(1, [40], ragged=ragged)
    with faulty.loader() as loader:
        step = next(iter(loader))
        faulty.control.write_text("ESTALE 1")
        assert [check(mb, made) for mb in step] == [["t1.0"]]
    assert not faulty.control.read_text(), "the fault was met"


@pytest.mark.parametrize("code", ["EIO", "ESTALE"])
def test_a_read_that_fails_names_the_trace(faulty: Faulty, code: str) -> None:
    """A disk error is an OSError with its errno that says whose data it is, not a masked sample."""
    faulty.run.batch(1, [40])
    faulty.control.write_text(f"{code} 1000")
    with faulty.loader() as loader:
        step = next(iter(loader))
        with pytest.raises(OSError, match=r"micro-batch 0.*trace t1\.0, field") as caught:
            list(step)
        assert caught.value.errno == getattr(errno, code) and caught.value.filename
    faulty.control.write_text("")


def test_ctrl_c_gets_through_a_long_read(faulty: Faulty) -> None:
    """A trainer that waits for a read of half a minute leaves at once when it is told to."""
    faulty.run.batch(1, [40])
    before = threading.active_count()
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), faulty.loader() as loader:
        step = next(iter(loader))
        faulty.control.write_text("slow 4")
        timer = threading.Timer(0.5, interrupt)
        timer.start()
        list(step)
    waited = time.monotonic() - sent[0]
    faulty.control.write_text("")
    timer.join()
    # The next of its reads would have ended after four seconds.
    assert waited < 1
    print(f"KeyboardInterrupt after {waited * 1e3:.1f} ms")
    wait_until(lambda: threading.active_count() == before)


def test_a_fault_is_met_by_the_rank_that_reads(faulty: Faulty) -> None:
    """The fixture does what it says: a read fails exactly as often as it was told to."""
    faulty.run.batch(1, [40])
    batch = faulty.run.exchange.read_batch(1)
    assert batch is not None
    [segment] = [s for s in batch.traces[0].samples[0].payload if s.field == EXPERTS][:1]
    faulty.control.write_text("EIO 1")
    with pytest.raises(OSError, match="gather"):
        faulty.store.read(segment)
    rows: Any = faulty.store.read(segment)
    assert len(rows) == segment.rows
