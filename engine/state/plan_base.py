"""What planning a restore collects: mismatches, which tensor each entry fills, and what is to be done
afterwards."""

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from ..errors import BadOption, Damaged, StateMismatch, UnsupportedValue
from ..format.layout import Box, Entry
from .codec import StateImage
from .registry import ObjectState, attributes_of
from .sharded import Held, Shards, held_by
from .tensors import copy_into, dtype_named, empty, is_fillable, overlaps_itself

LOOSENINGS = frozenset({"missing", "unexpected", "dtype", "class", "ties", "rng", "ranks", "loader"})
"""What ``allow`` may hold. Shapes and kinds of values are never loosened."""

_USUAL = (torch.Tensor, torch.nn.Parameter)
"""Types of what most tensors are: these, and no subclass."""

_TEXTS_MAX = 40
"""Differences named in an error's text; all of them are in its ``mismatches``."""


class Phase(enum.IntEnum):
    """Order of what happens after all bytes are in: a scheduler needs its optimizer restored before it."""

    MODULES = 1
    OPTIMIZERS = 2
    SCHEDULERS = 3
    OTHERS = 4
    RANDOM = 5


class Planned:
    """An object with state that compares and claims for itself."""

    phase: Phase = Phase.OTHERS

    def plan(self, ledger: Ledger, stored: Any, where: str) -> None:
        """Compare ``stored`` (with :class:`StoredTensor` for tensors) with this, noting differences in
        ``ledger``."""
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Stands for entry ``index`` while a checkpoint is compared with a target."""

    index: int

    def as_array(self, dtype: Any, shape: tuple[int, ...]) -> StoredArray:
        return StoredArray(self.index, dtype, shape)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Stands for a numpy array that is an entry."""

    index: int
    dtype: Any
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Extra:
    """Something at ``where`` of the checkpoint that a target does not take, with the entries it holds."""

    where: str
    text: str
    indices: frozenset[int]


class Slot(msgspec.Struct, frozen=True):
    """Memory to fill: ``tensor`` (contiguous, on the CPU, unless the ledger says ``anywhere``) takes region ``box`` of
    entry ``index``."""

    index: int
    box: Box
    tensor: torch.Tensor
    sharded: bool
    """Whether it is a region of a tensor of the whole job, whatever the entry was at the save."""


