"""One rank's share of a save: what its plan says, checked against the data, as a layout, images and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ..errors import StateMismatch, UnsupportedValue
from ..format.dtypes import itemsize_bits
from ..format.entries import Box, EntrySpec, Layout, Scope
from ..format.layout import build_layout
from ..state.tensors import DTYPE_NAMES, resolve
from ..state.tree import Leaf, full_box
from ..state.wire import Node
from .stream import Segment, TensorStream
from .values import STATE, Encoded, ImageBuilder, encode_value, value_of


@dataclass(slots=True)
class _Tensor:
    """A tensor of which this rank stores boxes, with what gives each box's data, in the boxes' order."""

    dtype: str
    shape: tuple[int, ...]
    scope: Scope
    boxes: list[Box] = field(default_factory=list)
    data: list[Callable[[], torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank tells the coordinator (plain values only: it travels with the results). ``values``: nodes, as
    msgpack, of values without tensors, by name; ``elsewhere``: names of values that lie in this rank's own state
    image; ``own``: names of which every rank keeps its own, as the plan calls them and by themselves. ``abandoned``:
    why the save was given up, by another rank, before this one had written; nothing else counts then."""

    rank: int
    incarnation: int
    attempt: int
    nbytes: int
    values: Mapping[str, bytes]
    streams: Sequence[str]
    elsewhere: Sequence[str]
    own: Mapping[str, str]
    abandoned: str | None = None

    @classmethod
    def of_abandoned(cls, rank: int, why: str) -> Report:
        return cls(rank, 0, 0, 0, {}, (), (), {}, why)


