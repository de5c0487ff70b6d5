"""Advantages from rewards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import numpy as np

from .types import Array, Episode, Trace

Advantage: TypeAlias = float | Sequence[float | Array]
"""One float for a trace, or per sample one float or f32[n_tokens]."""

ScoreGroup: TypeAlias = Callable[[Sequence[Trace]], Sequence[Advantage] | Awaitable[Sequence[Advantage]]]
ScoreEpisode: TypeAlias = Callable[[Episode], Awaitable[None] | None]


def rewards_only(score: ScoreGroup) -> ScoreGroup:
    """Mark a scorer that looks at rewards alone: its traces come without samples, and nothing is read."""
    score.rewards_only = True  # type: ignore[attr-defined]
    return score


@rewards_only
def grpo(traces: Sequence[Trace]) -> Sequence[float]:
    """Group-relative advantages: (reward - mean) / std over the group, 0 where all rewards are equal.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2 (outcome supervision).
    """
    rewards = np.array([trace.reward for trace in traces], np.float64)
    spread = rewards.std()
    if spread < 1e-8:
        return [0.0] * len(traces)
    return [float(a) for a in (rewards - rewards.mean()) / spread]
