"""Values of torch and numpy, both ways: handlers for the encoder, and what the decoder calls for their
nodes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .tensors import DTYPES
from .wire import INLINE_BYTES_MAX, Node, Tag

if TYPE_CHECKING:
    from .codec import Decoder
    from .encode import Encoder, Handler, Path

_SHAPE_LENGTH_MAX = 64
_PLAIN_KINDS = "biufcmMSU"
"""numpy kinds that are bytes without references: no objects, no structures, no variable-width strings."""

_LAYOUTS = {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}
_FORMATS = {str(item): item for item in vars(torch).values() if isinstance(item, torch.memory_format)}


def check_numpy(encoder: Encoder, value: Any, text: str) -> str:
    """The name of the dtype of a numpy array or scalar; UnsupportedValue if it cannot be stored."""
    dtype = value.dtype
    if dtype.kind not in _PLAIN_KINDS or dtype.names is not None or dtype.subdtype is not None:
        raise encoder.refuse(
            value, text, f"numpy data of dtype {dtype} cannot be stored", "Store its fields as plain arrays"
        )
    return str(dtype.str)


def is_inline(array: np.ndarray[Any, Any]) -> bool:
    return array.nbytes <= INLINE_BYTES_MAX


def _array(encoder: Encoder, value: np.ndarray[Any, Any], text: str, path: Path) -> Node:
    dtype = check_numpy(encoder, value, text)
    if not is_inline(value):
        return encoder.array_leaf(value, dtype, text, path)  # type: ignore[attr-defined]
    alias = encoder.enter(value, text, path)
    if alias is not None:
        return alias
    encoder.leave(value)
    return [Tag.ARRAY.value, dtype, list(value.shape), value.tobytes()]


def numpy_scalar(encoder: Encoder, value: np.generic, text: str) -> Node:
    return [Tag.SCALAR.value, check_numpy(encoder, value, text), value.tobytes()]


@functools.cache
def as_torch_dtype(dtype: str) -> torch.dtype | None:
    """The torch dtype of a numpy dtype in the machine's own byte order; None where torch has none."""
    try:
        return torch.from_numpy(np.empty(1, dtype)).dtype
    except (TypeError, ValueError):
        return None


def _device(encoder: Encoder, value: Any, text: str, path: Path) -> Node:
    return [Tag.TORCH.value, "device", str(value)]


def _named(kind: str) -> Handler:
    return lambda encoder, value, text, path: [Tag.TORCH.value, kind, str(value).removeprefix("torch.")]


def _generator(encoder: Encoder, value: torch.Generator, text: str, path: Path) -> Node:
    alias = encoder.enter(value, text, path)
    if alias is not None:
        return alias
    encoder.leave(value)
    return [Tag.GENERATOR.value, str(value.device), value.get_state().numpy().tobytes()]


def _size(encoder: Encoder, value: torch.Size, text: str, path: Path) -> Node:
    if not all(type(length) is int for length in value):
        raise encoder.refuse(value, text, "a symbolic size cannot be stored")
    return [Tag.SIZE.value, list(value)]


def _numpy_dtype(encoder: Encoder, value: np.dtype[Any], text: str) -> Node:
    if value.kind not in _PLAIN_KINDS or value.names is not None or value.subdtype is not None:
        raise encoder.refuse(value, text, f"the numpy dtype {value} cannot be stored")
    return [Tag.NUMPY_DTYPE.value, value.str]


def other(encoder: Encoder, value: Any, text: str) -> Node | None:
    """numpy's scalars and dtypes, which have a class each."""
    if isinstance(value, np.generic):
        return numpy_scalar(encoder, value, text)
    if isinstance(value, np.dtype):
        return _numpy_dtype(encoder, value, text)
    if isinstance(value, np.ndarray):
        raise encoder.refuse(
            value, text, "a subclass of numpy.ndarray cannot be stored", "Store numpy.asarray(...) of it"
        )
    return None


