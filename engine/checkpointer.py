"""The facade: one object that loads, snapshots, saves and closes."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from . import opened
from .adopted import Adopted, Flat, flattened_once
from .agent.asking import loading
from .agent.spawn import Standby
from .agent.values import AgentSettings
from .backends.api import Backend
from .chained import known_chains
from .config import check_kind, plain_config, plain_step
from .connecting import agent_settings
from .discovery import find_run, open_arenas
from .errors import BadOption, Closed, EverstepError, NoCheckpoint, RunInUse
from .format.constants import CHUNK_BYTES
from .format.records import IncarnationRecord
from .former import agents_address, kept_arenas
from .guarding import Protection, compare_wishes, domain_of, elsewhere, reachable
from .handles import SaveHandle
from .loading import Loader, Recovery
from .memory.arena import Arena
from .memorytier import MemoryTier, Room
from .mending import Mending
from .nodes import node_of
from .opening import OPENING, Opening, Origin, check_mesh, claim_incarnation
from .peers.secret import run_secret
from .places import locate, with_tiers
from .plan.parity import fit
from .plan.placement import Node
from .planning import Copies, expected_slot_bytes
from .policy import SHARED_MEMORY, Memory, Policy, Tier
from .ranks import Ranks
from .reading import into_state
from .rollback import Rollbacks
from .session import Session
from .snapshots import Prepared
from .state.trainstate import TrainState
from .store.blocking import run_blocking
from .writers import ENDING_S_MAX, Lookout, ending, unmark

log = logging.getLogger("everstep")

STAGING_SLOTS = 2
"""Without a memory tier: one being flushed, one being copied into."""


class Checkpointer:
    """Checkpoints of one training run, on every rank of the job.

    ``root`` is a directory that all ranks share, or ``s3://bucket/prefix``. ``storage_options`` are those of its
    storage, as fsspec knows them; they may be secret, and are kept in memory alone. ``memory`` is the tier of
    snapshots in shared memory, ``policy`` says when what is written and kept, ``tiers`` are further places that
    checkpoints are copied to, ``config`` (hyper-parameters) is hashed and compared at load. ``agent="inline"`` runs
    the background work on a thread of each rank instead of a process per node; a process is begun here, not waited for.
    ``fresh="why"`` starts again in a run that has checkpoints; ``take_over=True`` supersedes a living writer. ``mesh``
    names the axes of the ranks and their sizes (default: ``{"data": world}``). ``node`` overrides the node's name.

    Rank and world are read at the first load, step or save: from torch.distributed if it is initialised, else from
    the launcher's environment, else one process. All ranks make the same calls in the same order.

    Threads and processes: an object belongs to the thread and process that made it, and is used by one thread at a
    time. Nothing runs in this process in the background except a late copy (``Memory(copy="overlap")``), the
    storage thread during loads, a run's opening beside its first copy, and the agent if it is inline. Handles and
    DataLoader workers do not survive a fork with it. What is *not* promised: that a step is durable when ``step`` or
    ``save`` returns (wait on the handle), or that writes to parameters through ``.data`` during a late copy are seen.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        memory: Memory | None = Memory(),  # noqa: B008  (frozen)
        policy: Policy | None = None,
        tiers: Sequence[Tier] = (),
        config: Any = None,
        agent: Literal["process", "inline"] = "process",
        fresh: str | None = None,
        take_over: bool = False,
        mesh: Mapping[str, int] | None = None,
        node: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if agent not in ("process", "inline"):
            raise BadOption("agent= is unknown", found=repr(agent), expected="'process' or 'inline'")
        if fresh is not None and not (isinstance(fresh, str) and fresh.strip()):
            raise BadOption("fresh= must say why", found=repr(fresh), expected="a text")
        check_kind("policy", policy, Policy)
        check_kind("memory", memory, Memory)
        self._place = with_tiers(locate(root, node=node, options=storage_options), tiers)
        self._memory, self._agent = memory, agent
        self._room = (
            Room(memory.directory, memory.slots, required=memory.path is not None)
            if memory is not None
            else Room(SHARED_MEMORY, STAGING_SLOTS, private=True)
        )
        self._standby = self._stand_by()
        self._backend: Backend = self._place.open_root()
        self._farther, self._near = self._place.open_tiers(), self._place.open_near()
        self._policy = policy or Policy()
        self._config = plain_config(config)
        self._take_over = take_over
        self._mesh = dict(mesh) if mesh is not None else None
        self._origin = Origin(fresh=fresh)
        self._ranks: Ranks | None = None
        self._tier: MemoryTier | None = None
        self._session: Session | None = None
        self._rollbacks = Rollbacks(device=memory is not None and memory.device_slots > 0)
        self._allow: tuple[str, ...] = ()
        self._closed = False
        self._pid = os.getpid()
        self._held: list[Arena] = []
        self._nodes: list[str] = []
        """Of all ranks, once they have told each other."""
        self._copies = 0
        """How many lost nodes are survived: what was asked for, as far as there are nodes."""
        self._holders: tuple[tuple[int, ...], ...] = ()
        """Which ones keep each snapshot, by the number of a node in the order of their first ranks; spare ones last."""
        self._protection: Protection | None = None
        self.recovery: Recovery | None = None
        self._lookout: Lookout | None = None
        self._records: dict[int, IncarnationRecord] = {}
        """Of the root's incarnations, those that were read."""
        self._adopted: Adopted | None = None
        opened.add(self._place.url, self)

    # -- the calls of a training loop

    def load(
        self,
        state: TrainState | Mapping[str, Any],
        *,
        step: int | None = None,
        allow: Collection[str] = (),
        config_reason: str | None = None,
        mend: bool = False,
    ) -> int | None:
        """Restore ``state`` in place from the newest step that exists anywhere (or from ``step``), every byte
        proved, and return that step; None if the run has no checkpoint. All ranks get the same.

        Any number of ranks may have written it, sharded in any way. As many ranks as saved get their own values
        back; else tensors of the job are sharded anew, what was each rank's own must be equal on all of them (or
        allow={"ranks"}: that of the rank modulo the number that saved), random numbers are derived from rank 0's,
        and the loader's state is what ``TrainState(reshard_loader=...)`` makes of all (or allow={"loader"}: it
        stays as it is).

        ``allow`` loosens the comparison with the checkpoint ("missing", "unexpected", "dtype", "class", "ties",
        "rng", "ranks", "loader"), ``config_reason`` accepts another configuration; both are recorded. ``mend``: first
        nearer tiers get from farther ones what they lack of this step, or have damaged. Raises StateMismatch,
        ConfigChanged, Damaged (nothing good is left), CannotTell, NoCheckpoint (for ``step``), RankError; the contents
        of ``state`` are undefined then.
        """
        self._check_usable()
        if self._session is not None:
            raise BadOption(
                "load after the first step or save", hint="rollback() goes back in a running job."
            )
        trained = TrainState.of(state)
        flat = flattened_once(trained)
        self._rollbacks.note(state)
        ranks, _ = self._meet()
        self._origin = Origin(fresh=self._origin.fresh)  # a load that fails leaves nothing to start from
        self._allow = (allow,) if isinstance(allow, str) else tuple(allow)
        self._records.clear()
        if self._origin.fresh is None:
            self._held = self._kept_by_agent()
            if ranks.rank == 0 and not self._take_over:
                self._lookout = Lookout(self._backend, self._records)
                self._lookout.begin()
            self.recovery = self._restore(trained, step, config_reason, self._held, mend)
            self._adopted = Adopted(trained, self.recovery, flat) if self.recovery is not None else None
        self._origin = self._origin_of(self.recovery, config_reason)
        if self._memory is not None:  # else only flushes need room, and the first of them makes it
            self._reserve(trained, flat)
            if self.recovery is None:  # a restart goes on at once, its memory is made ready behind it
                self._meet()[1].await_first_slot()
        return self.recovery.step if self.recovery is not None else None

    def _restore(
        self,
        state: TrainState,
        step: int | None,
        config_reason: str | None,
        held: Sequence[Arena],
        mend: bool = False,
    ) -> Recovery | None:
        ranks, tier = self._meet()
        near, wait_s = next(iter(self._near), None), self._policy.close_timeout_s
        mending = Mending(near, self._place.near, timeout_s=wait_s) if mend else None
        read = into_state(state, self._allow, bring=mending.bring if mending is not None else None)
        with loading(self._running_agent()), open_arenas(tier.directory, held) as arenas:
            found = Loader(
                self._backend,
                ranks,
                arenas,
                timeout_s=self._policy.rank_timeout_s,
                writes=True,
                node=node_of(self._place.node, tier.directory),
                farther=self._farther,
                near=near,
                mending=mending,
                known=self._records,
            ).load(read, step=step, config=self._config, config_reason=config_reason)
        return found[0] if found is not None else None

    def rollback(
        self, step: int | None = None, *, reason: str, state: TrainState | Mapping[str, Any] | None = None
    ) -> int:
        """Go back in a running job: restore the trainer's state in place, every rank's, and return the step restored;
        steps then go on from there. Every rank calls it with the same ``step`` and ``reason``.

        Without ``step``: the snapshot on the devices (``Memory(device_slots=1)``), where all ranks have the same one,
        else the newest complete step. From the devices at the speed of their memory; any other step as :meth:`load`
        does, from whatever has it. ``state`` is the TrainState that load, step or save were given last, if it still
        exists; give it here if it is another, or a plain dict.

        It begins a new incarnation, whose record has the ``reason``, before it returns: what was written after the step
        restored is never loaded again, late flushes included, but is listed until it is pruned. Flushes of later steps
        are given up, those up to that step go on. Raises what load raises, NoCheckpoint too where nothing is there, and
        before a rank begins to write into ``state`` nothing has changed; then what the first step after a load does,
        and the next rollback, step or save tries again.
        """
        self._check_usable()
        trained = self._rollbacks.state(state)
        number = plain_step(step) if step is not None else None
        ranks, _ = self._meet()
        found = self._rollbacks.restore(
            ranks,
            self._session,
            trained,
            number,
            reason,
            origin=self._origin,
            allow=self._allow,
            load=lambda at: self._load_back(trained, at, reason),
            timeout_s=self._policy.rank_timeout_s,
        )
        self._session, self.recovery = None, found
        self._origin = replace(self._origin_of(found, f"rollback: {reason}"), reason=reason)
        self._adopted = Adopted(trained, found, trained.flatten)
        self._begin(trained)
        if state is not None:
            self._rollbacks.note(state)
        return found.step

    def _load_back(self, state: TrainState, step: int | None, reason: str) -> Recovery:
        _, tier = self._meet()
        own = [tier.arena] if tier.reserved and tier.arena.info.path is None else []
        kept = self._kept_by_agent() if own or not tier.reserved else []
        try:
            # The configuration is this job's, and was accepted when it began.
            found = self._restore(state, step, f"rollback: {reason}", [*kept, *own])
        finally:
            for arena in kept:
                arena.close()
        if found is None:
            raise NoCheckpoint(
                f"there is nothing to go back to at {self._place.url}",
                found="neither a checkpoint nor a complete snapshot",
                hint="The first of them comes with the first step or save.",
            )
        return found

    def step(
        self,
        step: int,
        state: TrainState | Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
    ) -> SaveHandle | None:
        """Training step ``step`` is done: snapshot and flush what the policy says. The handle of the flush, if
        one was started.

        Raises StepOrder, UnsupportedValue, Superseded, NotLoaded, RunInUse, and failures of former flushes by
        policy.
        """
        number = plain_step(step)
        with self._writing(state) as session:
            return session.step(number, TrainState.of(state), metrics)

    def save(
        self,
        step: int,
        state: TrainState | Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """One full checkpoint of ``step``, whatever the policy says; every rank calls it. Returns when the copy is
        done; ``wait`` on the handle for durability."""
        number = plain_step(step)
        with self._writing(state) as session:
            return session.save(number, TrainState.of(state), metrics)

    def close(self, *, flush: bool = True) -> None:
        """Make the newest snapshot durable (unless ``flush`` is False), end the session, and raise what went wrong.
        Every rank calls it; calling it again does nothing."""
        if flush and not self._closed and os.getpid() == self._pid:
            self._save_adopted()
        self._close(flush=flush, keep=False)

    def _save_adopted(self) -> None:
        """A job that is started again at its last step, or went back to it, has nothing left to do but to make it
        durable: what it has may lie in memory alone."""
        adopted = self._adopted
        if adopted is None or not adopted.is_owed(
            self._meet()[0], self._backend, self._policy.rank_timeout_s
        ):
            return
        try:
            self._begin(adopted.state).save_adopted(adopted.state)
            self._adopted = None
        except RunInUse as error:
            log.info("everstep: step %d is left to the run's writer: %s", adopted.recovery.step, error)

    def _close(self, *, flush: bool, keep: bool) -> None:
        """``keep`` leaves the snapshots in memory: who ends by an error is likely to be started again."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        keep = keep or (self._adopted is not None and self._adopted.in_memory_alone)
        opened.remove(self._place.url, self)
        if self._standby is not None:
            self._standby.close()
        with contextlib.ExitStack() as stack:
            for backend in (self._backend, *self._near, *self._farther):
                stack.callback(lambda one: run_blocking(one.close()), backend)
            if self._session is None and self._tier is not None:
                stack.callback(self._tier.close, remove=False)
            stack.callback(self._rollbacks.close, lambda record_id: unmark(self._place, record_id))
            if self._session is not None:
                stack.callback(unmark, self._place, self._session.record_id)
                ending(self._place, self._session.record_id, within_s=self._policy.close_timeout_s)
                self._session.close(flush=flush, keep=keep)

    def status(self) -> dict[str, Any]:
        """What this rank knows: incarnation, newest step in memory and on disk, unfinished flushes, the agent."""
        self._check_usable()
        return self._session.status() if self._session is not None else {"incarnation": None}

    @property
    def agent_pid(self) -> int | None:
        """Process id of this node's agent, once there is one."""
        return self._session.agent_pid if self._session is not None else None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self._close(flush=True, keep=True)
        except EverstepError as second:
            log.error("everstep: closing after %s failed too: %s", type(error).__name__, second)

    # -- opening

    def _check_usable(self) -> None:
        if self._closed:
            raise opened.why_closed(self._place.url, self)
        if os.getpid() != self._pid:
            raise Closed("this checkpointer belongs to another process", hint="Make one in this process.")

    def _meet(self) -> tuple[Ranks, MemoryTier]:
        if self._ranks is None:
            self._ranks = Ranks.detect(self._place.url, timeout_s=self._policy.rank_timeout_s)
        if self._tier is None:
            self._tier = MemoryTier(self._place, self._room, self._ranks.rank)
        return self._ranks, self._tier

    def _origin_of(self, recovery: Recovery | None, config_reason: str | None) -> Origin:
        if recovery is None:
            return Origin(looked=True, fresh=self._origin.fresh)
        return Origin(
            looked=True,
            incarnation=recovery.incarnation,
            step=recovery.step,
            config_changes=dict(recovery.config_changes or {}),
            config_reason=config_reason if recovery.config_changes else None,
            loosened=recovery.loosened,
        )

    def _running_agent(self) -> AgentSettings | None:
        """How the agent of this node is reached that a former process may have left; None where there can be none."""
        with contextlib.suppress(EverstepError):  # what is wrong with the run, the loader says, to all ranks
            run = find_run(self._backend)
            if run is not None and self._agent == "process" and self._place.agent_dir(run.run_id).is_dir():
                return agent_settings(self._place, self._policy, run.run_id, run.chunk_bytes)
        return None

    def _stand_by(self) -> Standby | None:
        """A process for the agent that the first step is likely to need, if none is there."""
        needed = self._memory is not None and self._agent == "process" and not self._place.has_agent()
        return Standby.begin(self._place.urls) if needed else None

    def _kept_by_agent(self) -> list[Arena]:
        settings = self._running_agent()
        with contextlib.suppress(EverstepError):
            return kept_arenas(settings) if settings is not None else []
        return []

    def _reserve(self, state: TrainState, flat: Flat) -> None:
        """Room for the slots, before the first step: too little is told here, by all ranks."""
        ranks, tier = self._meet()
        self._compare_nodes(ranks, tier)

        def reserve() -> None:
            run_secret()  # one that cannot be read is told, though this job may do without
            held, self._held = self._held, []
            if tier.reserved:
                tier.await_reserved(held)
            else:
                self._reserve_slots(state, flat, ranks, tier, held)
            self._rollbacks.reserve(state, tier.arena)

        ranks.together("reserving memory", reserve, timeout_s=self._policy.rank_timeout_s)

    def _reserve_slots(
        self, state: TrainState, flat: Flat, ranks: Ranks, tier: MemoryTier, held: Sequence[Arena]
    ) -> None:
        run, copies = find_run(self._backend), Copies.on(ranks.rank, self._nodes, self._holders)
        tier.reserve(
            (self._memory and self._memory.bytes) or expected_slot_bytes(state, ranks.world, copies, flat()),
            chunk_bytes=run.chunk_bytes if run is not None else CHUNK_BYTES,
            adopted=self._origin.adopted,
            run_id=run.run_id if run is not None else "",
            held=held,
            behind=self.recovery is not None,
        )
        if self._memory is not None and self.recovery is None:  # a restart has other things to wait for
            tier.prepared = Prepared.of(state, tier.arena, ranks, self._nodes, self._holders)

    def _compare_nodes(self, ranks: Ranks, tier: MemoryTier) -> None:
        """Once: on which nodes the ranks are, and how many second copies that leaves room for."""
        if self._nodes:
            return
        memory = self._memory
        here = node_of(self._place.node, tier.directory) if memory is not None else self._place.node
        wished = [memory.replicas, memory.parity, memory.spares] if memory is not None else [0, None, ()]
        domain = domain_of(memory) if memory is not None else ""
        mine = [
            here,
            *wished,
            domain,
            self._agents_address() if memory is not None and memory.spares else None,
        ]
        told = ranks.agree("comparing nodes", mine, timeout_s=self._policy.rank_timeout_s)
        compare_wishes([one[1:4] for one in told])
        unreached: dict[str, str] = {}
        if memory is not None and memory.spares:
            spares = elsewhere(memory.spares, [one[5] for one in told if one[5]])
            unreached = self._unreached(ranks, spares)
            memory = replace(memory, spares=tuple(one for one in spares if one not in unreached))
        nodes = [one[0] for one in told]
        wanted = memory.copies if memory is not None else 0
        others = len(set(nodes)) - 1 + len(memory.spares if memory is not None else ())
        warning = None
        if memory is not None and memory.parity is not None:
            # All ranks find the same, so all raise, or none.
            warning = fit([Node(name) for name in dict.fromkeys(nodes)], *memory.parity).warning
        elif wanted > others:
            warning = (
                f"Memory(replicas={wanted}) is lowered to {others}: each copy lies on another node, and "
                f"besides the node that stores a tensor this job has {others}"
            )
        if warning is not None and ranks.rank == 0:
            warnings.warn(f"everstep: {warning}", RuntimeWarning, stacklevel=2)
        self._nodes, self._copies = nodes, min(wanted, others)
        if memory is not None:
            domains = dict(reversed([(one[0], one[4]) for one in told]))
            self._protection = Protection(memory, nodes, self._copies, domains, tuple(unreached.items()))
            self._protection.check_agent(self._agent)
            self._holders = self._protection.holders()

    def _agents_address(self) -> str | None:
        settings = self._running_agent()
        with contextlib.suppress(EverstepError):
            return agents_address(settings) if settings is not None else None
        return None

    def _unreached(self, ranks: Ranks, given: Sequence[str]) -> dict[str, str]:
        """By address the spare nodes that are not there, and why, as rank 0 finds them."""

        def look() -> Any:
            # A spare node listens once there is a run: of a new one they are expected to come.
            run = find_run(self._backend)
            return reachable(given, run.run_id, self._place.node) if run is not None else []

        told = ranks.from_first("looking for spare nodes", look, timeout_s=self._policy.rank_timeout_s)
        if told and ranks.rank == 0:
            text = "; ".join(why for _, why in told)
            warnings.warn(
                f"everstep: spare nodes cannot be reached, and keep nothing: {text}",
                RuntimeWarning,
                stacklevel=3,
            )
        return dict(told)

    @contextlib.contextmanager
    def _writing(self, state: TrainState | Mapping[str, Any]) -> Iterator[Session]:
        """The session, which the first step or save opens beside its copy."""
        session = self._begin(TrainState.of(state), beside=True)
        try:
            yield session
        finally:  # also where this rank failed: the others wait for it
            self._join(session)
            self._adopted = None
            self._rollbacks.note(state)

    def _join(self, session: Session) -> None:
        """Until the run is open."""
        try:
            session.joined()
        except BaseException:
            self._session = None
            session.drop()
            unmark(self._place, session.record_id)
            raise
        opened.writes(self._place.url, self)
        self._rollbacks.leave_former()

    def _begin(self, state: TrainState, *, beside: bool = False) -> Session:
        """The session; if there is none, one of the next incarnation, on all ranks or on none. With ``beside`` the run
        may not be open yet: :meth:`_join` is to be called."""
        self._check_usable()
        if self._session is not None:
            return self._session
        ranks, tier = self._meet()
        mesh = self._mesh or {"data": ranks.world}
        check_mesh(mesh, ranks.world)
        self._compare_nodes(ranks, tier)  # what does not fit together is said before anything is written
        guarded = self._protection is not None and bool(self._protection.wanted)
        opening = Opening(
            ranks,
            self._backend,
            lambda: claim_incarnation(
                self._backend,
                self._place,
                self._origin,
                world=ranks.world,
                mesh=mesh,
                config=self._config,
                take_over=self._take_over,
                lookout=self._lookout,
                farther=self._farther,
                known=self._records,
                patience_s=min(ENDING_S_MAX, self._policy.rank_timeout_s / 2),
            ),
            place=self._place,
            policy=self._policy,
            standby=self._standby,
            beside=beside and not (self._take_over or guarded),
        )
        self._origin = self._origin.tried(opening.record.id)
        try:
            session = self._session_of(state, ranks, tier, opening)
        except BaseException:
            unmark(self._place, opening.record.id)
            raise
        if not opening.beside:
            self._join(session)
        self._session = session
        return session

    def _session_of(self, state: TrainState, ranks: Ranks, tier: MemoryTier, opening: Opening) -> Session:
        """This rank's part in the incarnation."""
        self._reserve(state, state.flatten)
        here = self._nodes[ranks.rank]
        tier.settle_in([rank for rank, node in enumerate(self._nodes) if node == here], ranks.world)

        def start() -> Session:
            first = ranks.rank == 0
            return Session(
                self._place,
                ranks,
                self._policy,
                tier,
                opening.run,
                opening.record,
                join=opening.finish,
                protection=self._protection,
                slots=self._room.slots,
                overlap=self._memory is not None and self._memory.copy == "overlap",
                memory=self._memory is not None,
                nodes=self._nodes,
                holders=self._holders,
                device=self._rollbacks.device,
                chains=known_chains(self._backend, self._policy, opening.record) if first else None,
            )

        session = ranks.together(OPENING, start, timeout_s=self._policy.rank_timeout_s)
        opening.start(tier, self._agent, self._nodes)
        return session