@dataclass(slots=True)
class Ledger:
    """The growing plan. ``targets`` maps an entry's index to the tensor that stands for it in the restored
    values: the live tensor itself, or a new one. ``slots`` is the memory to fill for them; ``copies`` are (live
    tensor, filled tensor) pairs still to be copied once that is full."""

    image: StateImage
    entries: Sequence[Entry]
    allow: frozenset[str]
    anywhere: bool = False
    """Slots are filled by copies of tensors, so live ones are slots wherever they lie, and whatever their strides."""
    targets: dict[int, Any] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    loosened: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    claims: dict[tuple[Any, ...], int] = field(default_factory=dict)
    claimed: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    extra: list[Extra] = field(default_factory=list)
    """What the checkpoint has and this target does not take: a difference unless another rank takes it."""
    met: set[str] = field(default_factory=set)
    """Paths at which target and checkpoint both have something."""
    used: set[int] = field(default_factory=set)
    """Entries that the target takes, a region or nothing of it as it may be."""
    dropped: set[int] = field(default_factory=set)
    """Entries that are part of ``extra``: not read unless something else refers to them too."""
    missing: int = 0
    """How much of the target the checkpoint lacks, allowed or not."""
    matched: int = 0
    """Live tensors that found an entry of their name, and ..."""
    wanted: int = 0
    """... live tensors met."""

    def differ(self, kind: str, text: str) -> None:
        """Note a difference: loosened if ``kind`` is allowed, else part of the error to come."""
        self.missing += kind == "missing"
        (self.loosened if kind in self.allow else self.mismatches).append(f"{kind}: {text}")

    def unexpected(self, where: str, stored: Any, text: str) -> None:
        """Note that nothing of this target takes ``stored``, which lies at ``where`` in the checkpoint."""
        indices = frozenset(stored_in(stored))
        self.dropped |= indices
        self.extra.append(Extra(where, f"{where}: {text}", indices))

    def keep_extra(self, places: Collection[str]) -> None:
        """Forget what is unexpected elsewhere than at, or inside of, ``places``."""
        above = tuple(f"{place}/" for place in places)
        self.extra = [e for e in self.extra if e.where in places or e.where.startswith(above)]

    def settle_extra(self, taken: Callable[[Extra], bool] = lambda extra: False) -> None:
        """Make differences of what is unexpected, but for what another rank of the job has ``taken``."""
        for extra in self.extra:
            if not taken(extra):
                self.differ("unexpected", extra.text)
        self.extra.clear()

    def raise_mismatches(self) -> None:
        if not self.mismatches:
            return
        shown = self.mismatches[:_TEXTS_MAX]
        more = len(self.mismatches) - len(shown)
        lines = "\n".join(f"  {text}" for text in shown) + (f"\n  and {more} more" if more else "")
        kinds = sorted({text.partition(":")[0] for text in self.mismatches} & LOOSENINGS)
        raise StateMismatch(
            f"checkpoint and target differ in {len(self.mismatches)} places; nothing was changed\n{lines}\n"
            + (f"If that is meant, load with allow={set(kinds)}" if kinds else ""),
            mismatches=list(self.mismatches),
        )

    def entry(self, index: int) -> Entry:
        if not 0 <= index < len(self.entries):
            raise Damaged(
                f"{self.image.name}: refers to an entry that is not in the layout",
                found=index,
                expected=f"below {len(self.entries)}",
                name=self.image.name,
            )
        return self.entries[index]

    def fits(self, live: torch.Tensor | Shards, index: int, where: str) -> bool:
        """Compare a live tensor with its entry; differences are noted. False if it cannot be filled."""
        entry = self.entry(index)
        self.matched += 1
        self.used.add(index)
        problem = _unfillable(live)
        if problem is not None:
            self.differ(problem[0], f"{where}: {problem[1]}")
        elif tuple(live.shape) != entry.shape:
            self.differ("shape", f"{where}: stored {_shape(entry.shape)}, target {_shape(live.shape)}")
        else:
            if live.dtype != dtype_named(entry.dtype):
                mine = str(live.dtype).removeprefix("torch.")
                self.differ("dtype", f"{where}: stored {entry.dtype}, target {mine}")
            return True
        return False

    def claim(self, live: torch.Tensor | Shards, index: int, where: str) -> None:
        """Have entry ``index`` read into ``live``, if it fits."""
        if self.fits(live, index, where):
            held = held_by(live)
            self._claim(live, index, where, held, _memory(live, held))

    def _claim(
        self,
        live: torch.Tensor | Shards,
        index: int,
        where: str,
        held: Held | None,
        memory: tuple[Any, ...] | None,
    ) -> None:
        """As :meth:`claim`, for what fits, holds ``held`` and lies in ``memory``."""
        if memory is not None:
            other = self.claims.setdefault(memory, index)
            if other != index:
                self.differ(
                    "ties", f"{where}: the target shares its memory with another tensor, stored are two"
                )
                return
            before = self.claimed.setdefault(index, memory)
            if before != memory:
                self.differ("ties", f"{where}: stored is one tensor with another name, the target has two")
        if held is not None:
            if index not in self.targets or self.claimed.get(index) != memory:
                self._fill(index, held)
            self.targets.setdefault(index, live)
            return
        assert isinstance(live, torch.Tensor)
        entry = self.entries[index]
        if index not in self.targets and self._is_fillable(live) and live.dtype == dtype_named(entry.dtype):
            self.targets[index] = mine = live.detach()
            self._slot(index, _whole_of(entry), mine, sharded=False)
        else:
            self.copies.append((live, self._whole(index)))

    def _whole(self, index: int) -> torch.Tensor:
        """A plain tensor with all of entry ``index``."""
        found: torch.Tensor = self.tensor(index)
        return found if held_by(found) is None else self._new(index)

    def claim_if_free(self, live: torch.Tensor, index: int) -> bool:
        """Read entry ``index`` into ``live`` if shapes and dtypes agree and nobody else has either."""
        entry = self.entry(index)
        same = tuple(live.shape) == entry.shape and live.dtype == dtype_named(entry.dtype)
        if not same or index in self.targets or _unfillable(live) is not None:
            return False
        held = held_by(live)
        memory = _memory(live, held)
        if (memory is None and held is None) or memory in self.claims:
            return False
        self.matched += 1
        self.used.add(index)
        self._claim(live, index, "", held, memory)
        return True

    def tensor(self, index: int) -> Any:
        """What entry ``index`` is read into; a new CPU tensor of all of it if nothing has claimed it."""
        found = self.targets.get(index)
        self.used.add(index)
        if found is None:
            found = self.targets[index] = self._new(index)
        return found

    def like(self, index: int, live: Any) -> Any:
        """What entry ``index`` is read into; if nothing has claimed it, a new tensor: where it has the shape of
        ``live`` and that is a DTensor, one of the same placements on the same device, of the stored dtype, else
        as :meth:`tensor`. For state that is yet to come into being beside its parameter."""
        entry = self.entry(index)
        held = held_by(live)
        if index in self.targets or held is None or held.shape != entry.shape:
            return self.tensor(index)
        made = sharded_like(live, dtype_named(entry.dtype))
        mine = held_by(made) if made is not None else None
        if made is None or mine is None:
            return self.tensor(index)
        self._fill(index, mine)
        self.used.add(index)
        self.targets[index] = made
        return made

    def copy_all(self) -> None:
        for live, source in self.copies:
            if live.data_ptr() != source.data_ptr() or live.device != source.device:
                copy_into(live, source)

    def _new(self, index: int) -> torch.Tensor:
        entry = self.entry(index)
        made = empty(entry.shape, dtype_named(entry.dtype))
        self._slot(index, _whole_of(entry), made, sharded=False)
        return made

    def _fill(self, index: int, held: Held) -> None:
        """Have the regions that ``held`` has of entry ``index`` read into its pieces."""
        dtype = dtype_named(self.entry(index).dtype)
        for box, piece in zip(held.boxes, held.pieces, strict=True):
            if self._is_fillable(piece) and piece.dtype == dtype:
                self._slot(index, box, piece.detach(), sharded=True)
            else:
                staging = empty(box.lengths, dtype)
                self._slot(index, box, staging, sharded=True)
                self.copies.append((piece, staging))

    def _is_fillable(self, tensor: torch.Tensor) -> bool:
        return not (tensor.is_conj() or tensor.is_neg()) if self.anywhere else is_fillable(tensor)

    def _slot(self, index: int, box: Box, tensor: torch.Tensor, *, sharded: bool) -> None:
        if box.volume:
            self.slots.append(Slot(index, box, tensor, sharded))


