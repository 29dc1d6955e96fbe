"""What planning a restore collects: mismatches, which tensor each entry fills, and what is to be done
afterwards."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from ..errors import BadOption, Damaged, StateMismatch
from ..format.layout import Entry
from .codec import StateImage
from .tensors import copy_into, dtype_named, empty, is_fillable, overlaps_itself

LOOSENINGS = frozenset({"missing", "unexpected", "dtype", "class", "ties", "rng"})
"""What ``allow`` may hold. Shapes and kinds of values are never loosened."""

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


@dataclass(slots=True)
class Ledger:
    """The growing plan. ``targets`` maps an entry's index to the tensor to fill (the live tensor itself, or a
    contiguous CPU tensor); ``copies`` are (live tensor, index) pairs still to be copied once that is full."""

    image: StateImage
    entries: Sequence[Entry]
    allow: frozenset[str]
    targets: dict[int, torch.Tensor] = field(default_factory=dict)
    copies: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    loosened: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    claims: dict[tuple[Any, ...], int] = field(default_factory=dict)
    claimed: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    matched: int = 0
    """Live tensors that found an entry of their name, and ..."""
    wanted: int = 0
    """... live tensors met."""

    def differ(self, kind: str, text: str) -> None:
        """Note a difference: loosened if ``kind`` is allowed, else part of the error to come."""
        (self.loosened if kind in self.allow else self.mismatches).append(f"{kind}: {text}")

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

    def fits(self, live: torch.Tensor, index: int, where: str) -> bool:
        """Compare a live tensor with its entry; differences are noted. False if it cannot be filled."""
        entry = self.entry(index)
        self.matched += 1
        if isinstance(live, UninitializedTensorMixin):
            self.differ("uninitialised", f"{where}: run a forward pass before restoring")
        elif live.is_meta:
            self.differ("meta", f"{where}: a meta tensor cannot be filled; materialise it first (to_empty)")
        elif tuple(live.shape) != entry.shape:
            self.differ("shape", f"{where}: stored {_shape(entry.shape)}, target {_shape(live.shape)}")
        elif live.layout is not torch.strided:
            self.differ("layout", f"{where}: the target is {live.layout}, stored is a dense tensor")
        elif overlaps_itself(live):
            self.differ("overlap", f"{where}: elements of the target share memory; make it contiguous first")
        else:
            if live.dtype != dtype_named(entry.dtype):
                self.differ(
                    "dtype", f"{where}: stored {entry.dtype}, target {str(live.dtype).removeprefix('torch.')}"
                )
            return True
        return False

    def claim(self, live: torch.Tensor, index: int, where: str) -> None:
        """Have entry ``index`` read into ``live``, if it fits."""
        if not self.fits(live, index, where):
            return
        memory = memory_of(live)
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
        if (
            index not in self.targets
            and is_fillable(live)
            and live.dtype == dtype_named(self.entry(index).dtype)
        ):
            self.targets[index] = live.detach()
        else:
            self.tensor(index)
            self.copies.append((live, index))

    def claim_if_free(self, live: torch.Tensor, index: int) -> bool:
        """Read entry ``index`` into ``live`` if shapes and dtypes agree and nobody else has either."""
        entry = self.entry(index)
        memory = memory_of(live)
        same = tuple(live.shape) == entry.shape and live.dtype == dtype_named(entry.dtype)
        if not same or memory is None or memory in self.claims or index in self.targets:
            return False
        if live.is_meta or live.layout is not torch.strided or overlaps_itself(live):
            return False
        self.claim(live, index, "")
        return True

    def tensor(self, index: int) -> torch.Tensor:
        """What entry ``index`` is read into; a new CPU tensor if nothing has claimed it."""
        found = self.targets.get(index)
        if found is None:
            entry = self.entry(index)
            found = self.targets[index] = empty(entry.shape, dtype_named(entry.dtype))
        return found

    def copy_all(self) -> None:
        for live, index in self.copies:
            source = self.targets[index]
            if live.data_ptr() != source.data_ptr() or live.device != source.device:
                copy_into(live, source)


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What identifies the elements of ``tensor``; None where it has none."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    return (str(tensor.device), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


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
