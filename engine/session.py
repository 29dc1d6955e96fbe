"""One incarnation being written by this rank: the schedule, snapshots, flushes, and what became of them."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from .agent.client import AgentClient, Progress
from .auditing import Auditor
from .config import plain_metrics
from .connecting import adopted_of
from .decisions import Decisions
from .describing import describe
from .errors import (
    AgentError,
    BadOption,
    EverstepError,
    RankError,
    ReplicasDiffer,
    SaveFailed,
    StepOrder,
    StorageFull,
)
from .format.records import IncarnationRecord, RunRecord
from .guarding import Protection, begin_protection
from .handles import SaveHandle
from .heartbeat import Heartbeat
from .memory.control import Purpose
from .memory.slots import Pinned
from .memorytier import MemoryTier
from .outcomes import FINISHED, Outcomes
from .places import Place
from .plan.chains import DELTA, FULL, Chains, Kind
from .plan.schedule import Decision
from .policy import Policy
from .ranks import Ranks
from .snapshot.copier import Plan
from .snapshot.device import DeviceSlot
from .snapshots import Snapshots, Taken
from .state.trainstate import TrainState
from .state.tree import FlatState

log = logging.getLogger("everstep")

GOODBYE_TIMEOUT_S = 30.0

KEPT = "What lies in memory stays there: a restart resumes from the newest step that all ranks have."


class Session:
    """Used from the trainer's thread only. Every rank of the job has one and makes the same calls."""

    _line: AgentClient | None = None
    """To the agent, once the run is open."""
    _failed: BaseException | None = None
    """Why it could not be opened."""

    def __init__(
        self,
        place: Place,
        ranks: Ranks,
        policy: Policy,
        tier: MemoryTier,
        run: RunRecord,
        record: IncarnationRecord,
        *,
        join: Callable[[], AgentClient],
        protection: Protection | None,
        slots: int,
        overlap: bool,
        memory: bool,
        nodes: Sequence[str],
        holders: Sequence[Sequence[int]],
        device: DeviceSlot | None = None,
        chains: Chains | None = None,
    ) -> None:
        """``join`` ends the opening of the run on all ranks and gives the line to the agent; :meth:`joined` calls it.
        ``nodes`` of all ranks, and by node those that keep its snapshots (:class:`~.plan.owners.Owners`).
        ``device``: room for a snapshot beside the tensors. ``chains``: of the checkpoints that are durable already."""
        self._memory = memory
        self._ranks = ranks
        self._policy = policy
        self._tier = tier
        tier.lead = 1 if overlap or device is not None else 0
        self._record = record
        adopted = adopted_of(record)
        tier.open(run_id=run.run_id, incarnation=record.number, adopted=adopted, world=ranks.world)
        self._join, self._protection, self._chunk_bytes = join, protection, run.chunk_bytes
        self._unfinished_max = max(1, slots - 2)
        start = adopted[1] if adopted else -1
        self.outcomes = Outcomes(policy, record.number, adopted[1] if adopted else None, place.near)
        self._urls = {tier.name: tier.url for tier in place.tiers}
        self._shared = [tier.name for tier in place.shares]
        self._decisions = self._scheduled(place, start, chains)
        send = self._send_pending
        self._snapshots = Snapshots(
            tier, ranks, overlap=overlap, settled=send, nodes=nodes, holders=holders, device=device
        )
        self._auditor = Auditor(ranks.rank, ranks.world, policy, max(map(len, holders), default=0))
        self._pending: Taken | None = None
        self._pending_tiers: list[str] = []
        self._pending_as: Decision | None = None
        """What that flush is to be; None: a full."""
        self._delta: int | None = None
        """The last step that was asked for as a delta."""
        self._pins: dict[int, Pinned] = {}
        """Slots whose flush was asked for: the agent pins a slot only when it comes to the request, and a new one
        has to find what a killed one was writing."""
        self._wait_s: float | None = None
        """How long training waits for an agent that protects it; None: it is not to be protected."""
        self._told = -1
        """The newest step of which the agent was told that it is there."""
        self._agent_missed: float | None = None
        self._ended = False
        self._last_step = start
        self._heartbeat = Heartbeat(lambda: tier.present, record.number, interval_s=policy.heartbeat_s)

    @property
    def incarnation(self) -> int:
        return self._record.number

    @property
    def record_id(self) -> str:
        """The incarnation's random id."""
        return self._record.id

    @property
    def agent_pid(self) -> int | None:
        return self._client.agent_pid

    @property
    def _client(self) -> AgentClient:
        self.joined()
        assert self._line is not None
        return self._line

    def joined(self) -> None:
        """Returns when the run is open on all ranks, and protected against the loss of nodes if that was asked for; at
        the latest before the first snapshot counts. A failure stays one: whatever calls this again raises it, and the
        session is to be dropped."""
        if self._failed is not None:
            raise self._failed
        if self._line is not None:
            return
        try:
            self._line = self._join()
            if self._protection is not None and self._protection.wanted:
                self._protect(self._protection)
        except BaseException as error:
            self._failed = error
            raise

    def _protect(self, wish: Protection) -> None:
        assert self._line is not None
        begin_protection(
            wish,
            self._ranks,
            self._line,
            self._tier,
            self._policy,
            incarnation=self._record.number,
            chunk_bytes=self._chunk_bytes,
        )
        self._wait_s = wish.timeout_s(self._policy)

    def drop(self) -> None:
        """The end of one that could not be joined: nothing was published, or asked for."""
        self._failed = None
        if self._line is not None:
            self.close(flush=False)
            return
        self._ended = True
        self._heartbeat.close()
        self._snapshots.close()

    # -- the trainer's calls

    def step(self, step: int, state: TrainState, metrics: Mapping[str, Any] | None) -> SaveHandle | None:
        """What the schedule says for ``step``."""
        self._heartbeat.called()
        self.hear(alone=self._ranks.world == 1)
        self._check_order(step, again=False)
        decision = self._decisions.of(
            step,
            lambda: len(self.outcomes.holding()),
            trouble=self.outcomes.trouble,
            deltas=self.outcomes.holding_deltas,
        )
        if decision.trouble:
            self._decisions.told(step)
            self.outcomes.escalate(decision.trouble, decision.fatal)
        if decision.supersede or decision.wait:
            self._make_way(decision)
        if decision.flush or (decision.snapshot and self._memory):
            self._snapshot(step, state, metrics, late=True, flush=decision.flush)
        self._passed(step)
        return self._flush(step, decision.tiers, decision) if decision.flush else None

    def save(self, step: int, state: TrainState, metrics: Mapping[str, Any] | None) -> SaveHandle:
        """A full checkpoint of ``step``, whatever the schedule says; of the snapshot that is there, if it is of
        this very step."""
        self._heartbeat.called()
        self.hear()
        self._check_order(step, again=True)
        newest = self._snapshots.newest
        if newest is None or newest.step != step or self._is_refused(step):
            self._snapshot(step, state, metrics, late=False, flush=True)
        self._last_step = step
        self._heartbeat.stepped(step)
        self._settle()  # the agent is to begin now, whether or not another call follows soon
        return self._flush(step, self._shared, full=True)

    def _is_refused(self, step: int) -> bool:
        """Whether the snapshot of ``step`` was refused for its bytes; it is gone then, to be taken anew."""
        return isinstance(self.outcomes.outcome(step)[1], ReplicasDiffer) and self._snapshots.discard()

    def save_adopted(self, state: TrainState) -> None:
        """Take what was loaded, unchanged, as this incarnation's snapshot of that very step: close flushes it."""
        if self._snapshots.newest is None and self._last_step >= 0:
            self._snapshot(self._last_step, state, None, late=False, flush=True)

    def hear(self, *, alone: bool = True) -> None:
        """Take in what the agent said; tell the caller of failures it has not heard of (see :meth:`.Outcomes.tell`)."""
        self._send_pending()
        self._hear_quietly()
        self.outcomes.tell(alone=alone)

    def outcome(self, step: int, tier: str | None = None) -> tuple[bool, Any]:
        url = self._url(step, tier)
        if not self._ended:
            self._send_pending()
            self._hear_quietly()
        return self.outcomes.outcome(step, url)

    def kind(self, step: int) -> Kind:
        """For handles: what the checkpoint of ``step`` is, as far as was heard."""
        return self.outcomes.kind(step)

    def _url(self, step: int, tier: str | None) -> str | None:
        """Of the further tier of that name. BadOption where there is none, or the step does not go there."""
        if tier is None:
            return None
        url = self._urls.get(tier)
        if url is None or not self.outcomes.is_owed(step, url):
            raise BadOption(
                f"step {step} does not go to tier {tier!r}",
                found=tier,
                expected=[name for name, one in self._urls.items() if self.outcomes.is_owed(step, one)]
                or None,
                hint="save() goes to all tiers, step() to those whose every= says so",
            )
        return url

    def wait_durable(self, step: int, timeout_s: float | None, tier: str | None = None) -> None:
        """For handles: returns when ``step`` is durable, raises why it will not be."""
        url = self._url(step, tier)
        self._settle()
        self.outcomes.forget_untold(step)
        seconds = self._policy.close_timeout_s if timeout_s is None else timeout_s
        self.outcomes.wait(step, seconds, self._look, url)
        self.outcomes.forget_untold(step)
        error = self.outcomes.outcome(step, url)[1]
        if error is not None:
            raise error

    def status(self) -> dict[str, Any]:
        complete, protected = self._tier.complete(), self._tier.arena.protected
        try:
            agent = self._client.status()
        except (
            AgentError
        ) as error:  # who only looks must not fail because the agent is slow, or is just being started
            agent = {"error": str(error)}
        return {
            "incarnation": self._record.number,
            "newest_complete_in_memory": complete[1] if complete else None,
            "newest_protected": protected[1] if protected and protected[0] == self._record.number else None,
            "guarded": self._tier.guarded,
            "newest_durable": self.outcomes.newest_durable,
            "unfinished": self.outcomes.unfinished(),
            "tiers": agent.get("tiers", []),
            "peers": agent.get("guard"),
            "agent": agent,
        }

    def close(self, *, flush: bool, keep: bool = False) -> None:
        """Make the newest snapshot durable (``flush``), say good-bye, let go of the arena. Raises what went wrong;
        the arena then stays, and so does what it holds. ``keep``: it stays anyhow."""
        safe = False
        try:
            if flush:
                self._make_durable()
                safe = True
            else:
                self._settle()
        except (SaveFailed, StorageFull, RankError, AgentError) as error:
            if self._memory and self._tier.is_shared:
                error.hint = f"{error.hint.rstrip('.')}. {KEPT}" if error.hint else KEPT
            raise
        finally:
            self._ended = True
            with contextlib.ExitStack() as stack:
                stack.callback(self._tier.close, remove=safe and not keep)
                stack.callback(self._heartbeat.close)
                stack.callback(self._client.close)
                stack.callback(self._goodbye, flush, safe and not keep)
                stack.callback(self._snapshots.close)
                stack.callback(self._pins.clear)

    def _make_durable(self) -> None:
        """The newest snapshot, and what is on its way. Raises what went wrong, a failure of the newest first."""
        until = time.monotonic() + self._policy.close_timeout_s
        self._settle()
        newest = self._snapshots.newest
        if newest is not None:
            self._flush(newest.step, self._shared)
        for step in self.outcomes.unfinished():
            self.outcomes.wait(step, until - time.monotonic(), self._look)
        if newest is not None:
            self.wait_durable(newest.step, until - time.monotonic())
        if self._client.is_inline:  # a process goes on with it; this one ends with us
            for step, url in self.outcomes.owed():
                self.outcomes.wait(step, until - time.monotonic(), self._look, url)
        self.outcomes.tell()

    def _goodbye(self, flush: bool, safe: bool) -> None:
        """Whatever is not durable by now was told; the agent's complaint would hide it."""
        try:
            timeout_s = min(GOODBYE_TIMEOUT_S, self._policy.close_timeout_s)
            self._client.bye(timeout_s=timeout_s, flush=flush, safe=safe)
        except EverstepError as error:
            log.warning("everstep: leaving the agent: %s", error)

    # -- going back

    def settle_quietly(self) -> None:
        """End a copy that is under way; one that comes to nothing is no matter to whoever goes back."""
        try:
            self._settle()
        except (EverstepError, RuntimeError) as error:
            log.warning("everstep: the newest snapshot came to nothing: %s", error)

    def retire(self, step: int, reason: str) -> None:
        """The job goes on from ``step``, in another incarnation: what is later is given up, and what is on its way up
        to there goes on. Handles keep working. Until the other incarnation is there, this one's trainer counts as one
        that is at work."""
        self._snapshots.close()
        self._wait_s = None
        pending, self._pending = self._pending, None
        if pending is not None and pending.whole and pending.step <= step:
            self._pending = pending
            self._send_pending()
        for later in self.outcomes.unfinished():
            if later > step:
                self._client.give_up(later, f"rank {self._ranks.rank} went back to step {step}: {reason}")
        for later in [later for later in self._pins if later > step]:
            self._pins.pop(later).release()

    def is_busy(self) -> bool:
        """Whether a retired session's flushes are still on their way. Asked once the next session is there, which gives
        the rank's signs of life from then on."""
        self._heartbeat.close()
        try:
            self._hear_quietly()
        except EverstepError as error:
            log.warning("everstep: incarnation %d: %s", self._record.number, error)
            return False
        return bool(self.outcomes.unfinished())

    def leave(self) -> None:
        """The end of a retired session. What is on its way has a while; a process agent then goes on with it."""
        if not self._ended:
            self._ended = True
            self._heartbeat.close()
            self._pins.clear()
            self._goodbye(flush=True, safe=False)
            self._client.close()

    # -- inner parts

    def _passed(self, step: int) -> None:
        self._last_step = step
        self._heartbeat.stepped(step)
        self._decisions.passed(step)

    def _make_way(self, decision: Decision) -> None:
        """Before a flush for which there is no room: wait until there is, or give up the oldest unfinished one."""
        self._settle()
        give_up = decision.supersede
        oldest = self.outcomes.to_give_up(delta=decision.kind == DELTA)
        if give_up and oldest is not None:
            self._client.give_up(oldest, f"superseded by the flush of step {decision.step}")
        while not give_up and len(holding := self.outcomes.holding()) >= self._unfinished_max:
            self.outcomes.wait_for_room(holding[0], self._policy.close_timeout_s, self._look)

    def _settle(self) -> None:
        """End a late copy. Raises StateMismatch if it is void."""
        self._snapshots.settle(self._policy.slot_timeout_s)

    def _snapshot(
        self, step: int, state: TrainState, metrics: Mapping[str, Any] | None, *, late: bool, flush: bool
    ) -> None:
        self._settle()
        if flush:
            self._auditor.begin(step)  # before anything can fail here and not elsewhere

        def meta(flat: FlatState, plan: Plan) -> bytes:
            compared = self._auditor.meta(step, flat, plan, flush=flush)
            return describe(state, self._record, self._ranks.rank, facts, compared)

        try:
            facts = plain_metrics(metrics)
            self._snapshots.take(
                step,
                state,
                meta,
                late=late,
                timeout_s=self._policy.slot_timeout_s,
                waiting=self._wait_for_slot,
                proved=self.joined,
            )
        except BaseException as error:
            # The other ranks ask for a flush of this step: let them hear at once why it cannot be.
            if flush and self._ranks.world > 1:
                self._client.give_up(step, f"rank {self._ranks.rank}: {type(error).__name__}: {error}")
            raise
        if self._snapshots.moved_arena:
            self._snapshots.moved_arena = False
            self._client.rearm(self._tier.arena.info.path or self._tier.arena.fileno())
        self._tell_taken()
        self._snapshots.drop_outgrown()

    def _flush(
        self, step: int, tiers: Collection[str], decision: Decision | None = None, *, full: bool = False
    ) -> SaveHandle:
        """``tiers``: names of those that it is to reach; more may be asked for later. In full, unless ``decision`` says
        otherwise, or it was asked for as a delta; ``full``: then it is made a full."""
        newest = self._snapshots.newest
        assert newest is not None and newest.step == step, "only the newest snapshot is flushed"
        urls = [self._urls[name] for name in tiers]
        known = self.outcomes.asked(step)
        if not known:
            delta = decision is not None and decision.kind == DELTA
            self._delta = step if delta else self._delta
            self.outcomes.expect(step, self._client.next_attempt(step), urls, delta=delta)
            self._pending_as = decision
        again = known and full and step == self._delta
        if again:
            self._pending_as, self._delta = Decision(step, True, True, merge=True), None
        if not known or self.outcomes.owe(step, urls) or again:
            self._pending, self._pending_tiers = newest, list(tiers)
            self._send_pending()
        return SaveHandle(step, self)

    def _send_pending(self) -> None:
        """Ask for the flush once its snapshot is whole (a late copy may still be running)."""
        self._snapshots.look()
        self._tell_taken()
        taken = self._pending
        if taken is None:
            return
        if taken.moved:
            self._pending = None
            self._client.give_up(
                taken.step, f"rank {self._ranks.rank}: changed while it was copied: {taken.moved}"
            )
        elif taken.whole:
            self._pending = None
            self._pins[taken.step] = self._tier.arena.pin(taken.slot, taken.generation, purpose=Purpose.FLUSH)
            wish, self._pending_as = self._pending_as or Decision(taken.step, True, True), None
            with self._bearing_its_loss():
                self._client.flush(
                    taken.step,
                    slot=taken.slot,
                    generation=taken.generation,
                    kind=wish.kind,
                    tiers=self._pending_tiers,
                    base=wish.base,
                    merge=wish.merge,
                )

    def _tell_taken(self) -> None:
        """The agent sends a snapshot to other nodes once it is whole."""
        newest = self._snapshots.newest
        if self._wait_s is not None and newest is not None and newest.whole and newest.step != self._told:
            self._told = newest.step
            self._client.taken(newest.step, slot=newest.slot, generation=newest.generation)

    def _wait_for_slot(self) -> None:
        """While training waits for the agent, and for nothing else: it is asked at once, and has the whole bound and no
        more."""
        self._heartbeat.waits()
        if self._wait_s is not None:
            self._client.ask()
        self._hear_quietly()

    def _mind_agent(self) -> None:
        """Where no agent answers for too long, training goes on unprotected; until one does again."""
        if self._wait_s is None:
            return
        if self._client.answers:
            self._agent_missed = None
            self._tier.guarded = True
            return
        now = time.monotonic()
        if self._agent_missed is None:
            self._agent_missed = now
        if self._tier.guarded and now - self._agent_missed >= self._wait_s:
            self._tier.guarded = False
            warnings.warn(
                f"everstep: no answer of an agent for {self._wait_s:g} s: training goes on, but snapshots are not "
                "protected against the loss of this node",
                RuntimeWarning,
                stacklevel=2,
            )

    def _check_order(self, step: int, *, again: bool) -> None:
        if step > self._last_step or (again and step == self._last_step and self._snapshots.holds(step)):
            return
        raise StepOrder(
            "steps go up within an incarnation",
            found=step,
            expected=f"more than {self._last_step}",
            hint="rollback() goes back to an earlier step; that starts a new incarnation.",
            step=step,
        )

    def _look(self, seconds: float) -> None:
        self._heartbeat.waits()
        for progress in self._client.listen(min(seconds, 0.5)):
            self._note(progress)

    def _hear_quietly(self) -> None:
        if self._line is None:  # nothing was asked for yet
            return
        with self._bearing_its_loss():
            for progress in self._client.poll():
                self._note(progress)
        self._mind_agent()

    @contextlib.contextmanager
    def _bearing_its_loss(self) -> Iterator[None]:
        """That the agent is given up ends no training: snapshots go on, flushes fail, told by the policy."""
        try:
            yield
        except AgentError as error:
            if self._policy.on_failure == "raise" or not self._client.given_up:
                raise
            warnings.warn(f"everstep: {error}", RuntimeWarning, stacklevel=4)

    def _note(self, progress: Progress) -> None:
        if progress.stage != "equal" or self._ranks.rank == 0:
            self.outcomes.note(progress)
        self._decisions.heard(progress)
        if progress.incarnation == self._record.number:
            self._auditor.note(progress)
        if progress.stage == "failed":
            self._snapshots.replan()
        written = progress.stage in ("staged", "voted") and progress.rank == self._ranks.rank
        if progress.incarnation == self._record.number and (written or progress.stage in FINISHED):
            pin = self._pins.pop(progress.step, None)
            if pin is not None and written and self._may_be_base(progress.step):
                self._tier.keep(pin)
            elif pin is not None:
                pin.release()

    def _may_be_base(self, step: int) -> bool:
        """Whether deltas may soon be coded against the checkpoint of ``step``: out of memory, if there is room."""
        policy = self._policy
        return policy.delta_every is not None and (
            policy.delta_base == "previous" or self.outcomes.kind(step) == FULL
        )

    def _scheduled(self, place: Place, start: int, chains: Chains | None) -> Decisions:
        return Decisions(
            self._ranks,
            self._policy,
            start=start,
            unfinished_max=self._unfinished_max,
            incarnation=self._record.number,
            tiers=place.shares,
            chains=chains,
        )
