"""Taking snapshots: flatten the state, plan its layout, copy it into a slot, at once or behind the next step.

A late copy runs behind the next forward and backward. It takes only tensors that a torch optimizer owns (its
parameters and their state), and the optimizer's next step waits for it. It is used only after an interval in
which every optimizer's hook was seen to fire, for without the hook nothing would wait. With room for a snapshot on the
devices, everything is copied there at once, and moved into the slot from there: nothing live is read later, so no
hook is needed.
"""

from __future__ import annotations

import contextlib
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .errors import EverstepError, MemoryTooSmall, StateMismatch, UsageError
from .memory.arena import Arena
from .memory.slots import WriteSlot
from .memorytier import MemoryTier
from .planning import LayoutPlanner
from .ranks import Ranks
from .snapshot.copier import Copier, Plan
from .snapshot.device import DeviceSlot
from .snapshot.late import Drain, LateCopy, LateCopyTimeout
from .snapshot.moving import capturing
from .snapshot.pinning import in_use, pin
from .snapshot.views import no_collection
from .state.steady import Steady
from .state.trainstate import TrainState
from .state.tree import FlatState


class Taken:
    """One snapshot: being copied, whole, or void because tensors moved under the copy."""

    def __init__(self, step: int, slot: WriteSlot) -> None:
        self.step = step
        self.slot = slot.index
        self.generation = slot.generation
        self.whole = False
        self.moved: list[str] = []


class Prepared:
    """What a snapshot has to know of a state's structure. Most of it is found out when it is first needed, and stays:
    with :meth:`of` that is done before there is a snapshot to wait for."""

    def __init__(self, ranks: Ranks, nodes: Sequence[str], holders: Sequence[Sequence[int]]) -> None:
        """``nodes`` (of all ranks) and ``holders``: see :class:`~.plan.owners.Owners`."""
        self.recipes = Steady()
        self.copier = Copier()
        self.planner = LayoutPlanner(ranks.rank, ranks.world, node_of=nodes, holders=holders)

    @classmethod
    def of(
        cls,
        state: TrainState,
        arena: Arena,
        ranks: Ranks,
        nodes: Sequence[str],
        holders: Sequence[Sequence[int]],
    ) -> Prepared:
        """For a first snapshot into ``arena``, should ``state`` have the structure then that it has now."""
        found = cls(ranks, nodes, holders)
        # What cannot be stored, or has no room, is told by the snapshot: it may be another state by then.
        with contextlib.suppress(EverstepError), no_collection():
            found.copier.prepare(arena, found.planner.guess(state.flatten(found.recipes)))
        return found


