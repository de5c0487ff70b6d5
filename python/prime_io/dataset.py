"""The loader as a `torch.utils.data.IterableDataset`, for trainers that are built around a DataLoader."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from .exchange import Exchange
from .lineage import Lineage, LineageLeftError
from .loader import PayloadLoader
from .microbatch import MicroBatch
from .ranks import Ranks
from .segment import FieldSpec
from .store import PayloadStore


class PayloadDataset(IterableDataset[MicroBatch]):
    """The micro-batches of a run's current lineage, on the CPU, one after the other, for a DataLoader.

    `DataLoader(PayloadDataset(...), batch_size=None, num_workers=k)` gives them in order for any k: worker i reads
    every k-th. Workers may be forked or spawned: the dataset is parameters, each process opens run and store for
    itself when it iterates. CPU only: a forked child cannot use CUDA; copy to the device in the training process.

    `run` is the run directory, `store` that of the payloads (default `<run>/payloads`); the other arguments are
    those of `PayloadLoader`. `dp` and `cp` are this rank's (rank, size).

    A worker talks to nobody, so nothing is agreed: what is missing always raises, and a rank that fails does not
    stop the others. The trainer says when a step is over, by `Exchange.acknowledge`. LineageLeftError when
    iterated after the run was resumed. For more than one rank prefer `PayloadLoader`.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        fields: Mapping[str, FieldSpec],
        *,
        seq_len: int,
        start: int,
        store: str | os.PathLike[str] | None = None,
        dp: tuple[int, int] = (0, 1),
        cp: tuple[int, int] = (0, 1),
        multiple: int = 1,
        columns: Mapping[str, FieldSpec] | None = None,
        lookahead: int = 4,
        budget_bytes: int = 1 << 30,
        verify: bool = True,
    ) -> None:
        self._run, self._lineage = Path(run), Lineage.load(Path(run)).id
        self._store = self._run / "payloads" if store is None else Path(store)
        self._dp, self._cp = dp, cp
        self._arguments: dict[str, Any] = {
            "fields": dict(fields),
            "seq_len": seq_len,
            "start": start,
            "multiple": multiple,
            "columns": columns,
            "lookahead": lookahead,
            "budget_bytes": budget_bytes,
            "verify": verify,
        }

    def __iter__(self) -> Iterator[MicroBatch]:
        lineage = Lineage.load(self._run)
        if lineage.id != self._lineage:
            raise LineageLeftError(
                f"iterate {self._run}: the run has been resumed since, lineage {self._lineage} was left"
            )
        info = get_worker_info()
        share = (0, 1) if info is None else (info.id, info.num_workers)
        with (
            PayloadStore(self._store, create=False) as store,
            PayloadLoader(
                store,
                Exchange(lineage),
                ranks=Ranks.alone(dp=self._dp, cp=self._cp),
                on_missing="raise",
                **self._arguments,
            ) as loader,
        ):
            yield from loader.shared(*share)
