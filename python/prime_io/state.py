"""User state as bytes: msgpack with ndarrays. What would not come back the same is refused by name.

A state holds None, bool, int (64 bits), float, str, bytes, list, dict and `numpy.ndarray`. msgpack has no
tuple and no wider integer: both would come back as something else, or not at all, so they are a TypeError
that names where they are. RNG state travels as text (`json.dumps(rng.bit_generator.state)`).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

_NDARRAY = 1
_MAX_DEPTH = 100
_PLAIN: frozenset[type] = frozenset({type(None), bool, float, str, bytes})


def encode_state(state: object) -> bytes:
    """Encode `state`; TypeError naming the path (`state.curricula[2].rng`) of what cannot travel.

    Everything is copied: a later change of `state` does not reach the bytes.
    """
    _check(state, "state", 0, "encode state")
    return msgspec.msgpack.encode(state, enc_hook=_encode_array)


def decode_state(data: bytes | bytearray | memoryview) -> Any:
    """The state encoded in `data`. Arrays are fresh and writable. ValueError if `data` is not a state."""
    try:
        return msgspec.msgpack.decode(data, ext_hook=_decode_ext)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"decode state: torn or not a state ({error})") from error


def check_plain(value: object, path: str, *, operation: str) -> None:
    """TypeError naming the path of what msgpack would not give back the same. No arrays here."""
    _check(value, path, 0, operation, arrays=False)


def _check(value: object, path: str, depth: int, operation: str, arrays: bool = True) -> None:
    kind = type(value)
    if kind in _PLAIN:
        return
    if depth > _MAX_DEPTH:
        raise TypeError(f"{operation}: {path} is nested deeper than {_MAX_DEPTH} (does it hold itself?)")
    if kind is int:
        assert isinstance(value, int)
        if not -(1 << 63) <= value < 1 << 64:
            raise TypeError(f"{operation}: {path} is an int beyond 64 bits; keep it as text: str(...)")
    elif kind is list:
        assert isinstance(value, list)
        for at, item in enumerate(value):
            _check(item, f"{path}[{at}]", depth + 1, operation, arrays)
    elif kind is dict:
        assert isinstance(value, dict)
        for key, item in value.items():
            if type(key) not in (str, int, bytes):
                raise TypeError(
                    f"{operation}: {path} has a key of type {type(key).__name__}; use str, int or bytes"
                )
            _check(key, f"{path} (a key)", depth + 1, operation, arrays)
            step = f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"
            _check(item, path + step, depth + 1, operation, arrays)
    elif kind is np.ndarray and arrays:
        assert isinstance(value, np.ndarray)
        if value.dtype.hasobject or np.dtype(value.dtype.str) != value.dtype:
            raise TypeError(
                f"{operation}: {path} is an array of dtype {value.dtype}, which has no name of its own in "
                "numpy; view it as plain integers"
            )
    else:
        raise TypeError(f"{operation}: {path} is a {_name(kind)}; {_advice(value, arrays)}")


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _advice(value: object, arrays: bool) -> str:
    if isinstance(value, tuple):
        return "it would come back as a list: use a list"
    if isinstance(value, np.generic):
        return "use .item()"
    if isinstance(value, np.random.Generator):
        return "keep json.dumps(rng.bit_generator.state)"
    plain = "None, bool, int, float, str, bytes, list, dict"
    return f"a state holds {plain} and ndarray" if arrays else f"allowed are {plain}"


def _encode_array(value: object) -> msgspec.msgpack.Ext:
    assert isinstance(value, np.ndarray)
    body = msgspec.msgpack.encode((value.dtype.str, value.shape, value.tobytes()))
    return msgspec.msgpack.Ext(_NDARRAY, body)


def _decode_ext(code: int, data: memoryview) -> np.ndarray[Any, Any]:
    if code != _NDARRAY:
        raise ValueError(f"decode state: unknown extension {code}; it was written by a newer prime-io")
    name, shape, raw = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], bytes])
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise ValueError(f"decode state: unknown dtype {name!r}") from error
    if dtype.hasobject or any(n < 0 for n in shape):
        raise ValueError(f"decode state: an array of dtype {name!r} and shape {shape} is not a plain array")
    count = 1
    for n in shape:
        count *= n
    if count * dtype.itemsize != len(raw):
        raise ValueError(f"decode state: {len(raw)} bytes do not hold an array of {name} and shape {shape}")
    if count == 0:
        return np.empty(shape, dtype)
    return np.frombuffer(raw, dtype).reshape(shape).copy()
