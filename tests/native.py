"""Helpers for tests of the native engine: segments as plain objects, arrays as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  (registers its names with numpy)
import numpy as np

from prime_io import _native


@dataclass(frozen=True)
class Segment:
    file: str
    offset: int
    pos: int
    rows: int
    dtype: str
    shape: tuple[int, ...]
    checksum: str = ""


def raw(array: np.ndarray) -> np.ndarray:
    """The bytes of an array of any type, ml_dtypes included."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def publish(store: _native.Store, version: int = 1, **arrays: np.ndarray) -> dict[str, Segment]:
    """One payload file of these arrays, and a segment for all rows of each."""
    tensors = [(name, a.dtype.name, a.shape, raw(a)) for name, a in arrays.items()]
    [result] = store.publish([(version, tensors)])
    if isinstance(result, Exception):
        raise result
    file, places = result
    return {
        name: Segment(file, offset, 0, a.shape[0], a.dtype.name, a.shape[1:], checksum)
        for (name, a), (offset, checksum) in zip(arrays.items(), places, strict=True)
        if a.ndim
    }


def request(segments: Any, lo: int, hi: int, **kw: Any) -> tuple[Any, ...]:
    """A request whose type and row shape are those of its first segment unless given."""
    dtype = kw.get("dtype", segments[0].dtype if segments else "uint8")
    shape = kw.get("shape", segments[0].shape if segments else ())
    fill = kw.get("fill", bytes(np.dtype(dtype).itemsize))
    return (segments, lo, hi, dtype, shape, fill, kw.get("out"), kw.get("valid"))


def gather(store: _native.Store, segments: Any, lo: int, hi: int, *, verify: bool = False, **kw: Any) -> Any:
    """One request: (rows, valid) as arrays; raises what it met."""
    one = request(segments, lo, hi, **kw)
    [result] = store.gather([one], verify=verify)
    if isinstance(result, Exception):
        raise result
    rows, valid = result
    if rows is not None:
        rows = np.ndarray((hi - lo, *one[4]), one[3], buffer=rows)
    if valid is not None:
        valid = np.ndarray(hi - lo, bool, buffer=valid)
    return rows, valid