class Snapshots:
    """One rank's snapshots. Used from the trainer's thread only; the hooks run on it too."""

    def __init__(
        self,
        tier: MemoryTier,
        ranks: Ranks,
        *,
        overlap: bool,
        settled: Callable[[], None],
        nodes: Sequence[str],
        holders: Sequence[Sequence[int]],
        device: DeviceSlot | None = None,
    ) -> None:
        """``settled`` is called when a late copy has ended, well or not. ``device``: room for a snapshot beside the
        tensors; it stays the caller's. ``nodes`` (of all ranks) and ``holders``: see
        :class:`~.plan.owners.Owners`."""
        self._tier = tier
        ready, tier.prepared = tier.prepared, None
        if not isinstance(ready, Prepared):
            ready = Prepared(ranks, nodes, holders)
        self._copier, self._recipes, self._planner = ready.copier, ready.recipes, ready.planner
        self._settled = settled
        self._device = device if device is not None and not device.given_up else None
        self._hooks = Hooks(self._before_optimizer) if overlap and self._device is None else None
        self._copying: tuple[Taken, WriteSlot, LateCopy | Drain, str] | None = None
        self._hook_timeout_s = 0.0
        self.newest: Taken | None = None
        self.moved_arena = False
        """Set when the arena was replaced by a larger one: the agent has to be told."""
        self.waited_s = 0.0
        """Seconds that optimizer hooks waited for late copies, all together."""

    def replan(self) -> None:
        """Find owners of replicated entries anew at the next snapshot."""
        self._planner.forget()

    def holds(self, step: int) -> bool:
        return self.newest is not None and self.newest.step == step

    def take(
        self,
        step: int,
        state: TrainState,
        meta: Callable[[FlatState, Plan], bytes],
        *,
        late: bool,
        timeout_s: float,
        waiting: Callable[[], None],
        proved: Callable[[], None],
    ) -> None:
        """Snapshot ``state`` as ``step``. With ``late`` some of it may be copied after this returns. ``meta`` makes
        the meta region of the flattened state and its plan. The snapshot counts once ``proved`` has returned: what that
        waits for goes on beside the copy.

        Raises UnsupportedValue before anything is touched, CapacityError if no slot becomes free in time, UsageError
        while a CUDA graph is captured.
        """
        if capturing():
            raise UsageError(
                "a snapshot was asked for while a CUDA graph is captured",
                expected="step() and save() outside of the capture",
                step=step,
            )
        self.settle(timeout_s)
        with no_collection():
            self._take(step, state, meta, late, timeout_s, waiting, proved)

    def _take(
        self,
        step: int,
        state: TrainState,
        meta: Callable[[FlatState, Plan], bytes],
        late: bool,
        timeout_s: float,
        waiting: Callable[[], None],
        proved: Callable[[], None],
    ) -> None:
        flat = state.flatten(self._recipes)
        plan = self._planner.plan(flat)
        late_leaves = self._late_leaves(flat, state) if late else frozenset()
        meta_bytes = meta(flat, plan)
        need = sum(-(-size // 4096) * 4096 for _, size in plan.regions(len(flat.state), len(meta_bytes)))
        arena = self._tier.arena
        slot = self._tier.begin(step, need, timeout_s=timeout_s, waiting=waiting)
        if self._tier.arena is not arena:
            self._copier.forget()
            self.moved_arena = True
        if in_use() and any(piece.is_cuda for leaf in flat.leaves for piece in leaf.pieces):
            pin(self._tier.arena)  # it may have been replaced, or the tensors moved
        taken = Taken(step, slot)
        if late_leaves or self._device is not None:
            self._tier.drop_outgrown()  # not beside the copy: its thread would take the interpreter from us
        try:
            if late_leaves or self._device is not None:
                proved()  # what is copied behind the step publishes the slot itself
            copying: LateCopy | Drain | None = self._beside(slot, plan, flat, meta_bytes)
            if copying is None:
                copying = self._copier.copy(
                    slot,
                    plan,
                    flat.sources(),
                    state=flat.state,
                    meta=meta_bytes,
                    late=late_leaves,
                    addresses=flat.addresses,
                )
            proved()
        except BaseException:
            slot.abandon()
            raise
        self.newest = taken
        if copying is None:
            slot.publish(plan.layout_hash)
            taken.whole = True
        else:
            self._hook_timeout_s = timeout_s
            self._copying = (taken, slot, copying, plan.layout_hash)

    def _beside(self, slot: WriteSlot, plan: Plan, flat: FlatState, meta: bytes) -> Drain | None:
        """A snapshot on the devices, on its way into ``slot``; None where there is no room for one."""
        if self._device is None:
            return None
        try:
            self._device.take((slot.incarnation, slot.step), plan, flat.leaves, flat.state)
        except MemoryTooSmall as error:
            self._device.give_up()
            self._device = None
            warnings.warn(
                f"everstep: {error}. Snapshots go straight to the host from now on.",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        places = self._copier.lay_around(slot, plan, state=flat.state, meta=meta)
        return self._device.drain(slot, plan, places)

    def look(self) -> None:
        """Note a copy that has ended, where nothing live has to be looked at any more; never waits."""
        copying = self._copying[2] if self._copying is not None else None
        if copying is not None and copying.done() and (isinstance(copying, Drain) or copying.held):
            self.settle(0)

    def settle(self, timeout_s: float) -> None:
        """Wait for a late copy, and publish its snapshot if nothing moved under it."""
        if self._copying is None:
            return
        taken, slot, copying, layout_hash = self._copying
        try:
            moved = copying.wait(timeout_s)
        except LateCopyTimeout:
            raise
        except BaseException:
            self._lost(taken, slot)
            raise
        self._copying = None
        if moved:
            taken.moved = moved
            self._lost(taken, slot)
            raise StateMismatch(
                f"the snapshot of step {taken.step} is void: tensors changed while they were copied",
                found=", ".join(moved[:5]) + (f" and {len(moved) - 5} more" if len(moved) > 5 else ""),
                expected="no change of parameters and optimizer state before the next optimizer.step()",
                hint='Use Memory(copy="eager"), or make the change after the optimizer step.',
                step=taken.step,
            )
        if slot.open:
            slot.publish(layout_hash)
        taken.whole = True
        self._settled()

    def _lost(self, taken: Taken, slot: WriteSlot) -> None:
        """The copy of ``taken`` came to nothing."""
        self._copying = None
        taken.moved = taken.moved or ["the copy failed"]
        slot.abandon()
        if self.newest is taken:
            self.newest = None
        self._settled()

    def drop_outgrown(self) -> None:
        """After a snapshot: see :meth:`.MemoryTier.drop_outgrown`. Before a late copy began that was done."""
        if self._copying is None:
            self._tier.drop_outgrown()

    def discard(self) -> bool:
        """Give up the newest snapshot, so that its step can be taken again; whether it is gone (nobody reads it)."""
        newest = self.newest
        if newest is None or not newest.whole:
            return False
        if not self._tier.arena.discard(newest.slot, newest.generation):
            return False
        self.newest = None
        return True

    def close(self) -> None:
        """Drop a running copy and the hooks."""
        if self._copying is not None:
            _, slot, copying, _ = self._copying
            copying.cancel()
            slot.abandon()
            self._copying = None
        if self._hooks is not None:
            self._hooks.remove()
        self._copier.forget()

    def _late_leaves(self, flat: FlatState, state: TrainState) -> frozenset[int]:
        """Entries that may be copied late: none before the hooks were seen to fire."""
        if self._hooks is None or not self._hooks.ready(state.optimizers()):
            return frozenset()
        return self._recipes.late(flat.by, lambda: frozenset(state.late_tensors(flat.leaves)))

    def _before_optimizer(self) -> None:
        began = time.perf_counter()
        copying = self._copying[2] if self._copying is not None else None
        # A captured step is replayed without hooks: what is copied now is waited for here, and nothing late again.
        if not isinstance(copying, LateCopy) or capturing() or not copying.hold(self._hook_timeout_s):
            self.settle(self._hook_timeout_s)
        self.waited_s += time.perf_counter() - began


class Hooks:
    """Pre-step hooks of optimizers, and whether each was seen to fire since it was set. One that fired while a CUDA
    graph was captured will not fire when that is replayed: nothing is ready after that."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        self._handles: dict[int, Any] = {}
        self._fired: set[int] = set()
        self._captured = False
        self._alive: dict[int, weakref.ref[torch.optim.Optimizer]] = {}

    def ready(self, optimizers: list[torch.optim.Optimizer]) -> bool:
        """Whether every optimizer's hook has fired; sets those that are missing."""
        for optimizer in optimizers:
            key = id(optimizer)
            known = self._alive.get(key)
            if known is None or known() is not optimizer:
                self._fired.discard(key)
                self._alive[key] = weakref.ref(optimizer)
                self._handles[key] = optimizer.register_step_pre_hook(self._make(key))
        if not optimizers:
            warnings.warn(
                'everstep: Memory(copy="overlap") needs a torch optimizer in the state; copies are eager',
                RuntimeWarning,
                stacklevel=2,
            )
        if self._captured:
            return False
        return bool(optimizers) and all(id(optimizer) in self._fired for optimizer in optimizers)

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _make(self, key: int) -> Callable[..., None]:
        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            self._fired.add(key)
            self._captured = self._captured or capturing()
            self._before()

        return hook
