"""Between tensors and bytes: what payloads are written from and read into.

numpy arrays, PyTorch tensors and anything with the buffer protocol. Neither PyTorch nor ml_dtypes is ever
imported to look at an object: one of theirs exists only where they are imported already. Without ml_dtypes,
bfloat16 and float8 arrays come as the unsigned integers of the same width, bit for bit.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from prime_io.segment import ITEMSIZE, row_bytes

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

__all__ = [
    "EXTENDED",
    "SAFETENSORS",
    "as_torch",
    "destination",
    "field_bytes",
    "fill_item",
    "from_buffer",
    "layout",
    "numpy_dtype",
    "to_bytes",
]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

SAFETENSORS: Final[Mapping[str, str]] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}
"""The name of each dtype in a safetensors header."""

EXTENDED: Final = frozenset(n for n in ITEMSIZE if n.startswith(("bfloat16", "float8")))
"""The dtypes that numpy has only with ml_dtypes."""


def to_bytes(obj: object) -> tuple[str, tuple[int, ...], memoryview]:
    """The dtype name, full shape and contents (one axis of bytes, C order) of a tensor.

    `obj` may be a numpy array or scalar (any strides, read-only), a PyTorch tensor (any strides, requiring
    grad, on any device: copied to the host), or an object with the buffer protocol. Shares memory with `obj`
    where that is C-contiguous, else copies. TypeError if it is none of these; ValueError for a dtype that the
    format lacks or that is big-endian, and for sparse, quantized or meta tensors.
    """
    tensor = _as_torch_tensor(obj)
    if tensor is not None:
        return _torch_name(tensor), tuple(tensor.shape), _torch_bytes(_host(tensor)).data
    array = _as_array(obj)
    name = _numpy_name(array.dtype)
    if not array.flags.c_contiguous:
        array = array.copy(order="C")
    return name, array.shape, array.reshape(-1).view(np.uint8).data


def field_bytes(field: str, obj: object) -> tuple[str, tuple[int, ...], memoryview]:
    """As `to_bytes`, for the tensor of a field, which the errors name."""
    try:
        return to_bytes(obj)
    except (ValueError, TypeError) as e:
        raise type(e)(f"field {field!r}: {e}") from None


def layout(obj: object) -> tuple[str, tuple[int, ...]]:
    """The dtype name and full shape of a tensor, as in `to_bytes`, without touching its contents."""
    tensor = _as_torch_tensor(obj)
    if tensor is not None:
        return _torch_name(tensor), tuple(tensor.shape)
    array = _as_array(obj)
    return _numpy_name(array.dtype), array.shape


def from_buffer(buffer: Buffer, dtype: str, shape: tuple[int, ...]) -> Array:
    """An array of `dtype` (see `numpy_dtype`) and full `shape` over the memory of `buffer`, without a copy.

    Writable if the buffer is; keeps it alive. ValueError if the buffer is too short.
    """
    need = row_bytes(dtype, shape)
    view = memoryview(buffer)
    if view.nbytes < need:
        raise ValueError(f"{view.nbytes} bytes are too few for {dtype} of shape {shape}: it takes {need}")
    return np.ndarray(shape, numpy_dtype(dtype), buffer=view)


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of that name; of ml_dtypes if that can be imported, else unsigned of the same width."""
    row_bytes(name, ())
    if name not in EXTENDED:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(f"u{ITEMSIZE[name]}")
    return np.dtype(getattr(ml_dtypes, name, f"u{ITEMSIZE[name]}"))


def destination(out: object, nbytes: int) -> memoryview:
    """The first `nbytes` bytes of a writable C-contiguous object, as one axis of bytes over its memory.

    `out` may be a numpy array, a PyTorch tensor on the CPU (pinned or not) or an object with the buffer
    protocol. ValueError, saying what to pass instead, if it is read-only, strided, too short or not in host
    memory; TypeError if it has no memory at all.
    """
    tensor = _as_torch_tensor(out)
    if tensor is not None:
        if tensor.device.type != "cpu":
            raise ValueError(
                f"out is on {tensor.device}: read into a pinned CPU tensor and copy it with non_blocking=True"
            )
        _check_dense(tensor)
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ValueError("out is strided: pass a contiguous tensor")
        flat = _torch_bytes(tensor.detach())
    elif isinstance(out, np.ndarray):
        if not out.flags.writeable:
            raise ValueError("out is read-only: pass a writable array")
        if not out.flags.c_contiguous:
            raise ValueError("out is strided: pass a C-contiguous array")
        if out.dtype.hasobject:
            raise ValueError(f"out has dtype {out.dtype}, whose items are not plain bytes")
        flat = out.reshape(-1).view(np.uint8)
    else:
        try:
            view = memoryview(out)  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(
                f"out is a {type(out).__name__}: pass a numpy array, a CPU tensor or a writable buffer"
            ) from None
        if view.readonly:
            raise ValueError(f"out is a read-only {type(out).__name__}: pass a writable buffer")
        if not view.c_contiguous:
            raise ValueError("out is strided: pass a C-contiguous buffer")
        flat = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    if flat.nbytes < nbytes:
        raise ValueError(f"out is too short: it has {flat.nbytes} bytes, the rows take {nbytes}")
    return flat[:nbytes].data


