"""A snapshot beside the tensors, in memory of their own devices: taken at the speed of that memory, moved into a slot
while training goes on, and restored from there.

Each device has one flat buffer. What a slot holds lies in it as in the slot's images, so that few long copies drain it;
what other ranks store lies behind, so that a rank can go back without asking anyone. Tensors on the host have a buffer
on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from everstep.errors import MemoryTooSmall, StateMismatch
from everstep.format.entries import path_of
from everstep.memory.room import check_room
from everstep.memory.slots import WriteSlot
from everstep.state.plan_base import Slot
from everstep.state.tree import Leaf

from .copier import Plan
from .late import Drain
from .moving import beside, synchronize
from .views import carrier

ALIGN_BYTES = 256
"""Of the runs in a buffer: what devices' copies like best, and more than any item size."""

GROWTH = 1.02
"""A buffer that turned out too small is replaced by one of this many times the need."""

Key = tuple[int, int]
"""(incarnation, step)."""

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that lie in a buffer one behind the other as they do in a region of a slot."""

    device: torch.device
    begin: int
    nbytes: int
    region: str
    offset: int


@dataclass(slots=True)
class Arrangement:
    """Where everything lies: by leaf and piece the first byte in its device's buffer, the runs to be drained, and how
    large the buffers must be."""

    begins: list[list[int]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    need: dict[torch.device, int] = field(default_factory=dict)


class DeviceSlot:
    """Room for one snapshot, on every device that the state has tensors on. Used from the trainer's thread only."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, torch.Tensor] = {}
        self._structure: tuple[str, list[torch.device]] | None = None
        self._arrangement = Arrangement()
        self._views: list[list[torch.Tensor]] = []
        self._plan: Plan | None = None
        self._draining: Drain | None = None
        self.key: Key | None = None
        """(incarnation, step) of the snapshot that it holds."""
        self.state = b""
        """That snapshot's state image."""
        self.given_up = False
        """There was no room once training had begun: nothing is taken any more."""

    @property
    def plan(self) -> Plan:
        """Of the snapshot that it holds."""
        assert self._plan is not None, "only asked where there is a snapshot"
        return self._plan

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes reserved, by device."""
        return {str(device): buffer.nbytes for device, buffer in self._buffers.items()}

    def reserve(self, need: Mapping[torch.device, int]) -> None:
        """Have so many bytes on each device at least. What was held is lost where a buffer is replaced. MemoryTooSmall;
        then there is no buffer at all."""
        for device, nbytes in need.items():
            known = self._buffers.get(device)
            if known is not None and known.nbytes >= nbytes:
                continue
            self.forget()
            self._views, self._structure = [], None
            self._buffers.pop(device, None)
            del known  # before the new one is made: there may not be room for both
            try:
                self._buffers[device] = _allocate(nbytes, device)
            except MemoryTooSmall:
                self.close()
                raise

    def give_up(self) -> None:
        """Let go of all memory, and ask for none again."""
        self.given_up = True
        self.close()

    def forget(self) -> None:
        """Hold nothing from now on. The buffers stay."""
        self.key, self._plan, self.state = None, None, b""

    def close(self) -> None:
        """Let go of all memory, once nothing reads it."""
        self.forget()
        self._views, self._structure = [], None
        self._buffers.clear()

    def take(self, key: Key, plan: Plan, leaves: Sequence[Leaf], state: bytes) -> None:
        """Hold a snapshot of ``leaves`` as ``key``. The former one must have been drained.

        Host tensors are copied when this returns; copies on devices are queued on their current streams, so that
        whatever those are given later cannot reach the snapshot. MemoryTooSmall where the buffers have to grow and
        cannot; what was held is lost then too.
        """
        self.forget()
        self._arrange(plan, leaves)
        sources = [_carried(piece) for leaf in leaves for piece in leaf.pieces]
        into = [view for views in self._views for view in views]
        beside(sources, into)
        self.key, self._plan, self.state = key, plan, state

    def drain(self, slot: WriteSlot, plan: Plan, places: Mapping[str, memoryview]) -> Drain:
        """Begin to move what was taken into ``slot``, whose regions are ``places``, and have it published."""
        sources, into = [], []
        for run in self._arrangement.runs:
            sources.append(self._buffers[run.device].narrow(0, run.begin, run.nbytes))
            region = torch.frombuffer(places[run.region], dtype=torch.uint8)
            into.append(region.narrow(0, run.offset, run.nbytes))
        return Drain(slot, plan.layout_hash, *_cut(sources, into))

    def check(self, slots: Sequence[Slot]) -> None:
        """StateMismatch for a slot whose region it does not have in one piece, of its shape and dtype."""
        entries = self.plan.layout.entries
        for slot in slots:
            entry = entries[slot.index]
            source = self._source(slot)
            if source is None:
                raise StateMismatch(
                    f"{path_of(entry.part, entry.key)}: the snapshot on the device has other regions of it",
                    found=entry.boxes,
                    expected=slot.box,
                    key=entry.key,
                )
            to = _carried(slot.tensor)
            if source.shape != to.shape or source.dtype != to.dtype:
                raise StateMismatch(
                    f"{path_of(entry.part, entry.key)} is not what the snapshot on the device has",
                    found=f"{source.dtype} {list(source.shape)}",
                    expected=f"{to.dtype} {list(to.shape)}",
                    key=entry.key,
                )

    def restore(self, slots: Sequence[Slot]) -> int:
        """Fill ``slots``, which were checked and whose indices are those of the leaves that were taken, at the speed of
        the devices; the bytes copied. Returns when they are there."""
        found = [
            (source, _carried(slot.tensor)) for slot in slots if (source := self._source(slot)) is not None
        ]
        sources, into = [source for source, _ in found], [to for _, to in found]
        beside(sources, into)
        synchronize([*sources, *into])
        return sum(to.numel() * to.element_size() for to in into)

    def _source(self, slot: Slot) -> torch.Tensor | None:
        boxes = self.plan.layout.entries[slot.index].boxes
        return self._views[slot.index][boxes.index(slot.box)] if slot.box in boxes else None

    def _arrange(self, plan: Plan, leaves: Sequence[Leaf]) -> None:
        devices = [piece.device for leaf in leaves for piece in leaf.pieces]
        structure = (plan.layout_hash, devices)
        if structure == self._structure:
            return
        self._structure, self._views = None, []
        self._arrangement = arrange(plan, leaves)
        self._fit(self._arrangement.need)
        pieces = [leaf.pieces for leaf in leaves]
        with torch.no_grad(), torch._C.DisableTorchFunction():
            self._views = [
                [self._view(piece, begin) for piece, begin in zip(some, begins, strict=True)]
                for some, begins in zip(pieces, self._arrangement.begins, strict=True)
            ]
        self._structure = structure

    def _fit(self, need: Mapping[torch.device, int]) -> None:
        for device in set(self._buffers) - set(need):
            del self._buffers[device]
        self.reserve(
            {
                device: int(nbytes * GROWTH)
                for device, nbytes in need.items()
                if device not in self._buffers or self._buffers[device].nbytes < nbytes
            }
        )

    def _view(self, piece: torch.Tensor, begin: int) -> torch.Tensor:
        dtype = carrier(piece.dtype)
        flat = self._buffers[piece.device].narrow(0, begin, piece.numel() * piece.element_size())
        return flat.view(dtype).view(piece.shape)


def arrange(plan: Plan, leaves: Sequence[Leaf]) -> Arrangement:
    """Buffers for ``leaves``, whose layout ``plan`` has."""
    found = Arrangement(begins=[[0] * len(leaf.pieces) for leaf in leaves])
    layout = plan.layout
    regions = [name for name, _ in plan.regions(0, 0)[: len(layout.images) + len(layout.copies)]]
    stored = sorted(layout.places(), key=lambda place: (place[1], place[2]))
    for index, image, offset in stored:
        for number, piece in enumerate(leaves[index].pieces):
            begin = _place(found, piece, regions[image], offset)
            found.begins[index][number] = begin
            offset += _size(piece)
    there = {place[0] for place in stored}
    for index, leaf in enumerate(leaves):
        for number, piece in enumerate(leaf.pieces if index not in there else ()):
            begin = _aligned(found.need.get(piece.device, 0))
            found.begins[index][number] = begin
            found.need[piece.device] = begin + _size(piece)
    return found


def _place(found: Arrangement, piece: torch.Tensor, region: str, offset: int) -> int:
    """The place of a piece that lies at ``offset`` of a region: behind the one before, where that is so in the region
    too; else a run of its own begins."""
    device, nbytes = piece.device, _size(piece)
    if found.runs:
        last = found.runs[-1]
        follows = (last.device, last.region, last.offset + last.nbytes) == (device, region, offset)
        begin = last.begin + last.nbytes
        if follows and begin % piece.element_size() == 0:
            found.runs[-1] = Run(device, last.begin, last.nbytes + nbytes, region, last.offset)
            found.need[device] = begin + nbytes
            return begin
    begin = _aligned(found.need.get(device, 0))
    found.runs.append(Run(device, begin, nbytes, region, offset))
    found.need[device] = begin + nbytes
    return begin


def _size(piece: torch.Tensor) -> int:
    return piece.numel() * piece.element_size()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that every device copies."""
    dtype = carrier(tensor.dtype)
    return tensor if tensor.dtype is dtype else tensor.detach().view(dtype)


