"""Tensors of which a rank holds only regions: what it holds, where that lies in the global tensor, and who holds
the same.

A region is taken from the data that is really held; where placements and data disagree the save refuses, by name.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..errors import UnsupportedValue
from ..format.entries import Box
from ..plan import placements as pure
from ..plan.boxes import BoxIndex, intersect, is_valid
from .tensors import DTYPE_NAMES

_GEOMETRIES_MAX = 1 << 16
_Geometry = tuple[tuple[pure.Region, ...], tuple[Box, ...], tuple[int, ...] | None]
_geometries: weakref.WeakKeyDictionary[Any, dict[Any, _Geometry]] = weakref.WeakKeyDictionary()
"""By mesh: regions, their boxes, and holders of each combination of shapes and placements met. Structure only."""


@dataclass(frozen=True, slots=True)
class Held:
    """What this rank holds of a global tensor of ``shape``.

    ``boxes`` are its regions (none where it holds nothing), ``pieces`` plain tensors, one per box and of its
    lengths: views of the live tensor's memory, which may be written to. ``holders``: the ranks of the job that
    hold exactly these boxes, ascending, this one included; None where only this rank is known to.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    pieces: tuple[torch.Tensor, ...]
    holders: tuple[int, ...] | None = None


class Shards:
    """Regions of one global tensor that a trainer shards by hand, to be saved as (and restored into) one tensor.

    ``shape`` is the global shape, ``boxes`` the (offsets, lengths) of what this rank holds, ``tensors`` the data, one
    plain tensor per box and of its lengths. ``holders``: the ranks that hold exactly these boxes too. ``dtype`` is
    needed only where there is no tensor to tell it.

    Raises UnsupportedValue for boxes that have not the axes of ``shape``, lie outside it or overlap, for tensors of
    other lengths than their box, and for unequal dtypes.
    """

    def __init__(
        self,
        shape: Sequence[int],
        boxes: Sequence[tuple[Sequence[int], Sequence[int]]],
        tensors: Sequence[torch.Tensor],
        *,
        holders: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.shape = tuple(shape)
        self.boxes = tuple(Box(tuple(offsets), tuple(lengths)) for offsets, lengths in boxes)
        self.tensors = tuple(tensors)
        self.holders = tuple(sorted(set(holders))) if holders is not None else None
        self.dtype = _one_dtype(self.tensors, dtype)
        _check_boxes(self.shape, self.boxes)
        _check_tensors(self.boxes, self.tensors)

    def __repr__(self) -> str:
        return (
            f"Shards(shape={self.shape}, dtype={self.dtype}, boxes={[*self.boxes]}, holders={self.holders})"
        )


def flat_range(
    shape: Sequence[int], start: int, tensor: torch.Tensor, *, holders: Sequence[int] | None = None
) -> Shards:
    """A contiguous range of the flattened tensor of ``shape``, as distributed optimizers hold it: ``tensor`` (one
    axis, without padding) has the elements from ``start`` on. Its boxes' tensors are views of ``tensor``.

    Raises UnsupportedValue if ``tensor`` has not one axis or reaches beyond the end.
    """
    if tensor.dim() != 1:
        raise UnsupportedValue(
            "a flat range has one axis", found=list(tensor.shape), expected="[number of elements]"
        )
    try:
        boxes = pure.flat_boxes(shape, start, tensor.numel())
    except ValueError as problem:
        raise UnsupportedValue(
            f"a flat range reaches outside its tensor of shape {list(shape)}",
            found=str(problem),
            hint="Leave out the padding.",
        ) from None
    at, tensors = 0, []
    for box in boxes:
        tensors.append(tensor.detach()[at : at + box.volume].view(box.lengths))
        at += box.volume
    pairs = [(box.offsets, box.lengths) for box in boxes]
    return Shards(shape, pairs, tensors, holders=holders, dtype=tensor.dtype)


def held_by(value: Any, where: str = "") -> Held | None:
    """What this rank holds of ``value``: a DTensor, a ShardedTensor or :class:`Shards`. None for anything else.

    Nothing is communicated. UnsupportedValue, which names ``where`` (part and key), if ``value`` is of one of
    these kinds and cannot be stored, or if its placements do not say what it holds.
    """
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return None
    if isinstance(value, Shards):
        return _held_shards(value)
    if not isinstance(value, torch.Tensor):
        return None
    # Whoever has such a tensor has imported its module; others need not pay for that.
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(value, module.DTensor):
        return _held_dtensor(value, where)
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    if module is not None and isinstance(value, module.ShardedTensor):
        return _held_sharded_tensor(value, where)
    return None


def local_of(value: Any) -> Any:
    """The plain tensor that a DTensor holds on this rank; any other value itself."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return value
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(value, module.DTensor):
        return value
    return _waited(value._local_tensor)


def identity(value: Any) -> tuple[Any, ...]:
    """Equal for two live values that are the same sharded tensor: the same object, or DTensors with the same
    elements of the same memory at the same place of the global tensor. Also where this rank holds no element."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(value, module.DTensor):
        return (id(value),)
    local = local_of(value)
    memory = local.untyped_storage()._cdata
    spec = value._spec
    view = (memory, local.storage_offset(), local.dtype, local.shape, local.stride())
    return (*view, local.is_conj(), local.is_neg(), value.shape, spec.placements, id(spec.mesh))


# ---------------------------------------------------------------------------------------------- DTensor


def _held_dtensor(value: Any, where: str) -> Held:
    spec = value._spec
    local = _plain_local(value, where)
    shape = tuple(value.shape)
    mesh, placements = spec.mesh, spec.placements
    at = mesh.get_coordinate()
    if at is None:
        return Held(shape, local.dtype, (), ())
    at = tuple(at)
    known = _geometries.setdefault(mesh, {})
    key = (at, placements, shape, local.shape)
    found = known.get(key)
    if found is None:
        if len(known) >= _GEOMETRIES_MAX:
            known.clear()
        found = known[key] = _geometry(value, mesh, at, placements, tuple(local.shape), where)
    regions, boxes, holders = found
    return Held(shape, local.dtype, boxes, _pieces(local, regions), holders)


def _plain_local(value: Any, where: str) -> torch.Tensor:
    local = _waited(value._local_tensor)
    if type(local) is not torch.Tensor and type(local) is not torch.nn.Parameter:
        raise _refusal(
            "a DTensor over a subclass of torch.Tensor cannot be stored",
            where,
            found=f"{type(local).__module__}.{type(local).__qualname__}",
            expected="a plain local tensor",
        )
    if local.layout is not torch.strided or local.is_meta or local.dtype not in DTYPE_NAMES:
        raise _refusal(
            "the local tensor of a DTensor holds nothing that can be stored",
            where,
            found=f"{local.dtype} on {local.device}, {local.layout}",
            expected="a dense tensor with memory, of a storable dtype",
            hint="Materialise it before saving." if local.is_meta else None,
        )
    return local.detach()


def _waited(local: torch.Tensor) -> torch.Tensor:
    """A local tensor once the collective that makes it has ended."""
    trigger = getattr(local, "trigger_wait", None)
    return trigger() if trigger is not None else local


def _geometry(
    value: Any, mesh: Any, at: tuple[int, ...], placements: Sequence[Any], local: tuple[int, ...], where: str
) -> _Geometry:
    shape, sizes = tuple(value.shape), tuple(mesh.shape)
    plain = [_placement(placement, where) for placement in placements]
    found = pure.regions(shape, sizes, at, plain, local)
    if found is None:
        expected = " or ".join(str(list(s)) for s in pure.expected_shapes(shape, sizes, at, plain))
        raise _refusal(
            f"the placements {tuple(map(str, placements))} of a DTensor of shape {list(shape)} on a mesh of shape "
            f"{list(sizes)} do not say what its local tensor is",
            where,
            found=f"local shape {list(local)} at coordinates {list(at)}",
            expected=expected,
            hint="Make it with distribute_tensor or fully_shard, or save everstep.Shards with explicit boxes.",
        )
    sharded = pure.sharded_axes(plain) if 0 not in shape else []
    ranks = mesh.mesh
    for axis in sorted(sharded, reverse=True):
        ranks = ranks.select(axis, at[axis])
    boxes = tuple([region.box for region in found])
    return found, boxes, tuple(sorted(ranks.reshape(-1).tolist())) if found else None


def _placement(placement: Any, where: str) -> pure.Placement:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    # First, for older releases derive it from Shard.
    if isinstance(placement, _StridedShard):
        return pure.StridedShard(placement.dim, int(placement.split_factor))
    if isinstance(placement, Shard):
        return pure.Shard(placement.dim)
    if isinstance(placement, Replicate):
        return pure.Replicate()
    if isinstance(placement, Partial):
        raise _refusal(
            "a DTensor whose ranks hold summands that are not reduced yet cannot be stored",
            where,
            found=str(placement),
            expected="Replicate or Shard",
            hint="Redistribute it to Replicate() or Shard(dim) before saving.",
        )
    raise _refusal(
        "a DTensor with a placement that is not known here cannot be stored",
        where,
        found=f"{type(placement).__module__}.{type(placement).__qualname__}",
        expected="Replicate or Shard",
        hint="Redistribute it before saving, or save everstep.Shards with explicit boxes.",
    )


def _pieces(local: torch.Tensor, regions: Sequence[pure.Region]) -> tuple[torch.Tensor, ...]:
    """The parts of ``local`` that the regions are: always views."""
    if len(regions) == 1:
        lengths = regions[0].box.lengths
        # An empty local tensor may have other lengths than the (empty) box.
        return (local if local.shape == lengths else local.new_empty(lengths),)
    found = []
    for region in regions:
        piece = local
        for axis, (at, length) in enumerate(zip(region.local, region.box.lengths, strict=True)):
            if length != piece.shape[axis]:
                piece = piece.narrow(axis, at, length)
        found.append(piece)
    return tuple(found)


# --------------------------------------------------------------------------------------- explicit regions


def _held_sharded_tensor(value: Any, where: str) -> Held:
    shape = tuple(value.metadata().size)
    shards = value.local_shards()
    pairs = [(tuple(x.metadata.shard_offsets), tuple(x.metadata.shard_sizes)) for x in shards]
    try:
        checked = Shards(shape, pairs, [x.tensor.detach() for x in shards], dtype=value.dtype)
    except UnsupportedValue as problem:
        raise _refusal(problem.message, where, found=problem.found, expected=problem.expected) from None
    return _held_shards(checked)


def _held_shards(value: Shards) -> Held:
    pairs = list(zip(value.boxes, value.tensors, strict=True))
    if prod(value.shape):
        # A box without elements says nothing.
        pairs = [(box, tensor) for box, tensor in pairs if box.volume]
    elif pairs:
        pairs = [(Box.full(value.shape), value.tensors[0].new_empty(value.shape))]
    boxes, pieces = tuple(box for box, _ in pairs), tuple(tensor.detach() for _, tensor in pairs)
    return Held(value.shape, value.dtype, boxes, pieces, value.holders if boxes else None)


def _one_dtype(tensors: Sequence[torch.Tensor], said: torch.dtype | None) -> torch.dtype:
    for tensor in tensors:
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            raise UnsupportedValue(
                "shards are plain tensors",
                found=f"{type(tensor).__module__}.{type(tensor).__qualname__}",
                expected="torch.Tensor",
            )
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise UnsupportedValue(
                "shards are dense tensors with memory", found=f"{tensor.layout} on {tensor.device}"
            )
    dtypes = {tensor.dtype for tensor in tensors} | ({said} if said is not None else set())
    if not dtypes:
        raise UnsupportedValue("shards without a tensor need a dtype", hint="Give dtype= where none is held.")
    if len(dtypes) > 1:
        raise UnsupportedValue(
            "all shards of a tensor have one dtype", found=sorted(map(str, dtypes)), expected="one"
        )
    (dtype,) = dtypes
    if dtype not in DTYPE_NAMES:
        raise UnsupportedValue(f"a tensor of dtype {dtype} cannot be stored", found=str(dtype))
    return dtype


def _check_boxes(shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    if any(size < 0 for size in shape):
        raise UnsupportedValue("a shape has no negative sizes", found=list(shape))
    for box in boxes:
        if not is_valid(box, shape):
            raise UnsupportedValue(
                "a box does not lie in its tensor",
                found=f"offsets {list(box.offsets)}, lengths {list(box.lengths)}",
                expected=f"{len(shape)} axes, inside shape {list(shape)}",
            )
    solid = [box for box in boxes if box.volume]
    index = BoxIndex(solid)
    for number, box in enumerate(solid):
        for other in index.near(box):
            if other > number and intersect(box, solid[other]) is not None:
                raise UnsupportedValue(
                    f"boxes of a tensor of shape {list(shape)} overlap",
                    found=f"{box.offsets}+{box.lengths} and {solid[other].offsets}+{solid[other].lengths}",
                    expected="every element once",
                )


def _check_tensors(boxes: Sequence[Box], tensors: Sequence[torch.Tensor]) -> None:
    if len(boxes) != len(tensors):
        raise UnsupportedValue(
            "shards have one tensor per box", found=f"{len(tensors)} tensors", expected=f"{len(boxes)}"
        )
    for box, tensor in zip(boxes, tensors, strict=True):
        if tuple(tensor.shape) != box.lengths:
            raise UnsupportedValue(
                f"the tensor of the box at {list(box.offsets)} has another shape",
                found=list(tensor.shape),
                expected=list(box.lengths),
            )


def _refusal(
    why: str, where: str, *, found: object, expected: object, hint: str | None = None
) -> UnsupportedValue:
    message = f"{where}: {why}" if where else why
    return UnsupportedValue(message, found=found, expected=expected, hint=hint, path=where)
