"""Restoring: compare a checkpoint with a live target, then fill the target in place.

Three steps, of which only the second touches storage::

    plan = plan_restore(target, skeleton, ...)          # compares; changes nothing
    plan.raise_mismatches()
    for entry, view in plan.wanted(): ...               # the caller fills each view with the entry's box
    loosened = plan.finish()                            # copies, load_state_dict, plain values

What is wanted are the regions that the *target* holds, however the checkpoint was sharded. Every difference is
found in the first step and named in one StateMismatch, before any byte is written. Where nothing is to be restored
into, :func:`plan_values` allocates instead. Runs on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs

from ..errors import StateMismatch
from ..format.layout import Entry, Scope
from . import objects
from .codec import Decoder, StateImage
from .fit import Applier, Fitter, refill
from .merge import Saved, Skeleton, selected
from .names import parameter_names
from .plan_base import Extra, Ledger, Phase, Slot, StoredTensor, checked_allow
from .tensors import bytes_of, writable_bytes
from .trainstate import BARE_PART, TrainState

Wanted = list[tuple[Entry, memoryview]]
Fill = Callable[[Wanted], None]

Derive = Callable[[Any], Any]
"""From a part's stored value to the one that this rank gets."""
Reshard = Callable[[list[Any]], Any]
"""From every rank's stored value of a part to the one that this rank gets."""


class _Plan:
    """What to fill. ``targets`` maps an entry's index to the tensor that stands for it in the values."""

    def __init__(self, ledger: Ledger, skeleton: Skeleton) -> None:
        self.targets: dict[int, Any] = ledger.targets
        self.skeleton = skeleton
        self._ledger = ledger
        self._wanted: Wanted | None = None

    def wanted(self) -> Wanted:
        """Each region to fill: as an entry of that one box (or the stored entry, if it is all of that), and its
        bytes, to write to."""
        if self._wanted is None:
            self._wanted = list(map(self._want, self._ledger.slots))
        return self._wanted

    def _want(self, slot: Slot) -> tuple[Entry, memoryview]:
        stored = self._ledger.entry(slot.index)
        view = writable_bytes(slot.tensor)
        assert view is not None, "slots are contiguous CPU tensors"
        scope = Scope.GLOBAL if slot.sharded else stored.scope
        if stored.boxes == (slot.box,) and stored.scope is scope:
            return stored, view
        return structs.replace(
            stored, boxes=(slot.box,), scope=scope, image=None, offset=0, nbytes=view.nbytes
        ), view

    def sources(self) -> list[int]:
        """For each of :meth:`wanted`: the rank of the save whose state image refers to it."""
        return [self.skeleton.ranks[slot.index] for slot in self._ledger.slots]

    def _decoder(self) -> Decoder:
        ledger = self._ledger
        # What the target does not take was not read; it gets as far as the applier, which drops it.
        return ledger.image.decoder(lambda index: ledger.targets.get(index, StoredTensor(index)))


class RestorePlan(_Plan):
    """What to fill, and what happens after. The live tensors' own memory is filled where that is possible, else a
    staging copy. Used once."""

    def __init__(self, ledger: Ledger, skeleton: Skeleton, finish: Callable[[Decoder], None]) -> None:
        super().__init__(ledger, skeleton)
        self._finish = finish

    @property
    def slots(self) -> Sequence[Slot]:
        """The memory to fill, where the plan was made for slots anywhere."""
        return self._ledger.slots

    @property
    def extra(self) -> Sequence[Extra]:
        """What the checkpoint has and this target does not take, until :meth:`settle`."""
        return self._ledger.extra

    @property
    def met(self) -> Collection[str]:
        """Paths at which target and checkpoint both have something."""
        return self._ledger.met

    @property
    def used(self) -> list[Entry]:
        """The entries that this target takes, whether it holds anything of them or not."""
        return [self._ledger.entry(index) for index in sorted(self._ledger.used)]

    def entries_of(self, extra: Extra) -> list[Entry]:
        return [self._ledger.entry(index) for index in sorted(extra.indices)]

    def settle(self, taken: Callable[[Extra], bool] = lambda extra: False) -> None:
        """Make differences of what this target does not take, but for what another rank has ``taken``."""
        self._ledger.settle_extra(taken)

    @property
    def missing(self) -> int:
        """How much of the target the checkpoint lacks, as far as it was looked at."""
        return self._ledger.missing

    def keep_extra(self, places: Collection[str]) -> None:
        """Leave what is unexpected elsewhere than at, or inside of, ``places`` to others."""
        self._ledger.keep_extra(places)

    def differ(self, kind: str, text: str) -> None:
        """Note a difference that was found elsewhere."""
        self._ledger.differ(kind, text)

    def raise_mismatches(self) -> None:
        """StateMismatch with all differences that are not allowed."""
        self._ledger.raise_mismatches()

    def finish(self) -> list[str]:
        """Put everything in place once all slots are full; texts of what was loosened."""
        with torch.no_grad():
            self._ledger.copy_all()
            self._finish(self._decoder())
        return list(self._ledger.loosened)


