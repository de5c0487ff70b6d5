"""Spill: per-token arrays of an episode to one file, and back.

Names in the spill file are `<trace>.<sample>.<column>`; the framework's own record is `native`. The state of
the orchestrator keeps only the segments, so what a checkpoint writes grows with traces, not with tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import msgspec
import numpy as np

from .resume import version_of
from .segment import PayloadSegment, byte_range
from .store import PayloadStore
from .tensors import to_bytes
from .types import (
    Array,
    Episode,
    QueuedTrace,
    Sample,
    StoredEpisode,
    StoredSample,
    StoredTrace,
    Trace,
    TrainBatch,
)

_CORE = {"token_ids": np.int32, "mask": np.bool_, "logprobs": np.float32}
_ADVANTAGES = "advantages"


def spill(episode: Episode, *, store: PayloadStore) -> StoredEpisode:
    """Write the arrays of an episode to one spill file in `v<dispatch_version>`; one native call.

    Raises ValueError naming trace and column if a column has not one row per token, OSError if the file
    cannot be written (then nothing is left behind).
    """
    arrays: dict[str, Array] = {}
    for t, trace in enumerate(episode.traces):
        for s, sample in enumerate(trace.samples):
            for name, column in _columns(trace.id, sample).items():
                arrays[f"{t}.{s}.{name}"] = column
    if episode.native is not None:
        arrays["native"] = np.frombuffer(episode.native, np.uint8)
    segments = store.write(arrays, version=episode.dispatch_version) if arrays else {}
    return _stored_episode(episode, segments)


def _stored_episode(episode: Episode, segments: Mapping[str, PayloadSegment]) -> StoredEpisode:
    traces = [
        StoredTrace(
            trace.id,
            trace.reward,
            [_stored(t, s, sample, segments) for s, sample in enumerate(trace.samples)],
            trace.ok,
            trace.error,
        )
        for t, trace in enumerate(episode.traces)
    ]
    return StoredEpisode(
        episode.id,
        episode.env_name,
        episode.group_id,
        episode.policy,
        episode.dispatch_version,
        traces,
        episode.ok,
        segments.get("native"),
        episode.error,
    )


def check(episode: Episode) -> None:
    """Make the numbers and arrays of an episode what `Sample` says, in place, and look at what segments claim.

    Workers are other machines: ValueError or TypeError for a column of another length or kind, for a segment
    whose arithmetic cannot be, or whose file is not a payload file's name, and for anything that a checkpoint
    could not be read back with.
    """
    for trace in episode.traces:
        trace.reward = None if trace.reward is None else float(trace.reward)
        for sample in trace.samples:
            sample.scalars = {name: float(value) for name, value in sample.scalars.items()}
            for name, dtype in _CORE.items():
                setattr(sample, name, np.asarray(getattr(sample, name), dtype))
            sample.columns = {name: np.asarray(column) for name, column in sample.columns.items()}
            for column in _columns(trace.id, sample).values():
                to_bytes(column)  # a dtype of the format, or an error
            for segment in sample.payload:
                version_of(segment.file)
                byte_range(segment)
    if episode.native is not None and not isinstance(episode.native, bytes):
        raise TypeError(f"episode {episode.id}: native is a {type(episode.native).__name__}, not bytes")
    _readable(_stored_episode(episode, {}))


def _readable(stored: StoredEpisode) -> None:
    """What is taken must come back from a checkpoint: encoding checks no types, decoding does."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=StoredEpisode)
    except (msgspec.ValidationError, OverflowError) as error:
        raise ValueError(f"episode {stored.id}: {error}") from error


def load_traces(traces: Sequence[StoredTrace | QueuedTrace], *, store: PayloadStore) -> list[Trace]:
    """Read spilled arrays back; one native call for all traces. Payload stays by handle."""
    wanted = [(s, name, seg) for t in traces for s in t.samples for name, seg in s.columns.items()]
    arrays = store.read_many([segment for _, _, segment in wanted])
    columns: dict[int, dict[str, Array]] = {}
    for (sample, name, _), array in zip(wanted, arrays, strict=True):
        columns.setdefault(id(sample), {})[name] = array
    return [_loaded(trace, columns) for trace in traces]


def load_batch(batch: TrainBatch, *, store: PayloadStore) -> list[Trace]:
    """The traces of a batch with their columns read, in batch order."""
    return load_traces(batch.traces, store=store)


