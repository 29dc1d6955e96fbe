"""Destinations of a copy: tensors that are views into a slot."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from everstep.errors import UnsupportedValue
from everstep.format.entries import path_of
from everstep.format.layout import Layout
from everstep.memory.control import COPY_PREFIX, IMAGE_PREFIX

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
    """What a layout expects of the boxes that lie in a slot, in order: the places of their entries in the layout,
    their numbers within the entry, images (:meth:`Layout.places`), shapes, dtypes, first bytes and sizes. ``boxed``:
    some entry has several. ``plain``: each is copied as it is (not as integers)."""

    indices: list[int]
    boxes: list[int]
    images: list[int]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    offsets: list[int]
    sizes: list[int]
    boxed: bool
    plain: bool


def expect(layout: Layout) -> Expected:
    """Once per layout."""
    found = Expected([], [], [], [], [], [], [], boxed=False, plain=True)
    plain, boxed = True, False
    for index, image, offset in layout.places():
        entry = layout.entries[index]
        boxed = boxed or len(entry.boxes) > 1
        dtype, begin = torch_dtype(entry.dtype), offset
        for number, box in enumerate(entry.boxes):
            size = entry.nbytes if len(entry.boxes) == 1 else box.volume * dtype.itemsize
            found.indices.append(index)
            found.boxes.append(number)
            found.images.append(image)
            found.shapes.append(torch.Size(box.lengths))
            found.dtypes.append(dtype)
            found.offsets.append(begin)
            found.sizes.append(size)
            plain = plain and dtype in COPYABLE and _is_typed(begin, size, box.volume, dtype)
            begin += size
        if begin != offset + entry.nbytes:
            name = path_of(entry.part, entry.key)
            raise UnsupportedValue(
                f"{name}: boxes of dtype {entry.dtype} have another size in the running torch",
                found=begin - offset,
                expected=entry.nbytes,
                path=name,
            )
    return replace(found, plain=plain, boxed=boxed)


def build_destinations(
    layout: Layout, expected: Expected, places: Mapping[str, memoryview]
) -> list[torch.Tensor]:
    """Views of all boxes that lie in one slot, whose regions are ``places``."""
    with torch._C.DisableTorchFunction(), no_collection():
        names = [IMAGE_PREFIX + image.name for image in layout.images]
        names += [COPY_PREFIX + image.name for image in layout.copies]
        images = [torch.frombuffer(places[name], dtype=torch.uint8) for name in names]
        return [
            _view(images[image], begin, size, shape, dtype)
            for image, begin, size, shape, dtype in zip(
                expected.images,
                expected.offsets,
                expected.sizes,
                expected.shapes,
                expected.dtypes,
                strict=True,
            )
        ]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Thousands of objects made at once would set off collections of the trainer's; what is dropped before the end is
    never looked at."""
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


def _view(image: torch.Tensor, begin: int, size: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of one box in the shape that a source has; flat bytes where that cannot be."""
    carried = carrier(dtype)
    if size == 0:
        return torch.empty(shape, dtype=carried)
    data = image.narrow(0, begin, size)
    return data.view(carried).view(shape) if _is_typed(begin, size, prod(shape), dtype) else data


def _is_typed(begin: int, size: int, volume: int, dtype: torch.dtype) -> bool:
    """Whether these bytes of an image can be looked at as so many elements."""
    return volume * dtype.itemsize == size and begin % dtype.itemsize == 0
