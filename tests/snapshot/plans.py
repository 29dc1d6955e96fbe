"""Layouts for tests of the copier, made by hand: one image per part, entries one behind the other by item
size."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from everstep.format.layout import Box, Entry, ImageSpec, Layout, Scope
from everstep.memory.header import aligned
from everstep.snapshot.copier import Plan

HEADER_BYTES = 4096
_names = itertools.count()


def dtype_name(leaf: Any) -> str:
    return str(leaf.dtype).removeprefix("torch.")


def plan_of(parts: Mapping[str, Mapping[str, Any]], *, stored_elsewhere: Sequence[str] = ()) -> Plan:
    """A plan of parts of named tensors and arrays; its entries are in the order given."""
    entries: list[Entry] = []
    images: list[ImageSpec] = []
    for number, (part, leaves) in enumerate(parts.items()):
        offsets, end = _offsets(leaves, stored_elsewhere)
        for key, leaf in leaves.items():
            shape = tuple(leaf.shape)
            image = None if key in stored_elsewhere else number
            box = Box((0,) * len(shape), shape)
            nbytes = leaf.nbytes
            entries.append(
                Entry(
                    part, key, dtype_name(leaf), shape, (box,), Scope.RANK, image, offsets.get(key, 0), nbytes
                )
            )
        header = f"header of {part}".encode().ljust(HEADER_BYTES)
        images.append(ImageSpec(part, part, header, end))
    encoded = repr(entries).encode()
    return Plan(Layout(tuple(entries), tuple(images)), encoded, f"{hash(encoded) & (1 << 64) - 1:016x}")


def _offsets(leaves: Mapping[str, Any], stored_elsewhere: Sequence[str]) -> tuple[dict[str, int], int]:
    offsets, at = {}, HEADER_BYTES
    for key in sorted(leaves, key=lambda key: -itemsize(leaves[key])):
        if key not in stored_elsewhere:
            offsets[key] = at
            at += leaves[key].nbytes
    return offsets, at


def itemsize(leaf: Any) -> int:
    return int(leaf.itemsize if isinstance(leaf, np.ndarray) else leaf.dtype.itemsize)


def leaves_of(parts: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    return [leaf for leaves in parts.values() for leaf in leaves.values()]


def logical_bytes(leaf: Any) -> bytes:
    """Row-major bytes, by the slow and sure way."""
    if isinstance(leaf, np.ndarray):
        return leaf.tobytes()
    plain = leaf.detach().cpu().resolve_conj().resolve_neg()
    if plain.numel() == 0:
        return b""
    if plain.dtype.itemsize == 1:
        plain = plain.view(torch.uint8)
    return bytes(plain.contiguous().reshape(-1).view(torch.uint8).numpy())


def room_for(plan: Plan) -> int:
    return sum(aligned(nbytes) for _, nbytes in plan.regions(1 << 16, 1 << 16))