def as_torch(array: Array, dtype: str | None = None) -> torch.Tensor:
    """A PyTorch tensor that shares the memory of `array`, without a copy.

    `dtype` names the items where the array's own dtype does not (bfloat16 seen as uint16). ImportError if
    PyTorch is missing; ValueError if this PyTorch lacks the dtype, or the array is strided or read-only.
    """
    module = _import_torch()
    name = _numpy_name(array.dtype) if dtype is None else dtype
    if row_bytes(name, ()) != array.dtype.itemsize:
        raise ValueError(f"items of {array.dtype} cannot be seen as {name}: they differ in width")
    wanted = getattr(module, name, None)
    if wanted is None:
        raise ValueError(f"PyTorch {module.__version__} has no {name}: upgrade it, or read a wider dtype")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError("PyTorch shares memory with writable C-contiguous arrays only: pass array.copy()")
    tensor: torch.Tensor
    if array.size:
        tensor = module.from_numpy(array.reshape(-1).view(np.uint8)).view(wanted).reshape(array.shape)
    else:
        tensor = module.empty(array.shape, dtype=wanted)
    return tensor


def fill_item(fill: float, dtype: str) -> bytes:
    """One item of `dtype` as its little-endian bytes. ValueError if the number does not fit into it."""
    if fill == 0:
        return bytes(ITEMSIZE[dtype])
    wanted = numpy_dtype(dtype)
    if dtype == "bfloat16":
        # Round to nearest even by hand, so that it works without ml_dtypes.
        if math.isnan(fill):
            return b"\xc0\x7f"
        try:
            (bits,) = struct.unpack("<I", struct.pack("<f", fill))
        except OverflowError:
            raise ValueError(f"fill {fill} does not fit into {dtype}") from None
        return struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    if dtype in EXTENDED and wanted.kind == "u":
        raise ValueError(f"a fill of {fill} in {dtype} needs ml_dtypes: pip install ml_dtypes")
    if wanted.kind in "iu":
        whole = fill if isinstance(fill, int) else int(fill) if math.isfinite(fill) else None
        bounds = np.iinfo(wanted)
        if whole is None or whole != fill or not bounds.min <= whole <= bounds.max:
            raise ValueError(f"fill {fill} does not fit into {dtype}")
        fill = whole
    elif wanted.kind == "b" and fill != 1:
        raise ValueError(f"fill {fill} does not fit into {dtype}: use 0 or 1")
    with np.errstate(over="ignore"):
        item = np.array(fill).astype(wanted)
    if math.isfinite(fill) and not np.isfinite(item):
        raise ValueError(f"fill {fill} does not fit into {dtype}")
    return item.tobytes()


def _as_torch_tensor(obj: object) -> torch.Tensor | None:
    torch = sys.modules.get("torch")
    tensor: torch.Tensor | None = obj if torch is not None and isinstance(obj, torch.Tensor) else None  # type: ignore[name-defined]
    return tensor


def _import_torch() -> Any:
    try:
        import torch
    except ImportError:
        raise ImportError("as_torch needs PyTorch: pip install 'prime-io[torch]'") from None
    return torch


def _torch_name(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise ValueError(
            f"dtype {tensor.dtype} is not one of the format ({', '.join(ITEMSIZE)}): "
            f"convert the tensor, or pass tensor.view(torch.uint8)"
        )
    return name


def _check_dense(tensor: torch.Tensor) -> None:
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized:
        raise ValueError(f"a {tensor.layout} tensor has no plain bytes: pass tensor.to_dense()")


def _host(tensor: torch.Tensor) -> torch.Tensor:
    _check_dense(tensor)
    if tensor.device.type == "meta":
        raise ValueError("a tensor on the meta device has no contents")
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _torch_bytes(tensor: torch.Tensor) -> Bytes:
    import torch  # imported already: it made the tensor

    if not tensor.numel():
        return np.empty(0, np.uint8)
    flat: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat


def _as_array(obj: object) -> Array:
    if isinstance(obj, np.ndarray | np.generic):
        return np.asarray(obj)
    try:
        view = memoryview(obj)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"a {type(obj).__name__} is no tensor: pass a numpy array, a PyTorch tensor or a buffer"
        ) from None
    return np.asarray(view)


def _numpy_name(dtype: np.dtype[Any]) -> str:
    if dtype.newbyteorder("<") != dtype:
        raise ValueError(
            f"dtype {dtype.str!r} is big-endian; payloads are little-endian: "
            f"pass array.astype({dtype.newbyteorder('<').str!r})"
        )
    if dtype.name not in ITEMSIZE or dtype.itemsize != ITEMSIZE[dtype.name]:
        raise ValueError(f"dtype {dtype} is not one of the format ({', '.join(ITEMSIZE)}): convert the array")
    return dtype.name
