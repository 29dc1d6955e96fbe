"""Tensors as bytes: names of dtypes, what can be stored, and views of a tensor's memory.

The bytes of a tensor are its logical elements, row-major, in the running torch's own element size. (torch
gives each element of its sub-byte integers a byte of its own; those bytes are what is stored.)
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import StateMismatch
from .wire import PARAMETER

_QUANTISED = {"quint8", "qint8", "qint32", "quint4x2", "quint2x4"}


def _dtype_names() -> dict[torch.dtype, str]:
    found: dict[torch.dtype, str] = {}
    for name in dir(torch):
        dtype = getattr(torch, name)
        if isinstance(dtype, torch.dtype):
            # str() gives the one proper name; "half" and "bit" are further names of the same dtypes.
            found[dtype] = str(dtype).removeprefix("torch.")
    return {dtype: name for dtype, name in found.items() if name not in _QUANTISED}


DTYPE_NAMES: dict[torch.dtype, str] = _dtype_names()
"""Name of every dtype of the running torch that can be stored."""

DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_STRIDED = torch.strided
_OF_NUMPY = frozenset({torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8})
"""Dtypes that numpy has, too, the usual ones."""

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def dtype_named(name: str) -> torch.dtype:
    """The dtype called ``name``. Raises StateMismatch if the running torch has none."""
    try:
        return DTYPES[name]
    except KeyError:
        raise StateMismatch(
            f"this torch has no dtype {name!r}",
            found=torch.__version__,
            hint="Load with the torch release that wrote it, or a newer one",
        ) from None


def carrier(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory (shape and strides too) in a dtype that torch can copy and compare: it has no kernels
    for its sub-byte and raw dtypes. ``tensor`` has neither the conjugate nor the negative bit."""
    return tensor.detach().view(_CARRIERS[tensor.dtype.itemsize])


def resolve(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without its lazy conjugate and negative bits: itself, or a new tensor of the same values."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor.detach().resolve_conj().resolve_neg()
    return tensor


def as_bytes_view(tensor: torch.Tensor) -> torch.Tensor:
    """The logical bytes of ``tensor`` as a flat uint8 tensor on its device: a view where it is contiguous."""
    dense = carrier(resolve(tensor)).contiguous()
    # Not reshape: an empty tensor, or one of a single element, may be contiguous with any strides.
    flat = dense.as_strided((dense.numel(),), (1,))
    if flat.dtype is torch.complex128:
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The logical bytes of ``tensor`` (copied to the CPU, made contiguous, where it is not), to read."""
    return _memory(as_bytes_view(tensor).cpu()).toreadonly()


def writable_bytes(tensor: torch.Tensor) -> memoryview | None:
    """A writable view of a contiguous CPU tensor's bytes, valid as long as it lives; None for any other
    tensor."""
    if not is_fillable(tensor):
        return None
    # Thousands of tensors are asked for: each call of torch counts.
    if type(tensor) is torch.Tensor and tensor.dtype in _OF_NUMPY and not tensor.requires_grad:
        plain = tensor
    else:
        plain = carrier(tensor)
    if plain.dtype is torch.complex128 or not plain.numel():
        return _memory(as_bytes_view(tensor))
    return _memory(plain).cast("B")


def _memory(flat: torch.Tensor) -> memoryview:
    array: Any = flat.numpy()
    return memoryview(array)


def is_fillable(tensor: torch.Tensor) -> bool:
    """Whether the bytes of ``tensor`` can be read from storage straight into it."""
    return (
        tensor.is_cpu
        and tensor.layout is _STRIDED
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of ``tensor`` may share memory (expanded tensors and the like)."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return False
    steps = sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )
    reach = 0
    for stride, size in steps:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised contiguous CPU tensor of any dtype."""
    # By way of the carrier: torch warns, or refuses, when some dtypes are made directly.
    return torch.empty(shape, dtype=_CARRIERS[dtype.itemsize], device="cpu").view(dtype)


def copy_into(live: torch.Tensor, source: torch.Tensor) -> None:
    """Put the elements of ``source`` (CPU, contiguous, same shape) into ``live``, wherever and however it
    lies.

    Same dtype: bit for bit. Another dtype: torch's cast. Not recorded by autograd.
    """
    with torch.no_grad():
        target = live.detach()
        if target.dtype == source.dtype and not target.is_conj() and not target.is_neg():
            target, source = carrier(target), carrier(source)
        target.copy_(source)


def with_flags(tensor: Any, flags: int) -> Any:
    """``tensor`` as a Parameter, or requiring a gradient; anything but a tensor is given back as it is."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    requires_grad = bool(flags & ~PARAMETER)
    if flags & PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.detach().requires_grad_(requires_grad)