def _cut(
    sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Long runs in pieces, between which a drain can be cancelled."""
    pieces: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for found, whole in zip(pieces, (sources, into), strict=True):
        for tensor in whole:
            found.extend(torch.split(tensor, DRAIN_BYTES) if tensor.nbytes else [tensor])
    return pieces


DRAIN_BYTES = 64 << 20
"""What a drain copies at a time."""


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """MemoryTooSmall names the device, what is needed and what is free."""
    try:
        if device == _HOST:
            check_room(nbytes, None)
        with torch._C.DisableTorchFunction(), torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except MemoryTooSmall as error:
        raise _too_small(nbytes, error.free, device) from error
    except (
        RuntimeError
    ) as error:  # torch's own class for it, and the host allocator's, which is none of its own
        raise _too_small(nbytes, _free_bytes(device), device) from error


def _free_bytes(device: torch.device) -> int | None:
    try:
        free, _ = torch.get_device_module(device).mem_get_info(device)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return int(free)


def _too_small(nbytes: int, free: int | None, device: torch.device) -> MemoryTooSmall:
    return MemoryTooSmall(
        f"no room for a snapshot on {device}: Memory(device_slots=1) takes all tensors once more, on their devices",
        found=f"{free:,} bytes free" if free is not None else "not so much free",
        expected=f"{nbytes:,} bytes, with the optimizer's state that is still to come",
        hint="Leave device_slots out (snapshots then go straight to the host), or use smaller batches or more ranks",
        needed=nbytes,
        free=free or 0,
        where=str(device),
    )
