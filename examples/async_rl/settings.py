"""What the processes of one demo run agree on."""

from __future__ import annotations

from pathlib import Path

import msgspec

WORDS = "words"
ROUTED_EXPERTS = "routed_experts"


class Settings(msgspec.Struct, frozen=True):
    """Written to `<run>/demo.json` by the launcher."""

    seed: int = 0
    steps: int = 24
    batch_size: int = 32
    group_size: int = 8
    max_inflight: int = 32
    max_off_policy_steps: int = 6
    checkpoint_every: int = 2
    keep_last: int = 2
    pin: str = "link"
    workers: int = 2
    worker_batch: int = 12
    warm_start_steps: int | None = None
    """None: as long as the demo's own configuration says."""
    held_out: int = 128
    verifier_s: float = 0.04
    """How long a (sandboxed) verifier takes for one rollout: sampling is what limits the run, if little."""
    straggler_s: float = 1.5
    """Every tenth rollout waits up to this long for its environment."""
    step_s: float = 1.2
    """The least time of a training step: as on a GPU, sampling goes on meanwhile."""
    threads: int = 1

    def save(self, run: Path) -> None:
        (run / "demo.json").write_bytes(msgspec.json.encode(self))

    @classmethod
    def load(cls, run: Path) -> Settings:
        return msgspec.json.decode((run / "demo.json").read_bytes(), type=cls)