class ValuesPlan(_Plan):
    """As :class:`RestorePlan`, but nothing live: ``finish()`` gives the values of all parts."""

    def finish(self) -> Any:
        """{part: value}; the value itself where a bare value was saved."""
        decoder = self._decoder()
        values = {part: decoder.value(node) for part, node in self.skeleton.image.parts.items()}
        return values[BARE_PART] if set(values) == {BARE_PART} else values


def plan_restore(
    target: TrainState | Any,
    stored: Skeleton,
    *,
    allow: Collection[str] = (),
    parts: Collection[str] | None = None,
    derive: Mapping[str, Derive] | None = None,
    reshard: Mapping[str, Reshard | None] | None = None,
    anywhere: bool = False,
) -> RestorePlan:
    """Compare ``stored`` with ``target`` (a TrainState, or anything that can be saved) and plan filling it.

    ``parts`` limits both sides to some parts. ``allow`` names what may differ: "missing" (the target keeps
    what it has), "unexpected" (not loaded), "dtype" (cast), "class", "ties", "rng", "ranks", "loader". ``derive``
    makes a part's value of the stored one; ``reshard`` of all ranks' (None: nothing can, a difference). ``anywhere``:
    the caller fills ``slots``, by copies of tensors, on whatever devices the live tensors are, instead of ``wanted``.

    Differences are collected in the plan; settle what is unexpected, then ``raise_mismatches``. Raises Damaged for
    a checkpoint that contradicts itself.
    """
    return _Restore(
        TrainState.of(target), stored, checked_allow(allow), parts, derive or {}, reshard or {}, anywhere
    ).plan()


