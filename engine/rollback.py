"""Going back to an earlier step in a running job: from the snapshot on the devices, if all ranks have that very step
there, else as any load does."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any

from .errors import BadOption, Damaged, EverstepError, StateMismatch
from .loading import Recovery
from .memory.arena import Arena
from .opening import Origin
from .phases import PhaseFailed, Phases
from .ranks import Ranks
from .session import Session
from .snapshot import pinning
from .snapshot.device import DeviceSlot
from .snapshot.estimate import device_bytes
from .snapshot.moving import capturing
from .state.codec import StateImage
from .state.merge import Saved, Skeleton
from .state.restore import RestorePlan, plan_restore
from .state.trainstate import TrainState

log = logging.getLogger("everstep")

REASON_CHARS_MAX = 4096
FORMER_MAX = 4
"""Sessions that were gone back from and whose flushes are still on their way; of more, the oldest is left at once."""


class Rollbacks:
    """What a checkpointer needs to go back: the state that the trainer gave last (for as long as the trainer has it: a
    checkpointer keeps nobody's model alive), room for a snapshot on the devices, and the sessions that it went back
    from, until all of their flushes have ended. Used from the trainer's thread only."""

    def __init__(self, *, device: bool) -> None:
        self.device = DeviceSlot() if device else None
        self._state: weakref.ref[TrainState] | None = None
        self._former: list[Session] = []

    def note(self, given: Any) -> None:
        """The trainer gave this as its state."""
        self._state = weakref.ref(given) if isinstance(given, TrainState) else None

    def state(self, given: Any) -> TrainState:
        """``given``, else the one that is remembered. BadOption where there is neither."""
        if given is not None:
            return TrainState.of(given)
        found = self._state() if self._state is not None else None
        if found is None:
            raise BadOption(
                "rollback() does not know what to restore",
                found="no TrainState that was given to load, step or save before, and still exists",
                hint="Pass rollback(..., state=...)",
            )
        return found

    def reserve(self, state: TrainState, arena: Arena) -> None:
        """Room on the devices, once, for what the state is and will be, and the arena pinned for copies from them.
        MemoryTooSmall."""
        missing = self.device is not None and not self.device.nbytes and not self.device.given_up
        pieces = state.pieces() if missing or pinning.in_use() else []
        if self.device is not None and missing:
            self.device.reserve(device_bytes(pieces, state.optimizers()))
        if any(piece.is_cuda for piece in pieces):
            arena.await_reserved()
            pinning.pin(arena)

    def restore(
        self,
        ranks: Ranks,
        session: Session | None,
        state: TrainState,
        step: int | None,
        reason: str,
        *,
        origin: Origin,
        allow: Collection[str],
        load: Callable[[int | None], Recovery],
        timeout_s: float,
    ) -> Recovery:
        """``state`` as of ``step``, from the devices, else by ``load``; and the end of ``session``. All ranks get the
        same, or all fail; then the session goes on."""
        agree(ranks, step, reason, timeout_s=timeout_s)
        counting: set[Any] = {origin.adopted}
        if session is not None:
            session.settle_quietly()
            counting.add(session.incarnation)
        elif step is None and origin.reason is not None:
            step = origin.step  # where an earlier rollback went, nothing having followed it
        found = from_device(
            ranks, self.device, state, step, counting=counting, allow=allow, timeout_s=timeout_s
        )
        found = found or load(step)
        if self.device is not None and self.device.key != (found.incarnation, found.step):
            self.device.forget()
        if session is not None:
            session.retire(found.step, reason)
            self._former.append(session)
            while len(self._former) > FORMER_MAX:
                self._former.pop(0).leave()
        return found

    def leave_former(self) -> None:
        """Take leave of the former sessions that have nothing left to do."""
        busy = [former for former in self._former if former.is_busy()]
        for former in self._former:
            if former not in busy:
                former.leave()
        self._former = busy

    def close(self, unmark: Callable[[str], None]) -> None:
        """The end, after the present session's. ``unmark`` takes an incarnation's id."""
        with contextlib.ExitStack() as stack:
            if self.device is not None:
                stack.callback(self.device.close)
            for former in self._former:
                stack.callback(unmark, former.record_id)
                stack.callback(former.leave)
            self._former = []


def agree(ranks: Ranks, step: int | None, reason: str, *, timeout_s: float) -> None:
    """All ranks mean the same. Raises BadOption on all of them."""
    if not isinstance(reason, str) or not reason.strip() or len(reason) > REASON_CHARS_MAX:
        reason = ""
    told = ranks.agree("rolling back", [step, reason], timeout_s=timeout_s)
    if not all(why for _, why in told):
        raise BadOption(
            "rollback(reason=) must say why", expected=f"a text of at most {REASON_CHARS_MAX} characters"
        )
    if any(other != told[0] for other in told):
        raise BadOption(
            "the ranks want to go back to different steps, or for different reasons",
            found={rank: tuple(one) for rank, one in enumerate(told)},
            expected="the same call on all ranks",
        )
    if capturing():
        raise BadOption("rollback() while a CUDA graph is captured", expected="a call outside of the capture")


def from_device(
    ranks: Ranks,
    device: DeviceSlot | None,
    state: TrainState,
    step: int | None,
    *,
    counting: Collection[Any],
    allow: Collection[str],
    timeout_s: float,
) -> Recovery | None:
    """``state`` restored from the snapshot on the devices; None, with nothing changed, unless all ranks hold the same
    one there, of ``step`` if that is given, and it fits. ``counting``: the snapshots, and the incarnations all of whose
    snapshots, may be gone back to.

    Raises what goes wrong while it is written, on all ranks; the contents of ``state`` are undefined then.
    """
    began = time.monotonic()
    mine = device.key if device is not None else None
    if mine is not None and mine not in counting and mine[0] not in counting:
        mine = None
    told = ranks.agree("looking for a snapshot on the devices", mine, timeout_s=timeout_s)
    if device is None or mine is None or any(tuple(other or ()) != mine for other in told):
        return None
    if step is not None and mine[1] != step:
        return None
    what = f"rolling back to step {mine[1]}"
    phases = Phases(ranks, what, timeout_s=timeout_s)
    try:
        plan = phases.each(lambda: _compare(device, state, ranks.rank, allow))
    except PhaseFailed as failed:
        if not all(isinstance(error, (StateMismatch, Damaged)) for error in failed.errors.values()):
            raise ranks.verdict(what, failed.errors) from None
        log.warning("everstep: the snapshot on the devices does not fit: %s", _told(failed.errors))
        return None
    try:
        nbytes, loosened = phases.each(lambda: (device.restore(plan.slots), tuple(plan.finish())))
    except PhaseFailed as failed:
        raise ranks.verdict(what, failed.errors) from None
    return Recovery(
        step=mine[1],
        incarnation=mine[0],
        tier="device",
        seconds=time.monotonic() - began,
        nbytes=nbytes,
        loosened=loosened,
        config_changes={},
    )


def _compare(device: DeviceSlot, state: TrainState, rank: int, allow: Collection[str]) -> RestorePlan:
    image = StateImage(device.state, name=f"state image of rank {rank}")
    skeleton = Skeleton.of(Saved(rank, image, device.plan.layout.entries))
    plan = plan_restore(state, skeleton, allow=allow, anywhere=True)
    plan.settle()
    plan.raise_mismatches()
    device.check(plan.slots)
    return plan


def _told(errors: dict[int, EverstepError]) -> str:
    return "; ".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items()))
