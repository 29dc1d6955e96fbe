"""Loading: all ranks agree on a step, read it from the nearest holder, prove every chunk, and fall back together.

Nothing is written to the run unless a load is asked to mend, so readers may load from a live one.
"""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from .backends.api import Backend
from .config import check_config
from .discovery import (
    FALL_BACK,
    Candidate,
    Key,
    Proposals,
    find_run,
)
from .errors import CannotTell, Damaged, EverstepError, NoCheckpoint, NotARun, Pruned
from .format.manifest import Manifest
from .format.records import IncarnationRecord, RunRecord
from .memory.arena import Arena
from .mending import Mending, with_near
from .nodes import Nodes
from .phases import PhaseFailed, Phases
from .ranks import Ranks
from .reading import Filled, Reading
from .staged import finish_staged
from .store.bases import Bases
from .store.blocking import run_blocking
from .store.catalog import list_step, read_decision
from .store.sources import TIER, DurableSource, Source, bases_at
from .store.staged import bases_near

log = logging.getLogger("everstep")

LOOKING = "looking for the run"
LOOKS_MAX = 20
"""How often one load looks anew because a live run removed what it had found."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a load did: the step, the tier that gave it ("memory", "disk" or "device"), the seconds it took, and what
    was passed over on the way (newer steps that could not be used).

    ``sources`` are the bytes that this rank read of images (whole chunks, so a little more than ``nbytes``), by where
    they lay: "own" (arenas of this node's ranks), "held" (what this node holds for others), "peer" (another node's
    memory), "rebuilt" (from parity), "node" (this node's own tier), "disk" (the run's root), "tier" (a further one).
    ``fallbacks`` are what the nearest holder did not give rightly, and who gave it instead."""

    step: int
    incarnation: int
    tier: str
    seconds: float
    nbytes: int
    skipped: tuple[str, ...] = ()
    loosened: tuple[str, ...] = ()
    config_changes: Mapping[str, Any] | None = None
    sources: Mapping[str, int] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()


