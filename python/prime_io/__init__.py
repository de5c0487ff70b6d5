"""prime-io: payload I/O for asynchronous RL post-training.

Heavy per-token tensors stay in files; segments (handles) move through the orchestrator; the trainer reads the
bytes once. A run killed at any moment loses no checkpointed work, trains nothing twice, and never meets a
missing file. `docs/design.md` has the formats, protocols and rules.
"""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from ._native import CorruptPayloadError
from .checkpoint import CheckpointManager
from .columns import load_batch
from .dispatcher import Dispatcher, Rollout
from .engine import EngineReport, engine_report
from .exchange import Exchange
from .gather import Gather, Ragged
from .lineage import Lineage, LineageLeftError, prepare_resume
from .manifest import CorruptCheckpointError
from .orchestrator import Orchestrator
from .pins import Pins
from .restore import RestoreReport
from .resume import Ledger, missing_rollouts, pin_set, survivors
from .scoring import grpo, rewards_only
from .segment import FieldSpec, PayloadSegment, clip, coalesce, covers, files, shift
from .sink import TrainSink
from .snapshot import SaveReport, Snapshot
from .source import Environment, TrainSource
from .state import decode_state, encode_state
from .store import PayloadStore, Probe
from .sweep import SweepReport
from .tensors import as_torch
from .types import (
    Episode,
    GroupCancellation,
    OpenGroup,
    Policy,
    PolicySpan,
    Progress,
    QueuedTrace,
    Sample,
    ScoredGroup,
    StoredEpisode,
    StoredSample,
    StoredTrace,
    TaskRequest,
    Trace,
    TrainBatch,
)
from .writer import PayloadWriter

__version__ = _version("prime-io")

if TYPE_CHECKING:
    from .dataset import PayloadDataset as PayloadDataset
    from .loader import LoaderStats as LoaderStats
    from .loader import PayloadLoader as PayloadLoader
    from .loader import Step as Step
    from .microbatch import MicroBatch as MicroBatch
    from .microbatch import PackedSample as PackedSample
    from .microbatch import Rows as Rows
    from .ranks import Ranks as Ranks

_WITH_TORCH = {
    "LoaderStats": "loader",
    "MicroBatch": "microbatch",
    "PackedSample": "microbatch",
    "PayloadDataset": "dataset",
    "PayloadLoader": "loader",
    "Ranks": "ranks",
    "Rows": "microbatch",
    "Step": "loader",
}
"""The trainer's side needs PyTorch, which nothing else here does: imported when it is asked for, not by `*`."""


def __getattr__(name: str) -> Any:
    module = _WITH_TORCH.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"{name} needs PyTorch: pip install 'prime-io[torch]'") from None


__all__ = [
    "CheckpointManager",
    "CorruptCheckpointError",
    "CorruptPayloadError",
    "Dispatcher",
    "EngineReport",
    "Environment",
    "Episode",
    "Exchange",
    "FieldSpec",
    "Gather",
    "GroupCancellation",
    "Ledger",
    "Lineage",
    "LineageLeftError",
    "OpenGroup",
    "Orchestrator",
    "PayloadSegment",
    "PayloadStore",
    "PayloadWriter",
    "Pins",
    "Policy",
    "PolicySpan",
    "Probe",
    "Progress",
    "QueuedTrace",
    "Ragged",
    "RestoreReport",
    "Rollout",
    "Sample",
    "SaveReport",
    "ScoredGroup",
    "Snapshot",
    "StoredEpisode",
    "StoredSample",
    "StoredTrace",
    "SweepReport",
    "TaskRequest",
    "Trace",
    "TrainBatch",
    "TrainSink",
    "TrainSource",
    "as_torch",
    "clip",
    "coalesce",
    "covers",
    "decode_state",
    "encode_state",
    "engine_report",
    "files",
    "grpo",
    "load_batch",
    "missing_rollouts",
    "pin_set",
    "prepare_resume",
    "rewards_only",
    "shift",
    "survivors",
]
