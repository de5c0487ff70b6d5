"""User state: what comes back is what was there, and what would not is refused by name."""

import json
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_io.state import decode_state, encode_state

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5) | st.integers(0, 99), inner),
    max_leaves=30,
)


@given(plain)
def test_plain_values_come_back_the_same(value: object) -> None:
    """State: msgpack types come back equal and of the same type."""
    back = decode_state(encode_state(value))
    assert back == value and repr(back) == repr(value)


@pytest.mark.parametrize("dtype", ["u1", "i8", "<f4", ">f4", "f2", "?", "c16", "U3", "S4", "M8[ns]", "m8[s]"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_arrays_come_back_the_same(dtype: str, shape: tuple[int, ...]) -> None:
    """State: an ndarray keeps dtype (byte order too), shape and values, and is writable."""
    count = int(np.prod(shape))
    array = np.arange(count, dtype="i8").astype(dtype if dtype != "?" else "?").reshape(shape)
    back = decode_state(encode_state({"a": [array]}))["a"][0]
    assert back.dtype == array.dtype and back.dtype.str == array.dtype.str and back.shape == shape
    assert np.array_equal(back, array) and back.flags.writeable


def test_strided_arrays_and_copies() -> None:
    """State: a strided array is stored by its values, and the bytes are a copy."""
    array = np.arange(12).reshape(3, 4)
    data = encode_state(array.T[::2])
    expected = array.T[::2].copy()
    array[:] = 0
    assert np.array_equal(decode_state(data), expected)


@pytest.mark.parametrize(
    ("value", "path", "advice"),
    [
        ((1, 2), "state", "list"),
        ({"curricula": [0, 1, {"rng": random.Random(1).getstate()}]}, "state.curricula[2].rng", "list"),
        ({"a b": 1 << 64}, "state['a b']", "text"),
        ({"n": -(1 << 63) - 1}, "state.n", "text"),
        ([np.float64(1.0)], "state[0]", r"\.item\(\)"),
        ({"x": {1.5: 2}}, "state.x", "key"),
        ({"s": {1, 2}}, "state.s", "holds"),
        ({"o": np.array([None])}, "state.o", "dtype"),
        ({"r": np.zeros(2, "u1,i4")}, "state.r", "dtype"),
        (np.random.default_rng(0), "state", "json"),
        ({"rng": np.random.default_rng(0).bit_generator.state}, "state.rng.state.state", "text"),
        ({"m": np.ma.array([1])}, "state.m", "holds"),
        ({"b": bytearray(b"x")}, "state.b", "holds"),
    ],
)
def test_what_cannot_travel_is_named(value: object, path: str, advice: str) -> None:
    """Promise: a tuple, an int beyond 64 bits or an unknown type is a TypeError naming its path."""
    with pytest.raises(TypeError, match=advice) as error:
        encode_state(value)
    assert f" {path} " in str(error.value)


def test_deep_nesting_is_a_value_error() -> None:
    """Bug: a deeply nested state ended the decoder with a RecursionError, and no word of what was read."""
    for data in (b"\x91" * 200_000 + b"\xc0", b"\x81\x01" * 200_000 + b"\xc0"):
        with pytest.raises(ValueError, match="torn or not a state"):
            decode_state(data)


def test_cycles_end() -> None:
    """State: a structure that holds itself is an error, not a crash."""
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="nested deeper"):
        encode_state(loop)


def test_rng_state_as_text() -> None:
    """Promise: RNG state travels as text, bit for bit."""
    rng = np.random.default_rng(7)
    rng.random(5)
    back = np.random.default_rng()
    back.bit_generator.state = json.loads(decode_state(encode_state(json.dumps(rng.bit_generator.state))))
    assert back.random() == rng.random()


@given(st.binary(max_size=60))
def test_garbage_is_a_value_error(data: bytes) -> None:
    """Promise: no bytes make the decoder do anything but answer or raise ValueError."""
    try:
        decode_state(data)
    except ValueError:
        pass


@pytest.mark.parametrize(
    "body",
    [
        ("O", (1,), b"12345678"),
        ("u1", (2,), b"1"),
        ("u1", (-1, -1), b"1"),
        ("no such", (1,), b"1"),
        ("u1", (1 << 62, 4), b""),
    ],
)
def test_forged_arrays_are_refused(body: object) -> None:
    """Promise: an array whose claim does not fit its bytes is refused before anything is allocated."""
    data = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, msgspec.msgpack.encode(body)))
    with pytest.raises(ValueError, match="decode state"):
        decode_state(data)
