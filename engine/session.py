"""One incarnation being written by this rank: the schedule, snapshots, flushes, and what became of them."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from .agent.client import AgentClient
from .agent.values import AgentSettings, Hello
from .config import plain_metrics
from .decisions import Decisions
from .errors import StepOrder
from .format.plain import to_plain
from .format.records import IncarnationRecord, RunRecord
from .handles import SaveHandle
from .memory.process import Process
from .memorytier import Key, MemoryTier
from .outcomes import Outcomes
from .places import Place
from .plan.retention import Retention
from .policy import Policy
from .ranks import Ranks
from .snapshots import Snapshots, Taken
from .state.trainstate import TrainState

CONNECT_TIMEOUT_S = 60.0
GOODBYE_TIMEOUT_S = 30.0


class Session:
    """Used from the trainer's thread only. Every rank of the job has one and makes the same calls."""

    def __init__(
        self,
        place: Place,
        ranks: Ranks,
        policy: Policy,
        tier: MemoryTier,
        run: RunRecord,
        record: IncarnationRecord,
        *,
        agent: Literal["process", "inline"],
        slots: int,
        overlap: bool,
        memory: bool,
    ) -> None:
        self._memory = memory
        self._ranks = ranks
        self._policy = policy
        self._tier = tier
        self._record = record
        adopted = adopted_of(record)
        tier.open(run_id=run.run_id, incarnation=record.number, adopted=adopted, world=ranks.world)
        self._client = self._connect(place, policy, run, agent, adopted)
        self.outcomes = Outcomes(policy)
        self._decisions = Decisions(ranks, policy, start=adopted[1] if adopted else 0, unfinished_max=max(1, slots - 2))
        self._snapshots = Snapshots(tier, ranks, overlap=overlap)
        self._pending: Taken | None = None
        self._last_step = adopted[1] if adopted is not None else -1

    @property
    def incarnation(self) -> int:
        return self._record.number

    @property
    def agent_pid(self) -> int | None:
        return self._client.agent_pid

    # -- the trainer's calls

    def step(self, step: int, state: TrainState, metrics: Mapping[str, Any] | None) -> SaveHandle | None:
        """What the schedule says for ``step``."""
        self.hear()
        self._check_order(step, again=False)
        decision = self._decisions.of(step, lambda: len(self.outcomes.unfinished()))
        self._last_step = step
        if decision.supersede:
            for old in self.outcomes.unfinished():
                self._client.give_up(old, f"superseded by the flush of step {step}")
        if decision.wait:
            for old in self.outcomes.unfinished():
                self.outcomes.wait(old, self._policy.close_timeout_s, self._look)
        if not decision.flush and not (decision.snapshot and self._memory):
            return None
        self._snapshot(step, state, metrics, late=True)
        return self._flush(step) if decision.flush else None

    def save(self, step: int, state: TrainState, metrics: Mapping[str, Any] | None) -> SaveHandle:
        """A full checkpoint of ``step``, whatever the schedule says; of the snapshot that is there, if it is of
        this very step."""
        self.hear()
        self._check_order(step, again=True)
        newest = self._snapshots.newest
        if newest is None or newest.step != step:
            self._snapshot(step, state, metrics, late=False)
        self._last_step = step
        self._snapshots.settle(self._policy.slot_timeout_s)
        return self._flush(step)

    def hear(self) -> None:
        """Take in what the agent said; tell the caller of failures it has not heard of."""
        self._send_pending()
        for progress in self._client.poll():
            self.outcomes.note(progress)
        self.outcomes.tell()

    def outcome(self, step: int) -> tuple[bool, Any]:
        self._send_pending()
        for progress in self._client.poll():
            self.outcomes.note(progress)
        return self.outcomes.outcome(step)

    def wait_durable(self, step: int, timeout_s: float | None) -> None:
        """For handles: returns when ``step`` is durable, raises why it will not be."""
        self._snapshots.settle(self._policy.slot_timeout_s)
        self._send_pending()
        self.outcomes.forget_untold(step)
        self.outcomes.wait(step, timeout_s or self._policy.close_timeout_s, self._look)
        self.outcomes.forget_untold(step)
        error = self.outcomes.outcome(step)[1]
        if error is not None:
            raise error

    def status(self) -> dict[str, Any]:
        complete = self._tier.complete()
        return {
            "incarnation": self._record.number,
            "newest_complete_in_memory": complete[1] if complete else None,
            "newest_durable": self.outcomes.newest_durable,
            "unfinished": self.outcomes.unfinished(),
            "agent": self._client.status(),
        }

    def close(self, *, flush: bool, keep: bool = False) -> None:
        """Make the newest snapshot durable (``flush``), say good-bye, let go of the arena. Raises what went wrong;
        the arena then stays, and so does what it holds. ``keep``: it stays anyhow."""
        safe = False
        try:
            self._snapshots.settle(self._policy.slot_timeout_s)
            self._send_pending()
            newest = self._snapshots.newest
            if flush and newest is not None:
                self._flush(newest.step)
            if flush:
                for step in self.outcomes.unfinished():
                    self.outcomes.wait(step, self._policy.close_timeout_s, self._look)
                if newest is not None:
                    self.wait_durable(newest.step, None)
                self.outcomes.tell()
                safe = True
        finally:
            self._snapshots.close()
            self._client.bye(timeout_s=GOODBYE_TIMEOUT_S)
            self._client.close()
            self._tier.close(remove=safe and not keep)

    # -- inner parts

    def _snapshot(self, step: int, state: TrainState, metrics: Mapping[str, Any] | None, *, late: bool) -> None:
        facts = plain_metrics(metrics)
        try:
            self._snapshots.take(
                step,
                state,
                lambda: describe(state, self._record, self._ranks.rank, facts),
                late=late,
                timeout_s=self._policy.slot_timeout_s,
                waiting=self._hear_quietly,
            )
        except BaseException as error:
            # The other ranks may have asked for a flush of this step: let them hear at once why it cannot be.
            self._client.give_up(step, f"rank {self._ranks.rank}: {type(error).__name__}: {error}")
            raise
        if self._snapshots.moved_arena:
            self._snapshots.moved_arena = False
            self._client.rearm(self._tier.arena.info.path or self._tier.arena.fileno())
        self._tier.drop_outgrown()

    def _flush(self, step: int) -> SaveHandle:
        newest = self._snapshots.newest
        assert newest is not None and newest.step == step, "only the newest snapshot is flushed"
        if not self.outcomes.asked(step):
            self.outcomes.expect(step)
            self._pending = newest
            self._send_pending()
        return SaveHandle(step, self)

    def _send_pending(self) -> None:
        """Ask for the flush once its snapshot is whole (a late copy may still be running)."""
        taken = self._pending
        if taken is None:
            return
        if taken.moved:
            self._pending = None
            self._client.give_up(taken.step, f"rank {self._ranks.rank}: changed while it was copied: {taken.moved}")
        elif taken.whole:
            self._pending = None
            self._client.flush(taken.step, slot=taken.slot, generation=taken.generation, kind="full")

    def _check_order(self, step: int, *, again: bool) -> None:
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise StepOrder("a step is a whole number, zero or more", found=repr(step))
        if step > self._last_step or (again and step == self._last_step and self._snapshots.holds(step)):
            return
        raise StepOrder(
            "steps go up within an incarnation",
            found=step,
            expected=f"more than {self._last_step}",
            hint="Load an earlier checkpoint to go back; that starts a new incarnation.",
            step=step,
        )

    def _look(self, seconds: float) -> None:
        for progress in self._client.listen(min(seconds, 0.5)):
            self.outcomes.note(progress)

    def _hear_quietly(self) -> None:
        for progress in self._client.poll():
            self.outcomes.note(progress)

    def _connect(
        self, place: Place, policy: Policy, run: RunRecord, agent: Literal["process", "inline"], adopted: Key | None
    ) -> AgentClient:
        arena = self._tier.arena
        hello = Hello(
            run_id=run.run_id,
            rank=self._ranks.rank,
            world=self._ranks.world,
            incarnation=self._record.number,
            adopted=adopted,
            process=Process.current(),
            arena=arena.info.path or arena.fileno(),
        )
        settings = agent_settings(place, policy, run.run_id, run.chunk_bytes)
        return AgentClient.connect(settings, hello, mode=agent, timeout_s=CONNECT_TIMEOUT_S)