def _columns(trace_id: str, sample: Sample) -> dict[str, Array]:
    n = len(sample.token_ids)
    columns: dict[str, Array] = {
        name: np.asarray(getattr(sample, name), dtype) for name, dtype in _CORE.items()
    }
    for name in sample.columns:
        if name in columns or name == _ADVANTAGES or "." in name:
            raise ValueError(f"trace {trace_id}: a column may not be named {name!r}")
    columns.update(sample.columns)
    if isinstance(sample.advantages, np.ndarray):
        columns[_ADVANTAGES] = np.asarray(sample.advantages, np.float32)
    for name, column in columns.items():
        if column.shape[:1] != (n,):
            raise ValueError(f"trace {trace_id}: column {name!r} has {column.shape[:1]} rows for {n} tokens")
    return columns


def _stored(t: int, s: int, sample: Sample, segments: Mapping[str, PayloadSegment]) -> StoredSample:
    names = [*_CORE, *sample.columns, _ADVANTAGES]
    scalar = None if isinstance(sample.advantages, np.ndarray) else sample.advantages
    return StoredSample(
        n_tokens=len(sample.token_ids),
        columns={name: segments[f"{t}.{s}.{name}"] for name in names if f"{t}.{s}.{name}" in segments},
        payload=list(sample.payload),
        scalars=dict(sample.scalars),
        advantage=None if scalar is None else float(scalar),
    )


def _loaded(trace: StoredTrace | QueuedTrace, columns: Mapping[int, dict[str, Array]]) -> Trace:
    samples = []
    for stored in trace.samples:
        arrays: dict[str, Any] = dict(columns.get(id(stored), {}))
        samples.append(
            Sample(
                token_ids=arrays.pop("token_ids"),
                mask=arrays.pop("mask"),
                logprobs=arrays.pop("logprobs"),
                payload=list(stored.payload),
                scalars=dict(stored.scalars),
                advantages=arrays.pop(_ADVANTAGES, stored.advantage),
                columns=arrays,
            )
        )
    if isinstance(trace, QueuedTrace):
        return Trace(trace.trace_id, trace.reward, samples)
    return Trace(trace.id, trace.reward, samples, trace.ok, trace.error)


def with_advantages(
    traces: Iterable[StoredTrace],
    advantages: Iterable[Any],
    *,
    version: int,
    store: PayloadStore,
) -> list[StoredTrace]:
    """The same traces with the scorer's advantages: one float per trace, or one float or f32[n] per sample.

    Per-token advantages are spilled to one more file in `v<version>`.
    """
    traces = list(traces)
    per_sample: list[list[float | Array]] = []
    arrays: dict[str, Array] = {}
    for t, (trace, given) in enumerate(zip(traces, advantages, strict=True)):
        values: list[float | Array] = (
            [float(given)] * len(trace.samples) if isinstance(given, Real) else list(given)
        )
        if len(values) != len(trace.samples):
            raise ValueError(f"trace {trace.id}: {len(values)} advantages for {len(trace.samples)} samples")
        for s, (value, sample) in enumerate(zip(values, trace.samples, strict=True)):
            if isinstance(value, np.ndarray):
                if value.shape != (sample.n_tokens,):
                    raise ValueError(
                        f"trace {trace.id}: advantages of shape {value.shape} for {sample.n_tokens} tokens"
                    )
                arrays[f"{t}.{s}"] = np.asarray(value, np.float32)
        per_sample.append(values)
    segments = store.write(arrays, version=version) if arrays else {}
    scored = []
    for t, (trace, values) in enumerate(zip(traces, per_sample, strict=True)):
        samples = []
        for s, (value, sample) in enumerate(zip(values, trace.samples, strict=True)):
            segment = segments.get(f"{t}.{s}")
            columns = {name: seg for name, seg in sample.columns.items() if name != _ADVANTAGES}
            if segment is not None:
                columns[_ADVANTAGES] = segment
            samples.append(
                StoredSample(
                    sample.n_tokens,
                    columns,
                    sample.payload,
                    sample.scalars,
                    float(value) if segment is None and not isinstance(value, np.ndarray) else None,
                )
            )
        scored.append(StoredTrace(trace.id, trace.reward, samples, trace.ok, trace.error))
    return scored
