"""Files between the processes of one lineage: batches, weights, acknowledgements, the word to stop.

`<run>/lineages/<id>/{batches/step_<s>, weights/v<k>/, acks/step_<s>.<reader>, stop}`. Everything is published
by one rename and carries the lineage; what another lineage publishes, however late, is never looked at. Reading
is polling: small directories, opened afresh each time, which also makes network filesystems answer truly.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from . import _native
from .lineage import Lineage
from .types import PackedBatch, TrainBatch

_STEP = "step_"
_LOOK_AROUND_S = 1.0
"""How often a reader that waits looks whether it waits for something that can still come, seconds."""


def check_reader(name: str) -> None:
    """ValueError if it cannot be the name of a reader, which is part of a file's name."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise ValueError(f"reader is {name!r}: 1 to 64 letters, digits, - and _")


class Exchange:
    """One process's view of its lineage's directory. Methods block for one or two filesystem calls."""

    def __init__(self, lineage: Lineage) -> None:
        self.lineage = lineage
        self._look_around = 0.0
        self._root = _native.Root(str(lineage.directory), create=True)

    # -- orchestrator

    def publish_batch(self, batch: TrainBatch | PackedBatch) -> None:
        """Publish a batch for the readers. FileExistsError if this lineage published that step before."""
        assert batch.lineage == self.lineage.id, "a batch is published by its own lineage"
        data = batch.encode() if isinstance(batch, PackedBatch) else msgspec.msgpack.encode(batch)
        self._root.write(f"batches/{_STEP}{batch.step}", data, durable=False, exclusive=True)

    def trained(self, readers: Iterable[str]) -> int | None:
        """The last step that every reader has acknowledged; None before the first."""
        last = dict.fromkeys(readers, -1)
        for name, _ in self._root.list("acks"):
            step, _, reader = name.removeprefix(_STEP).partition(".")
            if step.isdecimal() and reader in last:
                last[reader] = max(last[reader], int(step))
        step_of_all = min(last.values())
        return None if step_of_all < 0 else step_of_all

    def say_stop(self, step: int) -> None:
        """Tell the readers that no batch after `step` will come: they commit that step and leave."""
        self._root.write("stop", str(step).encode(), durable=False)

    def forget(self, *, before: int) -> None:
        """Remove batches and acknowledgements of steps below `before`: every reader is past them."""
        for directory in ("batches", "acks"):
            for name, _ in self._root.list(directory):
                step = name.removeprefix(_STEP).partition(".")[0]
                if step.isdecimal() and int(step) < before:
                    self._root.remove(f"{directory}/{name}")

    def remove_weights(self, *, before: int) -> None:
        """Remove the weights of versions below `before`."""
        for version in self._versions():
            if version < before:
                self._root.remove(f"weights/v{version}")

    # -- readers

    def read_batch(self, step: int) -> TrainBatch | None:
        """Batch `step`, None if it is not there yet. ValueError if the file is not one of this lineage."""
        path = f"batches/{_STEP}{step}"
        try:
            data = self._root.read(path)
        except FileNotFoundError:
            return None
        batch = msgspec.msgpack.decode(data, type=TrainBatch)
        if batch.lineage != self.lineage.id or batch.step != step:
            raise ValueError(f"{path} holds batch {batch.step} of lineage {batch.lineage}")
        return batch

    def wait_batch(self, step: int, *, poll_s: float = 0.01) -> TrainBatch | None:
        """Wait for batch `step`; None once the orchestrator has said that it will not come."""
        while True:
            batch, is_last = self.look_for(step)
            if batch is not None or is_last:
                return batch
            time.sleep(poll_s)

    def look_for(self, step: int) -> tuple[TrainBatch | None, bool]:
        """Batch `step` if it is there, and whether it will never come. Does not wait.

        Once a second, while it is not there: LineageLeftError if the run has been resumed by somebody else,
        ValueError if a later batch is there (a reader that was restarted alone).
        """
        # In this order: what was published before the word to stop is still found.
        stop = self.stop_step()
        batch = self.read_batch(step)
        is_last = batch is None and stop is not None and stop < step
        if batch is None and not is_last and time.monotonic() >= self._look_around:
            self._look_around = time.monotonic() + _LOOK_AROUND_S
            return self._may_come(step), False
        return batch, is_last

    def _may_come(self, step: int) -> TrainBatch | None:
        """Batch `step` if it has come meanwhile; an error if it will never come in this life."""
        self.lineage.check_current(f"wait for batch {step}")
        names = [name.removeprefix(_STEP) for name, _ in self._root.list("batches")]
        later = [int(name) for name in names if name.isdecimal() and int(name) > step]
        batch = self.read_batch(step)
        if batch is None and later:
            raise ValueError(
                f"wait for batch {step}: it is gone and batch {min(later)} is there, so this life has trained it; end"
                " all processes of the run and begin a new life with prepare_resume"
            )
        return batch

    def acknowledge(self, step: int, reader: str) -> None:
        """Say that `reader` needs nothing of batch `step`, nor of any before it, any more.

        LineageLeftError if the run has been resumed by somebody else.
        """
        check_reader(reader)
        self.lineage.check_current(f"acknowledge step {step}")
        self._root.write(
            f"acks/{_STEP}{step}.{reader}", msgspec.json.encode({"lineage": self.lineage.id}), durable=False
        )

    def stop_step(self) -> int | None:
        """The step after which no batch will come, None while the run goes on."""
        try:
            return int(self._root.read("stop", limit=64))
        except FileNotFoundError:
            return None

    # -- weights

    def publish_weights(self, version: int, files: Mapping[str, bytes]) -> None:
        """Publish `weights/v<version>` as a directory of these files, complete from its first moment."""
        temporary = f"{_native.temporary_name()}"
        for name, data in files.items():
            self._root.write(f"{temporary}/{name}", data, durable=False)
        self._root.rename(temporary, f"weights/v{version}")

    def newest_weights(self) -> int | None:
        """The newest version published in this lineage."""
        return max(self._versions(), default=None)

    def weights_dir(self, version: int) -> Path:
        """Where the files of a published version are."""
        return self.lineage.weights_dir / f"v{version}"

    def _versions(self) -> list[int]:
        names = [name for name, is_dir in self._root.list("weights") if is_dir]
        return [int(name[1:]) for name in names if name[:1] == "v" and name[1:].isdecimal()]