def agent_settings(place: Place, policy: Policy, run_id: str, chunk_bytes: int) -> AgentSettings:
    """What this run tells its agent. A run that was made anew at the same root has another agent."""
    return AgentSettings(
        root=place.url,
        run_key=place.run_key,
        node=place.node,
        runtime_dir=place.agent_dir(run_id),
        rate_bytes_per_s=policy.rate_bytes_per_s,
        retention=Retention(keep_last=policy.keep_last, keep_every=policy.keep_every),
        linger_s=policy.linger_s,
        commit_timeout_s=policy.commit_timeout_s,
        chunk_bytes=chunk_bytes,
    )


def adopted_of(record: IncarnationRecord) -> Key | None:
    """(incarnation, step) that the incarnation started from; None for a fresh start."""
    if record.adopted_incarnation is None or record.adopted_step is None:
        return None
    return record.adopted_incarnation, record.adopted_step


def describe(state: TrainState, record: IncarnationRecord, rank: int, metrics: dict[str, Any]) -> bytes:
    """A snapshot's meta region: what the manifest gathers from the rank."""
    meta: dict[str, Any] = {
        "mesh": record.mesh,
        "coordinates": _coordinates(record.mesh, rank),
        "parts": {},
        "data": None,
        "rng": [],
        "metrics": metrics,
        "config_hash": record.config_hash,
        "libraries": _libraries(),
        "facts": {},
    }
    meta.update(state.describe())
    # As in the vote: a metric or a position may be an integer of any size, which msgpack has not.
    return msgspec.msgpack.encode(to_plain(meta, "meta"))


def _coordinates(mesh: dict[str, int], rank: int) -> dict[str, int]:
    """The rank's place in a row-major mesh."""
    found: dict[str, int] = {}
    for name, size in reversed(mesh.items()):
        rank, found[name] = divmod(rank, size)
    return dict(reversed(found.items()))


def _libraries() -> dict[str, str]:
    import torch

    from . import __version__

    return {"everstep": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
