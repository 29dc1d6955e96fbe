"""Destinations of a copy: tensors that are views into a slot."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from everstep.errors import UnsupportedValue
from everstep.format.layout import Entry, Layout
from everstep.memory.control import IMAGE_PREFIX

COPYABLE: frozenset[torch.dtype] = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex32,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    }
)
"""Dtypes that torch copies on every device. All others (sub-byte ones, bit fields, new ones) are copied as
integers of their item size: what is stored is bytes in any case."""

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Expected:
    """What a layout expects of the leaves that it stores, in order: their places in the layout, shapes,
    dtypes. ``plain``: each is copied as it is (not as integers)."""

    indices: list[int]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    plain: bool


def expect(layout: Layout) -> Expected:
    """Once per layout."""
    indices = [index for index, entry in enumerate(layout.entries) if entry.image is not None]
    entries = [layout.entries[index] for index in indices]
    dtypes = [torch_dtype(entry.dtype) for entry in entries]
    shapes = [torch.Size(_shape(entry)) for entry in entries]
    plain = all(
        dtype in COPYABLE and _is_typed(entry, shape, dtype)
        for entry, shape, dtype in zip(entries, shapes, dtypes, strict=True)
    )
    return Expected(indices, shapes, dtypes, plain)


def build_destinations(
    layout: Layout, expected: Expected, places: Mapping[str, memoryview]
) -> list[torch.Tensor]:
    """Views of all stored entries in one slot, whose regions are ``places``."""
    with torch._C.DisableTorchFunction(), _no_collection():
        images = [
            torch.frombuffer(places[IMAGE_PREFIX + image.name], dtype=torch.uint8) for image in layout.images
        ]
        return [
            _view(images, layout.entries[index], shape, carrier(dtype))
            for index, shape, dtype in zip(expected.indices, expected.shapes, expected.dtypes, strict=True)
        ]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Thousands of views made at once would set off full collections of all the trainer's objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def torch_dtype(name: str) -> torch.dtype:
    """The running torch's dtype of that name. UnsupportedValue."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedValue(f"dtype {name} is unknown to torch {torch.__version__}", found=name)
    return found


def carrier(dtype: torch.dtype) -> torch.dtype:
    """The dtype that bytes of ``dtype`` are copied as."""
    return dtype if dtype in COPYABLE else _CARRIERS.get(dtype.itemsize, torch.uint8)


def _view(
    images: Sequence[torch.Tensor], entry: Entry, shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    """The entry's bytes in the shape that a source has; flat bytes where that cannot be."""
    assert entry.image is not None
    if entry.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    data = images[entry.image].narrow(0, entry.offset, entry.nbytes)
    return data.view(dtype).view(shape) if _is_typed(entry, shape, dtype) else data


def _is_typed(entry: Entry, shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether the entry's place in the image can be looked at as such a tensor."""
    return prod(shape) * dtype.itemsize == entry.nbytes and entry.offset % dtype.itemsize == 0


def _shape(entry: Entry) -> Sequence[int]:
    """What a source is expected to look like: its one box, or flat where there are several (or none)."""
    if len(entry.boxes) == 1:
        return entry.boxes[0].lengths
    return (sum(prod(box.lengths) for box in entry.boxes),)