class _Restore:
    """One comparison of a target with a checkpoint."""

    def __init__(
        self,
        state: TrainState,
        stored: Skeleton,
        allow: frozenset[str],
        parts: Collection[str] | None,
        derive: Mapping[str, Derive],
        reshard: Mapping[str, Reshard | None],
        anywhere: bool,
    ) -> None:
        self._state = state
        self._stored = stored
        self._image = stored.image
        self._derive = derive
        self._reshard = reshard
        self._live = state.live_parts()
        self._all = parts is None
        if parts is not None:
            _check_selection(parts, self._live, self._image)
            self._live = {part: value for part, value in self._live.items() if part in parts}
        self._chosen = [part for part in self._image.parts if parts is None or part in parts]
        self._ledger = Ledger(self._image, stored.entries, allow, anywhere)
        self._fitter = Fitter(self._ledger, parameter_names(state))
        self._appliers: dict[str, Applier] = {}
        self._lists: dict[str, Reshard] = {}

    def plan(self) -> RestorePlan:
        ledger, image = self._ledger, self._image
        placeholders = image.decoder(StoredTensor, keep_types=True)
        for part in self._chosen:
            if part not in self._live:
                text = "a part of the checkpoint that nothing of the target takes"
                ledger.unexpected(part, placeholders.value(image.parts[part]), text)
        for part, value in self._live.items():
            if part not in image.parts:
                ledger.differ("missing", f"{part}: a part of the target that the checkpoint lacks")
                continue
            ledger.met.add(part)
            if part in self._reshard:
                self._plan_list(part, self._reshard[part])
            else:
                self._appliers[part] = self._fitter.part(value, placeholders.value(image.parts[part]), part)
        if self._live and not set(self._live) & set(image.parts):
            ledger.mismatches.append("nothing: no part of the target is in the checkpoint")
        # Whatever the plain values refer to must be read as well, so it gets its place now.
        for index in sorted(self._refs() - ledger.dropped):
            ledger.tensor(index)
        return RestorePlan(ledger, self._stored, self._finish)

    def _plan_list(self, part: str, made: Reshard | None) -> None:
        if made is None:
            self._ledger.differ(
                "loader",
                f"{part}: positions of another number of ranks in the data; divide them anew with "
                "TrainState(reshard_loader=fn), fn(states, rank, world) -> state",
            )
        else:
            self._lists[part] = made

    def _refs(self) -> set[int]:
        found = {index for part in self._appliers for index in self._image.refs(part)}
        for part in self._lists:
            for node in self._stored.each[part]:
                found |= self._image.refs_of(node)
        return found

    def _finish(self, decoder: Decoder) -> None:
        values = {part: decoder.value(self._image.parts[part]) for part in self._appliers}
        for part, apply in self._appliers.items():
            derive = self._derive.get(part)
            self._hold(part, apply(values[part] if derive is None else derive(values[part])))
        for part, reshard in self._lists.items():
            states = [decoder.value(node) for node in self._stored.each[part]]
            live = objects.unwrap(self._live[part])
            made = reshard(states)
            if objects.is_stateful(live):
                self._fitter.later(Phase.OTHERS, live.load_state_dict, made)
            else:
                self._hold(part, refill(live, made))
        self._fitter.load_objects()

    def _hold(self, part: str, made: Any) -> None:
        if made is not self._live[part]:
            self._state.replace(part, made)


def plan_values(
    stored: Skeleton, *, parts: Collection[str] | None = None, keys: Collection[str] | None = None
) -> ValuesPlan:
    """Plan plain values of all parts, or of ``parts``, or of what ``keys`` (patterns over "part/key") select: a new
    CPU tensor for all of every entry that they refer to."""
    chosen = list(stored.image.parts) if parts is None else list(parts)
    _check_selection(chosen, {}, stored.image)
    image = stored.image
    if keys is not None:
        image = selected(image, chosen, [keys] if isinstance(keys, str) else list(keys))
    elif parts is not None:
        image = image.only(chosen)
    ledger = Ledger(image, stored.entries, frozenset())
    for part in image.parts:
        for index in sorted(image.refs(part)):
            ledger.tensor(index)
    return ValuesPlan(ledger, replace(stored, image=image))


def values(
    stored: StateImage, entries: Sequence[Entry], fill: Fill, *, parts: Collection[str] | None = None
) -> Any:
    """The values of one rank's checkpoint, without a template. ``fill`` fills what is wanted."""
    plan = plan_values(Skeleton.of(Saved(0, stored, entries)), parts=parts)
    fill(plan.wanted())
    return plan.finish()


def fill_from(leaves: Sequence[Any]) -> Fill:
    """A ``fill`` that copies from the leaves of a flattened state: restoring without storage. Whole tensors only."""
    found = {(leaf.part, leaf.key): leaf for leaf in leaves}

    def fill(wanted: Wanted) -> None:
        for entry, view in wanted:
            view[:] = bytes_of(found[entry.part, entry.key].tensor)

    return fill


def _check_selection(parts: Collection[str], live: Mapping[str, Any], stored: StateImage) -> None:
    absent = [part for part in parts if part not in stored.parts and part not in live]
    if absent:
        raise StateMismatch(
            f"no part called {', '.join(sorted(absent))}",
            found=sorted(stored.parts),
            parts=sorted(absent),
        )
