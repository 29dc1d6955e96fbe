"""Restoring: compare a checkpoint with a live target, then fill the target in place.

Three steps, of which only the second touches storage::

    plan = plan_restore(target, StateImage(data), layout.entries)   # compares; changes nothing
    for index, view in plan.views().items(): ...                    # the caller fills each entry's bytes
    loosened = plan.finish()                                        # copies, load_state_dict, plain values

Every difference is found in the first step and named in one StateMismatch, before any byte is written. Where
nothing is to be restored into, :func:`plan_values` allocates instead. Runs on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..errors import StateMismatch
from ..format.layout import Entry
from .codec import Decoder, StateImage
from .fit import Fitter
from .names import parameter_names
from .plan_base import Ledger, StoredTensor, checked_allow
from .tensors import bytes_of, writable_bytes
from .trainstate import BARE_PART, TrainState

Fill = Callable[[Mapping[int, memoryview]], None]


class RestorePlan:
    """What to fill, and what happens after. ``targets`` maps an entry's index to a contiguous CPU tensor: the
    live one itself where that is possible, else a staging copy of its own. Used once."""

    def __init__(self, ledger: Ledger, finish: Callable[[Decoder], None]) -> None:
        self.targets: dict[int, torch.Tensor] = ledger.targets
        self.loosened: tuple[str, ...] = tuple(ledger.loosened)
        self._ledger = ledger
        self._finish = finish

    def views(self) -> dict[int, memoryview]:
        """The bytes of each target, to write to."""
        return views_of(self.targets)

    def finish(self) -> list[str]:
        """Put everything in place once all targets are full; texts of what was loosened."""
        ledger = self._ledger
        decoder = ledger.image.decoder(ledger.tensor)
        with torch.no_grad():
            ledger.copy_all()
            self._finish(decoder)
        return list(self.loosened)


class ValuesPlan:
    """As :class:`RestorePlan`, but nothing live: ``finish()`` gives the values of all parts."""

    def __init__(self, ledger: Ledger, parts: Sequence[str]) -> None:
        self.targets: dict[int, torch.Tensor] = ledger.targets
        self._ledger = ledger
        self._parts = parts

    def views(self) -> dict[int, memoryview]:
        """The bytes of each target, to write to."""
        return views_of(self.targets)

    def finish(self) -> Any:
        """{part: value}; the value itself where a bare value was saved."""
        decoder = self._ledger.image.decoder(self._ledger.tensor)
        values = {part: decoder.value(self._ledger.image.parts[part]) for part in self._parts}
        return values[BARE_PART] if set(values) == {BARE_PART} else values


def plan_restore(
    target: TrainState | Any,
    stored: StateImage,
    entries: Sequence[Entry],
    *,
    allow: Collection[str] = (),
    parts: Collection[str] | None = None,
) -> RestorePlan:
    """Compare ``stored`` with ``target`` (a TrainState, or anything that can be saved) and plan filling it.

    ``parts`` limits both sides to some parts. ``allow`` names what may differ: "missing" (the target keeps
    what it has), "unexpected" (not loaded), "dtype" (cast), "class", "ties", "rng". Raises StateMismatch with
    all differences, Damaged for a checkpoint that contradicts itself.
    """
    ledger = Ledger(stored, entries, checked_allow(allow))
    state = TrainState.of(target)
    live = state.live_parts()
    if parts is not None:
        _check_selection(parts, live, stored)
        live = {part: value for part, value in live.items() if part in parts}
    wanted = [part for part in stored.parts if parts is None or part in parts]
    placeholders = stored.decoder(StoredTensor, keep_types=True)
    fitter = Fitter(ledger, parameter_names(state))
    appliers: dict[str, Callable[[Any], Any]] = {}
    for part in wanted:
        if part not in live:
            ledger.differ("unexpected", f"{part}: a part of the checkpoint that nothing of the target takes")
    for part, value in live.items():
        if part not in stored.parts:
            ledger.differ("missing", f"{part}: a part of the target that the checkpoint lacks")
            continue
        appliers[part] = fitter.part(value, placeholders.value(stored.parts[part]), part)
    if live and not appliers:
        ledger.mismatches.append("nothing: no part of the target is in the checkpoint")
    ledger.raise_mismatches()
    # Whatever the plain values refer to must be read as well, so it gets its place now.
    for part in appliers:
        for index in sorted(stored.refs(part)):
            ledger.tensor(index)

    def finish(decoder: Decoder) -> None:
        values = {part: decoder.value(stored.parts[part]) for part in appliers}
        for part, apply in appliers.items():
            made = apply(values[part])
            if made is not live[part]:
                state.replace(part, made)
        fitter.load_objects()

    return RestorePlan(ledger, finish)


def plan_values(
    stored: StateImage, entries: Sequence[Entry], *, parts: Collection[str] | None = None
) -> ValuesPlan:
    """Plan plain values of all parts, or of ``parts``: a new CPU tensor for every entry that they refer
    to."""
    ledger = Ledger(stored, entries, frozenset())
    chosen = list(stored.parts) if parts is None else list(parts)
    _check_selection(chosen, {}, stored)
    for part in chosen:
        for index in sorted(stored.refs(part)):
            ledger.tensor(index)
    return ValuesPlan(ledger, chosen)


def values(
    stored: StateImage, entries: Sequence[Entry], fill: Fill, *, parts: Collection[str] | None = None
) -> Any:
    """The values of a checkpoint, without a template. ``fill`` gets {entry index: its bytes, to write to}."""
    plan = plan_values(stored, entries, parts=parts)
    fill(plan.views())
    return plan.finish()


def views_of(targets: Mapping[int, torch.Tensor]) -> dict[int, memoryview]:
    """The writable bytes of tensors that are all contiguous and on the CPU."""
    found: dict[int, memoryview] = {}
    for index, tensor in targets.items():
        view = writable_bytes(tensor)
        assert view is not None, "targets are contiguous CPU tensors"
        found[index] = view
    return found


def fill_from(leaves: Sequence[Any]) -> Fill:
    """A ``fill`` that copies from the leaves of a flattened state: restoring without storage."""

    def fill(targets: Mapping[int, memoryview]) -> None:
        for index, view in targets.items():
            view[:] = bytes_of(leaves[index].tensor)

    return fill


def _check_selection(parts: Collection[str], live: Mapping[str, Any], stored: StateImage) -> None:
    absent = [part for part in parts if part not in stored.parts and part not in live]
    if absent:
        raise StateMismatch(
            f"no part called {', '.join(sorted(absent))}",
            found=sorted(stored.parts),
            parts=sorted(absent),
        )