HANDLERS: dict[type, Handler] = {
    np.ndarray: _array,
    torch.dtype: _named("dtype"),
    torch.layout: _named("layout"),
    torch.memory_format: _named("memory_format"),
    torch.device: _device,
    torch.Size: _size,
    torch.Generator: _generator,
}


def decode_foreign(decoder: Decoder, node: list[Node]) -> Any:
    """The value of a node of torch or numpy. May raise the errors that the decoder takes for damage."""
    tag, *rest = node
    return _DECODERS[tag](decoder, *rest)


def _checked(dtype: str, shape: list[int]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    found = np.dtype(dtype)
    if type(dtype) is not str or found.kind not in _PLAIN_KINDS or found.names or found.subdtype:
        raise ValueError(f"numpy dtype {dtype!r}")
    if len(shape) > _SHAPE_LENGTH_MAX or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"shape {shape!r}")
    return found, tuple(shape)


def _decode_array(decoder: Decoder, dtype: str, shape: list[int], data: bytes) -> Any:
    found, lengths = _checked(dtype, shape)
    if found.itemsize * _count(lengths) != len(data):
        raise ValueError(f"{len(data)} bytes for shape {shape} of {dtype}")
    if not data:
        return np.zeros(lengths, found)
    return np.frombuffer(data, found).reshape(lengths).copy()


def _count(lengths: tuple[int, ...]) -> int:
    count = 1
    for length in lengths:
        count *= length
    return count


def _decode_scalar(decoder: Decoder, dtype: str, data: bytes) -> Any:
    found, _ = _checked(dtype, [])
    if len(data) != found.itemsize:
        raise ValueError(f"{len(data)} bytes for a scalar of {dtype}")
    if not data:
        return found.type()
    return np.frombuffer(data, found)[0]


def _decode_array_ref(decoder: Decoder, index: int, dtype: str, shape: list[int]) -> Any:
    found, lengths = _checked(dtype, shape)
    stored = decoder.tensor(index)
    if not isinstance(stored, torch.Tensor):
        as_array = getattr(stored, "as_array", None)
        return stored if as_array is None else as_array(found, lengths)
    array = stored.detach().numpy().reshape(-1)
    if array.dtype != found:
        array = array.view(np.uint8).view(found)
    return array.reshape(lengths)


def _decode_torch(decoder: Decoder, kind: str, name: str) -> Any:
    if kind == "device":
        return torch.device(name)
    tables: dict[str, dict[str, Any]] = {"dtype": _ALL_DTYPES, "layout": _LAYOUTS, "memory_format": _FORMATS}
    prefix = "" if kind == "dtype" else "torch."
    return tables[kind][prefix + name]


_ALL_DTYPES = {
    str(item).removeprefix("torch."): item for item in vars(torch).values() if isinstance(item, torch.dtype)
} | dict(DTYPES)


def _decode_size(decoder: Decoder, lengths: list[int]) -> torch.Size:
    if not all(type(length) is int for length in lengths):
        raise ValueError("a size of other things than integers")
    return torch.Size(lengths)


def _decode_generator(decoder: Decoder, device: str, state: bytes) -> Any:
    from .registry import Unknown

    try:
        made = torch.Generator(device=device)
        made.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    except RuntimeError:
        # A generator of a device that this process lacks.
        return Unknown("torch:Generator", "wire", [Tag.GENERATOR.value, device, state])
    return made


_DECODERS: dict[int, Any] = {
    Tag.ARRAY: _decode_array,
    Tag.SCALAR: _decode_scalar,
    Tag.ARRAY_REF: _decode_array_ref,
    Tag.TORCH: _decode_torch,
    Tag.SIZE: _decode_size,
    Tag.GENERATOR: _decode_generator,
    Tag.NUMPY_DTYPE: lambda decoder, name: _checked(name, [])[0],
}