def _whole_of(entry: Entry) -> Box:
    """The box of the whole tensor: the entry's very own, where that is it, which is quick to compare with."""
    boxes = entry.boxes
    return boxes[0] if len(boxes) == 1 and boxes[0].lengths == entry.shape else Box.full(entry.shape)


def stored_in(value: Any) -> Iterator[int]:
    """Indices of the entries that ``value``, a checkpoint's value with :class:`StoredTensor` for tensors, holds."""
    if isinstance(value, (StoredTensor, StoredArray)):
        yield value.index
    elif isinstance(value, ObjectState):
        yield from stored_in(value.value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from stored_in(item)
    elif isinstance(value, (list, tuple, collections.deque)):
        for item in value:
            yield from stored_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from stored_in(attributes_of(value))


def sharded_like(live: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """A new DTensor of ``live``'s mesh, placements, shape and device; None where ``live`` is no DTensor."""
    found = sys.modules.get("torch.distributed.tensor")
    if found is None or not isinstance(live, found.DTensor):
        return None
    with torch.no_grad():
        local = live.detach().to_local()
        fresh = torch.empty(local.shape, dtype=dtype, device=local.device)
        made: torch.Tensor = found.DTensor.from_local(
            fresh, live.device_mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride()
        )
    return made


def _unfillable(live: torch.Tensor | Shards) -> tuple[str, str] | None:
    """(kind of difference, text) where nothing can be read into ``live``."""
    if isinstance(live, torch.Tensor) and type(live) in _USUAL and not live.is_meta:  # noqa: SIM102
        if live.layout is torch.strided and live.is_contiguous():
            return None
    if isinstance(live, UninitializedTensorMixin):
        return "uninitialised", "run a forward pass before restoring"
    if isinstance(live, torch.Tensor) and live.is_meta:
        return "meta", "a meta tensor cannot be filled; materialise it first (to_empty)"
    try:
        held = held_by(live)
    except UnsupportedValue as error:
        return "sharding", str(error)
    for piece in held.pieces if held is not None else (live,):
        assert isinstance(piece, torch.Tensor)
        if piece.layout is not torch.strided:
            return "layout", f"the target is {piece.layout}, stored is a dense tensor"
        if overlaps_itself(piece):
            return "overlap", "elements of the target share memory; make it contiguous first"
    return None


def _memory(live: torch.Tensor | Shards, held: Held | None) -> tuple[Any, ...] | None:
    """What identifies the elements that this rank has of ``live``; None where it has none."""
    if held is None:
        return memory_of(live) if isinstance(live, torch.Tensor) else None
    return tuple(map(memory_of, held.pieces)) if any(box.volume for box in held.boxes) else None


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What identifies the elements of ``tensor``; None where it has none."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def checked_allow(allow: Collection[str]) -> frozenset[str]:
    """``allow`` as a set. Raises BadOption for anything but the names in :data:`LOOSENINGS`."""
    found = frozenset({allow} if isinstance(allow, str) else allow)
    if not found <= LOOSENINGS:
        raise BadOption(
            "allow= has an unknown name", found=sorted(found - LOOSENINGS), expected=sorted(LOOSENINGS)
        )
    return found


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