class Share:
    """Built before anything is written; holds the planner (which gives the data) until the images are written."""

    def __init__(self, plan: SavePlan, planner: SavePlanner, rank: int) -> None:
        """Raises UnsupportedValue and StateMismatch that name the item."""
        self._planner = planner
        self._rank = rank
        self._tensors: dict[str, _Tensor] = {}
        self._values: dict[str, Encoded] = {}
        self.own: dict[str, str] = {}
        own_key: Callable[[str], str | None] = getattr(planner, "own_key", lambda fqn: None)
        for item in plan.items:
            fqn = item.index.fqn
            own = own_key(fqn)
            if own is not None:
                self.own[fqn] = fqn = own
            if item.type is WriteItemType.BYTE_IO:
                self._values[fqn] = encode_value(fqn, value_of(planner, item))
            else:
                self._add_tensor(fqn, item, Scope.RANK if own is not None else Scope.GLOBAL)
        names = set(self.own.values())
        self._inside = {fqn for fqn, value in self._values.items() if value.leaves or fqn in names}
        self._leaves: list[Leaf] = [leaf for fqn in self._inside_order() for leaf in self._values[fqn].leaves]
        self.layout = build_layout(self._specs())

    def _inside_order(self) -> list[str]:
        return [fqn for fqn in self._values if fqn in self._inside]

    def _add_tensor(self, fqn: str, item: WriteItem, scope: Scope) -> None:
        planned = item.tensor_data
        if planned is None or planned.chunk is None:
            raise StateMismatch(
                f"{fqn}: the plan does not say which region is written", found=str(item.index)
            )
        data = self._planner.resolve_data(item)
        if not isinstance(data, torch.Tensor):
            raise StateMismatch(f"{fqn}: the planner gave no tensor", found=type(data).__name__)
        box = Box(tuple(planned.chunk.offsets), tuple(planned.chunk.sizes))
        _check(fqn, item, data, box)
        dtype = DTYPE_NAMES.get(data.dtype)
        if dtype is None or data.layout is not torch.strided or data.is_meta or data.is_nested:
            kind = "meta" if data.is_meta else f"{data.layout} {data.dtype}"
            raise UnsupportedValue(f"{fqn}: a tensor of this kind cannot be stored", found=kind, path=fqn)
        shape = tuple(planned.size)
        tensor = self._tensors.setdefault(fqn, _Tensor(dtype, shape, scope))
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise StateMismatch(
                f"{fqn}: the plan contradicts itself",
                found=f"{dtype}{list(shape)}",
                expected=f"{tensor.dtype}{list(tensor.shape)}",
            )
        if box.volume or not all(shape):
            tensor.boxes.append(box)
            tensor.data.append(partial(_resolved, self._planner, item))

    def _specs(self) -> list[EntrySpec]:
        """Tensors inside values first, since these refer to entries by number."""
        specs = [EntrySpec(STATE, leaf.key, leaf.dtype, leaf.shape, leaf.boxes) for leaf in self._leaves]
        for fqn, tensor in self._tensors.items():
            boxes = full_box(tensor.shape) if tensor.scope is Scope.RANK else tuple(tensor.boxes)
            specs.append(EntrySpec(STATE, fqn, tensor.dtype, tensor.shape, boxes, tensor.scope))
        return specs

    def stream(self) -> TensorStream | None:
        """The bytes of the share's one image; None where it stores no tensor."""
        if not self.layout.images:
            return None
        image = self.layout.images[0]
        segments: list[Segment] = []
        data: list[list[Callable[[], torch.Tensor]]] = [[partial(resolve, x.tensor)] for x in self._leaves]
        data += [tensor.data for tensor in self._tensors.values()]
        for entry, sources in zip(self.layout.entries, data, strict=True):
            offset, bits = entry.offset, itemsize_bits(entry.dtype)
            for box, source in zip(entry.boxes, sources, strict=True):
                nbytes = (bits * box.volume + 7) // 8
                if nbytes:
                    segments.append(Segment(offset, nbytes, source, entry.key))
                offset += nbytes
        segments.sort(key=lambda segment: segment.offset)
        return TensorStream(image.header, segments, image.nbytes)

    def report(self, incarnation: int, attempt: int) -> Report:
        """What the coordinator is told."""
        sent = {
            fqn: msgspec.msgpack.encode(value.node)
            for fqn, value in self._values.items()
            if fqn not in self._inside
        }
        nbytes = sum(image.nbytes for image in self.layout.images)
        streams = [fqn for fqn, value in self._values.items() if value.stream]
        own = set(self.own.values())
        elsewhere = [fqn for fqn in self._inside_order() if fqn not in own]
        return Report(self._rank, incarnation, attempt, nbytes, sent, streams, elsewhere, dict(self.own))

    def image(self) -> ImageBuilder:
        """The state image of what this rank itself holds."""
        builder = ImageBuilder()
        entries = 0
        for fqn in self._inside_order():
            value = self._values[fqn]
            builder.value(fqn, value.node, entries)
            entries += len(value.leaves)
        for index, fqn in enumerate(self._tensors, len(self._leaves)):
            builder.tensor(fqn, index)
        return builder

    def about(self) -> dict[str, Any]:
        """What the state image says of itself."""
        return {"streams": [fqn for fqn, value in self._values.items() if value.stream]}

    def release(self) -> None:
        """Forget the planner and the tensors: all is written."""
        for tensor in self._tensors.values():
            tensor.data.clear()
        for leaf in self._leaves:
            leaf.tensor = _NOTHING
        del self._planner

    def whole(self, metadata: Metadata, reports: Sequence[Report]) -> tuple[Layout, bytes]:
        """The coordinator's layout and state image, in which all tensors of the job and all values stand."""
        builder = self.image()
        renamed = {key for report in reports for key in report.own}
        specs = self._specs()
        for fqn, stored in metadata.state_dict_metadata.items():
            if fqn in renamed or fqn in self._tensors or not isinstance(stored, TensorStorageMetadata):
                continue
            dtype = DTYPE_NAMES.get(stored.properties.dtype)
            if dtype is None:
                raise UnsupportedValue(f"{fqn}: of dtype {stored.properties.dtype}", path=fqn)
            builder.tensor(fqn, len(specs))
            specs.append(EntrySpec(STATE, fqn, dtype, tuple(stored.size), (), Scope.GLOBAL, stored=False))
        streams: set[str] = set()
        for report in reports:
            streams.update(report.streams)
            for fqn, data in report.values.items():
                node: Node = msgspec.msgpack.decode(data)
                builder.value(fqn, node)
        about = {
            "planner_data": metadata.planner_data,
            "streams": sorted(streams),
            "elsewhere": {fqn: report.rank for report in reports for fqn in report.elsewhere},
            "own": sorted({key for report in reports for key in report.own.values()}),
        }
        return build_layout(specs), builder.build(about)


_NOTHING = torch.empty(0)


def _resolved(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    data = planner.resolve_data(item)
    if not isinstance(data, torch.Tensor):
        raise StateMismatch(f"{item.index.fqn}: the planner gave no tensor", found=type(data).__name__)
    return resolve(data)


def _check(fqn: str, item: WriteItem, data: torch.Tensor, box: Box) -> None:
    """The plan must say what the data is: torch plans wrong regions for uneven combinations of shardings."""
    planned = item.tensor_data
    if planned is None or tuple(data.shape) != box.lengths:
        raise StateMismatch(
            f"{fqn}: the plan names another region than the rank holds",
            found=f"a local tensor of shape {list(data.shape)}",
            expected=f"{list(box.lengths)} at {list(box.offsets)}",
            hint="torch's planner is wrong for uneven shards of several kinds (FSDP2 with tensor parallelism); "
            "make the dimension divisible, or save with everstep.Checkpointer",
        )
    if data.dtype != planned.properties.dtype:
        raise StateMismatch(
            f"{fqn}: the plan names another dtype than the data has",
            found=str(data.dtype),
            expected=str(planned.properties.dtype),
        )
