"""What became of the flushes: every failure is told on the handle, at the next call and at close."""

from __future__ import annotations

import logging
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection

from .agent.client import Progress
from .agent.values import TierSettings
from .errors import EverstepError, SaveAbandoned, SaveFailed, Superseded, from_wire
from .plan.chains import DELTA, FULL, Kind
from .plan.schedule import Unsaved, parse_every
from .policy import Policy

log = logging.getLogger("everstep")

REMEMBERED_MAX = 1024
"""How many flushes' outcomes are remembered; far above what can be unfinished."""

FINDINGS = ("disagreement", "equal", "noticed")
FINDINGS_MAX = 64
"""Findings that are told; more are in the agent's log."""

PROTECTION = ("peer_failed", "unprotected", "protected", "replicas_differ")
"""What agents say of protection against the loss of nodes."""

TIERS = ("mirrored", "mirror_failing", "mirror_dropped", "staged", "unstaged")
"""What agents say of a further tier; the last two of the node's own."""

DELTAS = ("merged", "unmerged", "unbased")
"""What agents say of deltas."""

FINISHED = ("committed", "failed", "abandoned", "superseded")


class Outcomes:
    """Flushes by step: on their way, durable, or failed and why. Used from the trainer's thread only."""

    def __init__(
        self, policy: Policy, incarnation: int, start: int | None = None, near: TierSettings | None = None
    ) -> None:
        """``start``: the step that the incarnation began from; ``near``: the node's own tier, through which all go."""
        self._policy = policy
        self._incarnation = incarnation
        self._near = near.url if near is not None else None
        self._flushes: OrderedDict[int, Progress | None] = OrderedDict()
        self._attempts: dict[int, int] = {}
        self._asked: dict[int, float] = {}
        self._deltas: set[int] = set()
        self._in_a_row = 0
        self._tiers: dict[int, dict[str, Progress | None]] = {}
        """By step and url, the further tiers that it is owed to."""
        self._dropped_in_a_row: dict[str, int] = {}
        self._trouble: dict[str | None, str] = {}
        """By url of a tier (None: the root) why the last try failed, while none has succeeded since."""
        self._untold: list[EverstepError] = []
        self._findings: OrderedDict[str, None] = OrderedDict()
        """Texts of what the comparison of the ranks found, to be told as warnings."""
        self._told: set[str] = set()
        self.superseded: Superseded | None = None
        self.newest_durable: int | None = None
        self._safe = start, time.monotonic()
        """The newest durable step, as far as this session knows, and when it was asked for."""
        self._run_gone = False
        """Whether there was no run at the root any more, and nothing was committed since."""
        self._announced = False
        """Whether the schedule has heard that the failures are to be raised."""
        bound = parse_every(policy.max_unsaved, "max_unsaved")
        self._unsaved = Unsaved(bound) if bound is not None else None

    def expect(self, step: int, attempt: int, tiers: Collection[str] = (), *, delta: bool = False) -> None:
        """A flush of ``step`` was asked for; verdicts on attempts before ``attempt`` say nothing of it. ``tiers``: urls
        of those that it is owed to then."""
        self._flushes[step] = None
        self._tiers[step] = dict.fromkeys([*tiers, *([self._near] if self._near is not None else [])])
        self._attempts[step] = attempt
        self._asked[step] = time.monotonic()
        (self._deltas.add if delta else self._deltas.discard)(step)
        self._flushes.move_to_end(step)
        while len(self._flushes) > REMEMBERED_MAX:
            oldest, _ = self._flushes.popitem(last=False)
            del self._attempts[oldest], self._asked[oldest], self._tiers[oldest]
            self._deltas.discard(oldest)

    def unfinished(self) -> list[int]:
        return [step for step, last in self._flushes.items() if last is None]

    def holding(self) -> list[int]:
        """Those unfinished ones that still need their slots."""
        return [step for step in self.unfinished() if not self._is_staged(step)]

    def kind(self, step: int) -> Kind:
        """What the flush of ``step`` was asked for as, or has become."""
        return DELTA if step in self._deltas else FULL

    def holding_deltas(self) -> int:
        """How many of those are deltas."""
        return len(self._deltas.intersection(self.holding()))

    def to_give_up(self, *, delta: bool) -> int | None:
        """Which unfinished flush makes way for a new one: the oldest delta, or, but not for a ``delta``, the oldest."""
        holding = self.holding()
        deltas = [step for step in holding if step in self._deltas]
        return next(iter(deltas if deltas or delta else holding), None)

    def _is_staged(self, step: int) -> bool:
        progress = self._tiers[step].get(self._near) if self._near is not None else None
        return progress is not None and progress.stage == "staged"

    def asked(self, step: int) -> bool:
        """Whether a flush of ``step`` is on its way or durable (not: failed)."""
        return step in self._flushes and self.outcome(step)[1] is None

    def owe(self, step: int, tiers: Collection[str]) -> list[str]:
        """The flush of ``step`` goes to these, too; those to which it did not."""
        known = self._tiers.setdefault(step, {})
        more = [url for url in tiers if url not in known]
        known.update(dict.fromkeys(more))
        return more

    def owed(self) -> list[tuple[int, str]]:
        """(step, url) of what has not reached its further tiers."""
        return [
            (step, url)
            for step, tiers in self._tiers.items()
            for url in tiers
            if not self.outcome(step, url)[0]
        ]

    def is_owed(self, step: int, tier: str) -> bool:
        """Whether the flush of ``step`` goes, or went, to the further tier with that url."""
        return tier in self._tiers.get(step, {})

    def note(self, progress: Progress) -> None:
        """Take in one message of the agent."""
        if progress.stage in ("agent_lost", "run_gone"):
            self._note_agent(progress)
            return
        if progress.incarnation != self._incarnation:
            return  # the agent finishes what an earlier incarnation left; its steps may bear the same numbers
        if progress.stage in FINDINGS:
            self._find(progress)
            return
        if progress.stage in PROTECTION:
            self._note_protection(progress)
            return
        if progress.stage in TIERS:
            self._note_tier(progress)
            return
        if progress.stage in DELTAS:
            self._note_delta(progress)
            return
        if progress.stage == "upload_failing":
            self._find_trouble(progress, "it is tried again, from the node's tier")
            return
        if progress.stage == "superseded":
            found = _as_error(progress, Superseded)
            self.superseded = found if isinstance(found, Superseded) else None
        if progress.stage not in FINISHED or progress.step not in self._flushes:
            return
        if self._flushes[progress.step] is not None:
            return
        if progress.stage != "committed" and progress.attempt < self._attempts[progress.step]:
            return
        self._flushes[progress.step] = progress
        if progress.stage == "committed":
            self._became(progress)
            self._in_a_row, self._run_gone = 0, False
            self._trouble.pop(None, None)
            if progress.step >= (self.newest_durable or 0):
                self._safe = progress.step, self._asked[progress.step]
            self.newest_durable = max(progress.step, self.newest_durable or 0)
            log.info("everstep: step %d is durable (%.2f s)", progress.step, progress.seconds)
            return
        error = self.outcome(progress.step)[1]
        assert error is not None
        if progress.stage == "failed":
            self._in_a_row += 1
        log.warning("everstep: step %d did not become durable: %s", progress.step, error)
        self._untold.append(error)
        del self._untold[:-FINDINGS_MAX]

    def _note_agent(self, progress: Progress) -> None:
        """An agent that left because the run was deleted did not die."""
        text = "the agent died and was started anew; unfinished flushes go on from its journal"
        if progress.stage == "run_gone":
            text = str(_as_error(progress, EverstepError))
        if not self._run_gone:
            warnings.warn(f"everstep: {text}", RuntimeWarning, stacklevel=3)
        self._run_gone |= progress.stage == "run_gone"

    def _note_protection(self, progress: Progress) -> None:
        """Told each time: what was repaired can break again."""
        text = f"step {max(progress.step, 0)}: {_as_error(progress, EverstepError)}"
        if progress.stage == "protected":
            log.info("everstep: %s", text)
        elif len(self._findings) < FINDINGS_MAX:
            self._findings[text] = None

    def _note_delta(self, progress: Progress) -> None:
        """Whatever happens to a delta, no checkpoint is lost by it."""
        if progress.stage == "merged":
            self._became(progress)
            log.info("everstep: step %d is a full now", progress.step)
            return
        error = _as_error(progress, EverstepError) if progress.error is not None else None
        if error is not None and not isinstance(error, SaveAbandoned) and len(self._findings) < FINDINGS_MAX:
            self._findings[str(error)] = None

    def _became(self, progress: Progress) -> None:
        """The checkpoint counts, as what it says."""
        if progress.kind == FULL:
            self._deltas.discard(progress.step)

    def _note_tier(self, progress: Progress) -> None:
        """A checkpoint that never gets to a tier counts as a failure; trouble on the way is told. One that the node's
        own tier does not take is no failure: it goes straight to the root."""
        owed = self._tiers.get(progress.step)
        if progress.stage == "mirror_failing":
            self._find_trouble(progress, "it is tried again")
            return
        if owed is None or progress.rank >= 0 or owed.get(progress.tier, progress) is not None:
            return
        owed[progress.tier] = progress
        if progress.stage == "staged":
            log.info("everstep: step %d is durable on this node (%.2f s)", progress.step, progress.seconds)
            return
        if progress.stage == "unstaged":
            self._find_trouble(progress, "the step goes straight to the root")
            return
        if progress.stage == "mirrored":
            self._dropped_in_a_row[progress.tier] = 0
            self._trouble.pop(progress.tier, None)
            log.info("everstep: step %d is durable at %s", progress.step, progress.tier)
            return
        error = _as_error(progress, SaveAbandoned)
        self._dropped_in_a_row[progress.tier] = self._dropped_in_a_row.get(progress.tier, 0) + 1
        log.warning("everstep: %s", error)
        self._untold.append(error)

    def _find_trouble(self, progress: Progress, what_now: str) -> None:
        error = _as_error(progress, EverstepError)
        self._trouble[None if progress.stage == "upload_failing" else progress.tier] = str(error)
        if len(self._findings) < FINDINGS_MAX:
            self._findings[f"{progress.tier}: {error}; {what_now}"] = None

    def _find(self, progress: Progress) -> None:
        """What the ranks' hashes say; the same is told once."""
        error = _as_error(progress, EverstepError)
        about = progress.stage if progress.stage == "noticed" else str(error)
        if about not in self._told and len(self._told) < FINDINGS_MAX:
            self._told.add(about)
            self._findings[str(error)] = None

    def outcome(self, step: int, tier: str | None = None) -> tuple[bool, EverstepError | None]:
        """(finished, error) of a flush; at the further tier with that url, if one is given. A flush that failed is
        owed to none. One that is at the root has passed the node's own tier, whatever was heard of that."""
        progress = self._flushes.get(step)
        if tier is not None and (progress is None or progress.stage == "committed"):
            at = self._tiers.get(step, {}).get(tier)
            progress = at if at is not None or tier != self._near else progress
        if progress is None:
            return False, None
        if progress.stage in ("committed", "mirrored", "staged"):
            return True, None
        if progress.stage == "mirror_dropped":
            return True, _as_error(progress, SaveAbandoned)
        kind = {"abandoned": SaveAbandoned, "superseded": Superseded}.get(progress.stage, SaveFailed)
        return True, _as_error(progress, kind)

    def trouble(self, step: int) -> tuple[str, bool]:
        """What all ranks are to hear at one step, and whether as an error, as rank 0 sees it when it comes to ``step``:
        failures that end training by policy, and that too much would be lost. "" for nothing."""
        if self._untold and self._untold_raises and not self._announced:
            self._announced = True
            return f"failed in a row: {self._in_a_row} flush(es), the last one: {self._untold[-1]}", True
        before, since = self._safe
        if before is None:
            before = step - 1
            self._safe = before, since
        seconds = time.monotonic() - since
        if self._unsaved is None or not self._unsaved.due(step - before, seconds):
            return "", False
        durable = "none" if self.newest_durable is None else f"the newest is step {self.newest_durable}"
        return (
            f"too much would be lost with this machine's memory: {step - before} steps, {seconds:.0f} s "
            f"(durable in this incarnation: {durable}; unfinished flushes: {self.unfinished() or 'none'}; "
            f"max_unsaved={self._policy.max_unsaved!r})",
            self._policy.on_failure == "raise",
        )

    def escalate(self, text: str, fatal: bool) -> None:
        """Tell what the schedule says is to be told now. Raises SaveFailed, or the failure behind it."""
        if fatal:
            untold, self._untold, self._announced = self._untold, [], False
            raise untold[-1] if untold else SaveFailed(text, hint="Earlier checkpoints are untouched")
        warnings.warn(f"everstep: {text}", RuntimeWarning, stacklevel=3)

    @property
    def _untold_raises(self) -> bool:
        limit = self._policy.failures_max
        in_a_row = max([self._in_a_row, *self._dropped_in_a_row.values()])
        return self._policy.on_failure == "raise" or (limit is not None and in_a_row >= limit)

    def tell(self, *, alone: bool = True) -> None:
        """Raise or warn about failures that the caller has not heard of, by policy. Superseded always raises. Not
        ``alone``: other ranks are to raise at the same step, so an error waits for the schedule (:meth:`trouble`)."""
        if self.superseded is not None:
            raise self.superseded
        findings, self._findings = self._findings, OrderedDict()
        for text in findings:
            warnings.warn(f"everstep: {text}", RuntimeWarning, stacklevel=3)
        if not self._untold or (self._untold_raises and not alone):
            return
        untold, self._untold, self._announced = self._untold, [], False
        if self._untold_raises:
            raise untold[-1]
        for error in untold:
            warnings.warn(f"everstep: {error}", RuntimeWarning, stacklevel=3)

    def forget_untold(self, step: int) -> None:
        """The caller hears of this step's failure by another way (its handle)."""
        self._untold = [error for error in self._untold if error.fields.get("step") != step]

    def wait_for_room(self, step: int, timeout_s: float, look: Callable[[float], None]) -> None:
        """Until the flush of ``step`` needs its slot no more."""
        until = time.monotonic() + timeout_s
        while step in self.holding():
            left = until - time.monotonic()
            if left <= 0:
                raise _late(step, timeout_s, "", self._trouble.get(None))
            look(left)

    def wait(
        self, step: int, timeout_s: float, look: Callable[[float], None], tier: str | None = None
    ) -> None:
        """Until the flush of ``step`` is finished, at ``tier`` if one is given (its url); ``look(seconds)`` waits for
        the agent's next message."""
        until = time.monotonic() + timeout_s
        where = "" if tier is None else f" at {tier}"
        while not self.outcome(step, tier)[0]:
            left = until - time.monotonic()
            if left <= 0:
                raise _late(step, timeout_s, where, self._trouble.get(tier))
            look(left)


def _late(step: int, timeout_s: float, where: str, trouble: str | None) -> SaveFailed:
    last = "no try has come to an end so far" if trouble is None else f"the last try failed: {trouble}"
    return SaveFailed(
        f"step {step} did not become durable{where} in time",
        found=f"still on its way after {timeout_s:g} s; {last}",
        hint="It may still arrive; look at the agent's log, or wait again.",
        step=step,
    )


def _as_error(progress: Progress, kind: type[EverstepError]) -> EverstepError:
    """The agent's error as ``kind``, with the step; an error of a subclass keeps its own class."""
    found = (
        from_wire(progress.error) if progress.error else EverstepError(f"step {progress.step} was given up")
    )
    cls = type(found) if issubclass(type(found), kind) else kind
    message = found.message if issubclass(type(found), kind) else f"{type(found).__name__}: {found.message}"
    fields = {**found.fields, "step": progress.step}
    if progress.tier:
        fields["tier"] = progress.tier
    return cls(message, found=found.found, expected=found.expected, hint=found.hint, **fields)
