"""What the trainer gets: the tensors of a packed sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Rows(NamedTuple):
    """A payload field of a micro-batch."""

    rows: torch.Tensor
    """[n, *row_shape]. n is `hi - lo` for fields that follow tokens; for a ragged field the rows of all tokens of
    the window, one token after the other; for a free field the rows of all samples of the whole sequence."""
    valid: torch.Tensor
    """bool: which tokens of the window have rows from a file (of a free field: which rows); the rest is `fill`."""
    counts: torch.Tensor | None = None
    """int64: rows of each token of the window (ragged), or of each sample (free); their sum is n."""


class PackedSample(NamedTuple):
    """A sample in a packed sequence."""

    trace_id: str
    nth: int
    """Which sample of its trace."""
    start: int
    """Its first row in the whole sequence."""
    n_tokens: int
    masked: bool
    """Whether some of its files were lost: no rows of it are valid, and its loss mask is zero."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A packed sequence of `length` rows, or the rows [lo, hi) of it that this context-parallel rank has.

    Per-token tensors have `hi - lo` rows; padding (and a dummy, which has no samples) has mask 0. `cu_seqlens`
    is that of the whole sequence.
    """

    step: int
    index: int
    """Which micro-batch of the step; every rank has equally many."""
    length: int
    lo: int
    hi: int
    samples: tuple[PackedSample, ...]
    token_ids: torch.Tensor
    """int32"""
    mask: torch.Tensor
    """bool: tokens that are trained."""
    logprobs: torch.Tensor
    """float32: those of the policy that sampled."""
    advantages: torch.Tensor
    """float32"""
    position_ids: torch.Tensor
    """int32: position in the own sample, from 0; padding counts from 0 too."""
    cu_seqlens: torch.Tensor
    """int32[k + 1]: where samples begin and end in the whole sequence, padding as one more."""
    columns: dict[str, torch.Tensor]
    """Further columns of the samples, by name; fill where a sample lacks one. Absent if all of the batch do."""
    payload: dict[str, Rows]
    """The payload fields asked for, by name. Absent if no sample of the batch has any rows of it."""