class Loader:
    """One load by all ranks together. ``arenas`` are those that this node has of the run (they stay the caller's);
    ``node`` is the same for all ranks that see these, and no others'.
    ``writes`` allows to commit an attempt whose votes are all in but whose manifest is missing. ``farther`` are tiers
    behind ``backend``, the root: they have what the root does not (any more), down to the run itself. ``near`` is this
    node's own tier: what is there of a checkpoint is not read from farther away, and what was to be uploaded from the
    nodes' tiers when they all died is, first, where the load writes. With ``mending`` the nearer tiers are made whole
    before they are read (:meth:`Mending.bring` is then for the reading).
    ``known`` are records of the root's incarnations."""

    def __init__(
        self,
        backend: Backend,
        ranks: Ranks,
        arenas: Sequence[Arena],
        *,
        timeout_s: float,
        writes: bool = False,
        node: str = "",
        farther: Sequence[Backend] = (),
        near: Backend | None = None,
        mending: Mending | None = None,
        known: dict[int, IncarnationRecord] | None = None,
    ) -> None:
        self._backend = backend
        self._near = near
        self._mending = mending
        self._known = known
        self._places = (backend, *farther)
        self._base = 0
        self._ranks = ranks
        self._nodes = Nodes(ranks, arenas, node, timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._node = node
        self._at: list[str] = []
        """The nodes of all ranks."""
        self._writes = writes
        self._skipped: list[str] = []
        self._told = 0
        """How many of these were warned of: whatever there is something else to load instead of."""
        self._only_pruned = True
        self._said: dict[int, Manifest] = {}
        """Of the present candidate, by place: the manifests that were just read to choose it. Rank 0's only."""
        self._steps: list[int] = []
        """What is there instead of the step that was asked for."""

    def load(
        self,
        read: Reading,
        *,
        step: int | None,
        config: dict[str, Any] | None = None,
        config_reason: str | None = None,
    ) -> tuple[Recovery, Filled] | None:
        """``read`` the newest step that counts (or ``step``), or an older one where it fails on any rank. None if
        the run has no checkpoint at all. All ranks get the same answer."""
        began = time.monotonic()
        run = self._agree_on_run()
        if run is None:
            if step is not None:
                raise _no_such_step(step, self._backend.url, [])
            return None
        proposals = self._proposals(run, step)
        looks = 1
        while True:
            found = self._next(proposals, config, config_reason)
            if found is None:
                self._nothing(step)
                return None
            candidate, changes = found
            if self._mending is not None:
                candidate = self._mending.mend_shared(self._ranks, self._places, candidate)
            what = f"loading step {candidate.step}"

            filled, errors = self._attempt(read, run, candidate, what)
            if filled is not None:
                return self._done(candidate, filled, changes, time.monotonic() - began), filled
            if not all(isinstance(error, FALL_BACK) for error in errors.values()):
                raise self._ranks.verdict(what, errors)
            if looks < LOOKS_MAX and all(isinstance(error, Pruned) for error in errors.values()):
                # The run is live and went on: what is there now is newer, what was listed after it older still.
                looks += 1
                proposals = self._proposals(run, step)
            else:
                self._skip(candidate, errors)

    def _attempt(
        self, read: Reading, run: RunRecord, candidate: Candidate, what: str
    ) -> tuple[Filled | None, dict[int, EverstepError]]:
        """What ``read`` gave, or every failed rank's error, the same on all ranks."""
        phases = Phases(self._ranks, what, timeout_s=self._timeout_s, node=self._node)
        with self._nodes.serving(candidate, run.chunk_bytes), ExitStack() as stack:
            try:
                if self._mending is not None:
                    self._mending.begin(phases, run, candidate, self._open_durable(run, candidate)[0])
                return read(lambda: self._open(run, candidate, stack), phases), {}
            except PhaseFailed as failed:
                return None, failed.errors

    def _done(
        self, candidate: Candidate, filled: Filled, changes: dict[str, Any], seconds: float
    ) -> Recovery:
        whence = ", ".join(f"{kind} {nbytes}" for kind, nbytes in sorted(filled.sources.items()))
        log.info(
            "everstep: step %d loaded from %s in %.2f s (bytes by holder: %s)",
            candidate.step,
            filled.tier,
            seconds,
            whence or "none",
        )
        return Recovery(
            step=candidate.step,
            incarnation=candidate.incarnation,
            tier=filled.tier,
            seconds=seconds,
            nbytes=filled.nbytes,
            skipped=tuple(self._skipped),
            loosened=filled.loosened,
            config_changes=changes,
            sources=dict(filled.sources),
            fallbacks=filled.fallbacks,
        )

    # -- finding

    def _agree_on_run(self) -> RunRecord | None:
        """The run, if every rank sees the same one."""
        found, seen, errors = self._ranks.exchange(LOOKING, self._find_run, timeout_s=self._timeout_s)
        if errors or found is None:
            raise self._ranks.verdict(LOOKING, errors)
        self._base, run = found
        self._at = [node for _, node in seen]
        if len({run_id for run_id, _ in seen}) > 1:
            raise NotARun(
                "not all ranks see the same run at this root",
                found={rank: run_id or "no run" for rank, (run_id, _) in enumerate(seen)},
                expected="one run on all ranks",
                hint="The root must be on storage that all ranks share.",
            )
        return run

    def _find_run(self) -> tuple[tuple[int, RunRecord | None], Any]:
        """In the nearest place that has it, and which that is; for the others its id, and our node. Raises what the
        root says, and where it has none, what any other says."""
        for number, place in enumerate(self._places):
            try:
                run = find_run(place)
            except CannotTell as error:
                if number == 0:
                    raise
                raise CannotTell(
                    f"{self._backend.url} has no run, and a tier cannot be asked whether it has one: {error.message}",
                    found=error.found,
                    expected="an answer, for what lies there may be all that is left of the run",
                    hint=f"If there was none, start without {place.url}, and add it later",
                ) from error
            if run is not None:
                return (number, run), [run.run_id, self._node]
        return (0, None), [None, self._node]

    def _proposals(self, run: RunRecord, step: int | None) -> Callable[[], Proposals]:
        """Gives what may be loaded, which rank 0 finds out with its first question, given what all ranks' nodes hold in
        memory."""
        in_memory = self._nodes.look(run.run_id, self._at)
        if self._near is not None and self._writes and self._base == 0:
            worlds_in_memory = {key: len(ranks) for key, ranks in in_memory.items()}
            finish_staged(
                self._backend,
                self._near,
                self._ranks,
                run,
                worlds_in_memory,
                step=step,
                node=self._node,
                timeout_s=self._timeout_s,
                known=self._known,
            )
        return functools.cache(
            lambda: Proposals(
                self._places,
                in_memory,
                step=step,
                writes=self._writes and self._base == 0,
                why=self._nodes.why,
                base=self._base,
                known=self._known if self._base == 0 else None,
            )
        )

    def _next(
        self, listed: Callable[[], Proposals], config: dict[str, Any] | None, reason: str | None
    ) -> tuple[Candidate, dict[str, Any]] | None:
        def propose() -> Any:
            proposals = listed()
            candidate = proposals.next()
            self._said = proposals.manifests(candidate) if self._mending is None else {}
            problems, proposals.problems = proposals.problems, []
            lost = proposals.lost(candidate)
            if candidate is None:
                return [None, None, problems, lost, proposals.steps()]
            before = proposals.record(candidate.incarnation).config
            changes = check_config(before, config, reason=reason, step=candidate.step)
            wire = [
                candidate.incarnation,
                candidate.step,
                candidate.in_memory,
                list(candidate.places),
                candidate.world,
            ]
            return [wire, changes, problems, lost, []]

        wire, changes, problems, lost, self._steps = self._ranks.from_first(
            "choosing a step", propose, timeout_s=self._timeout_s
        )
        for problem in problems:
            self._only_pruned = False
            self._skipped.append(problem)
        for problem in lost:
            if wire is not None or self._skipped:
                self._skipped.append(problem)
            else:  # nothing is passed over for something older: the run begins anew
                warnings.warn(f"everstep: {problem}", RuntimeWarning, stacklevel=3)
        if wire is None:
            return None
        for problem in self._skipped[self._told :]:
            warnings.warn(f"everstep: passed over {problem}", RuntimeWarning, stacklevel=3)
        self._told = len(self._skipped)
        incarnation, number, in_memory, places, world = wire
        return Candidate(incarnation, number, in_memory, tuple(places), world), changes

    def _nothing(self, step: int | None) -> None:
        """There is no candidate (left). A fresh start only if there never was one."""
        if step is not None and (not self._skipped or self._only_pruned):
            raise _no_such_step(step, self._backend.url, self._steps)
        if self._skipped and self._only_pruned:
            raise Pruned(
                "every checkpoint was removed while it was about to be read",
                found="; ".join(self._skipped),
                hint="The run is being written; try again.",
            )
        if self._skipped:
            one = step is not None
            raise Damaged(
                f"step {step} cannot be loaded" if one else "no checkpoint of this run can be loaded",
                found="; ".join(self._skipped),
                expected="a good checkpoint of that step" if one else "one good checkpoint",
                hint="Look with `everstep fsck`; without `step=` the newest good one is loaded."
                if one
                else 'Look with `everstep fsck`; to start again from nothing, open with fresh="why".',
                name=self._backend.url,
            )

    def _skip(self, candidate: Candidate, errors: dict[int, EverstepError]) -> None:
        self._only_pruned &= all(isinstance(error, Pruned) for error in errors.values())
        told = "; ".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items()))
        self._skipped.append(f"step {candidate.step} (incarnation {candidate.incarnation}): {told}")

    # -- reading

    def _open(self, run: RunRecord, candidate: Candidate, stack: ExitStack) -> list[Source]:
        """The holders of the candidate, nearest first."""
        sources: list[Source] = []
        if candidate.in_memory:
            sources += self._nodes.open(candidate, run.chunk_bytes, stack)
        durable, problem = self._open_durable(run, candidate)
        sources += durable
        if problem is not None and not sources:
            raise problem
        return with_near(self._near, sources, run) if self._near is not None else sources

    def _open_durable(
        self, run: RunRecord, candidate: Candidate
    ) -> tuple[list[DurableSource], EverstepError | None]:
        """What the durable tiers that all nodes share have of it, and what is wrong with the first that has not."""
        sources: list[DurableSource] = []
        bases = self._bases(run)
        problem: EverstepError | None = None
        for number in candidate.places:
            try:
                said = self._said.pop(number, None)
                source = open_durable(self._places[number], run, candidate.key, bases, said)
                source.kind = TIER if number else source.kind
                sources.append(source)
            except EverstepError as error:  # the next holder may do
                problem = problem or error
        return sources, problem

    def _bases(self, run: RunRecord) -> Bases:
        """Finds what deltas are based on, wherever it lies."""
        if self._near is None:
            return bases_at(self._places, run.chunk_bytes)
        return bases_near(self._near, self._places, run)


def open_durable(
    backend: Backend,
    run: RunRecord,
    key: Key,
    bases: Bases | None = None,
    manifest: Manifest | None = None,
) -> DurableSource:
    """The checkpoint ``key`` on the backend; ``bases`` finds what it is based on. ``manifest``: the one that counts for
    it, where it was just read. Pruned if it is being removed, Damaged if nothing decides for it."""

    async def read() -> Manifest:
        decision = await read_decision(backend, await list_step(backend, key[1], key[0]))
        if isinstance(decision, Manifest):
            return decision
        raise Pruned(f"step {key[1]} (incarnation {key[0]}) was removed meanwhile", step=key[1])

    return DurableSource(backend, manifest or run_blocking(read()), run.chunk_bytes, bases=bases)


def _no_such_step(step: int, url: str, steps: Sequence[int]) -> NoCheckpoint:
    """``steps``: the newest ones that are there."""
    newest = ", ".join(map(str, steps)) or "none"
    return NoCheckpoint(
        f"no checkpoint of step {step} at {url}",
        found=f"nothing that counts for it; the newest steps that can be loaded: {newest}",
        expected="a committed checkpoint, or a snapshot in memory",
        hint="`everstep ls` shows what is on disk.",
        step=step,
    )
