"""What can be loaded: the snapshots in this node's arenas, the checkpoints on disk, and the lineage that says
which of them count. Reading only; nothing is written."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .backends.api import Backend
from .backends.errors import BackendError
from .backends.parallel import both, together
from .errors import Damaged, EverstepError, NotARun, Pruned
from .format import names as file_names
from .format.manifest import Decision, Manifest
from .format.names import RUN
from .format.records import IncarnationRecord, RunRecord
from .memory.arena import Arena
from .memory.directory import find_arenas
from .plan.lineage import Lineage
from .store.blocking import run_blocking
from .store.catalog import StepNames, complete_undecided, list_step, list_steps, read_decision, read_vote
from .store.commit import try_commit
from .store.holdings import Key as Key
from .store.runs import open_run, read_incarnations

COMMIT_GRACE_S = 2.0
"""How long a reader waits for the manifest of an attempt whose votes are all in."""
COMMIT_POLL_S = 0.05
STEPS_TOLD_MAX = 10
"""How many steps are named to whoever asks for one that is not there."""

FALL_BACK = (Damaged, Pruned)
"""Errors of a checkpoint itself, after which an older one is tried. Others (a state that does not fit, storage
that does not answer) end the load."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A step that may be loaded, where it lies, and how many ranks wrote it. ``places`` are the durable tiers that have
    it, nearest first: 0 is the root, then come the further ones."""

    incarnation: int
    step: int
    in_memory: bool
    places: tuple[int, ...]
    world: int

    @property
    def key(self) -> Key:
        return self.incarnation, self.step


def find_run(backend: Backend) -> RunRecord | None:
    """The run's record, or None where there is none yet. Everything else (unreadable, damaged, newer, a root that
    can be no run) raises."""
    try:
        return run_blocking(open_run(backend))
    except NotARun as error:
        if error.expected != RUN:
            raise
        return None


@contextlib.contextmanager
def open_arenas(directory: Path, kept: Sequence[Arena] = ()) -> Iterator[list[Arena]]:
    """All readable arenas in ``directory``, and ``kept``, which stay the caller's; closed at the end."""
    with contextlib.ExitStack() as stack:
        found = list(kept)
        for info in find_arenas(directory):
            if info.path is not None:
                with contextlib.suppress(FileNotFoundError, EverstepError):
                    found.append(stack.enter_context(Arena.attach(info.path)))
        yield found


class Proposals:
    """Candidates of a run, newest first; rank 0 asks, all ranks load. ``in_memory`` says whose snapshots lie in the
    arenas of all nodes together, or can be rebuilt: a step is complete there if they are all the ranks that wrote it;
    ``why`` says more of one that is not. ``places`` are the root and the further tiers; the run's records are read
    from ``base``, one of them, unless they are ``known``. ``problems`` gathers what was passed over, ``lost`` what
    memory has, but not of every rank."""

    def __init__(
        self,
        places: Sequence[Backend],
        in_memory: Mapping[Key, Collection[int]],
        *,
        step: int | None,
        writes: bool,
        why: Callable[[Key], str] = lambda key: "",
        base: int = 0,
        known: dict[int, IncarnationRecord] | None = None,
    ) -> None:
        self._backend = places[0]
        self._writes = writes
        self._why = why
        self.problems: list[str] = []
        self._manifests: dict[tuple[Key, int], Manifest] = {}
        self._names: dict[Key, StepNames]
        self._farther: dict[int, tuple[Backend, dict[Key, StepNames]]] = {}
        self.records = run_blocking(self._look(places, base, known))
        worlds = {record.number: record.world for record in self.records}
        self._in_memory = {
            key for key, ranks in in_memory.items() if set(ranks) == set(range(worlds.get(key[0], 0)))
        }
        self._counting = set(self._wanted(None))
        self._keys = iter(self._wanted(step))
        self._lost = self._incomplete(in_memory, worlds, step)

    async def _look(
        self, places: Sequence[Backend], base: int, known: dict[int, IncarnationRecord] | None
    ) -> list[IncarnationRecord]:
        """The run's records, and what all places list, side by side. A root that lost its run is not asked: what lies
        there, if anything, has no record. A further tier that cannot be asked is told, and has nothing."""

        async def listed(place: Backend) -> dict[Key, StepNames]:
            return {found.key: found for found in await list_steps(place)}

        async def farther(place: Backend) -> dict[Key, StepNames] | Exception:
            try:
                return await listed(place)
            except (EverstepError, BackendError) as error:
                return error

        async def root() -> dict[Key, StepNames]:
            return await listed(places[0]) if base == 0 else {}

        records, (self._names, others) = await both(
            read_incarnations(places[base], known), both(root(), together(map(farther, places[1:])))
        )
        for number, found in enumerate(others, 1):
            if isinstance(found, Exception):
                self.problems.append(f"what {places[number].url} has: {found}")
            else:
                self._farther[number] = places[number], found
        return records

    def _wanted(self, step: int | None) -> list[Key]:
        known = {record.number for record in self.records}
        farther = {key for _, names in self._farther.values() for key in names}
        orphans = sorted({key[0] for key in self._names} - known)
        if orphans:
            raise Damaged(
                f"the record of incarnation {orphans[0]} is missing, but checkpoints of it are there",
                found=f"records {sorted(known)}",
                expected=f"a record of incarnation {orphans[0]}",
                hint="Restore it from a copy of the run; without it the run's lineage is not known.",
                name=file_names.incarnation(orphans[0]),
            )
        if not self.records:
            return []
        lineage = Lineage(self.records)
        keys = [
            key
            for key in self._names.keys() | farther | self._in_memory
            if key[0] in known and lineage.counts(*key)
        ]
        return sorted((key for key in keys if step is None or key[1] == step), reverse=True)

    def next(self) -> Candidate | None:
        """The next older candidate; None when there is no more."""
        for key in self._keys:
            places = self._places(key)
            if places or key in self._in_memory:
                self._commit_older(key)
                return Candidate(
                    *key,
                    in_memory=key in self._in_memory,
                    places=places,
                    world=self.record(key[0]).world,
                )
        return None

    def _places(self, key: Key) -> tuple[int, ...]:
        """The durable tiers where a manifest counts for it. A removal at the root says nothing of the others."""
        found = [0] if self._decided(self._names.get(key)) else []
        for number, (place, names) in self._farther.items():
            try:
                if key in names and self._noted(key, number, run_blocking(read_decision(place, names[key]))):
                    found.append(number)
            except (EverstepError, BackendError) as error:
                self.problems.append(f"step {key[1]} (incarnation {key[0]}) at {place.url}: {error}")
        return tuple(found)

    def steps(self) -> list[int]:
        """The newest steps that count and are whole, newest first; of at most STEPS_TOLD_MAX keys."""
        found: dict[int, None] = {}
        for key in sorted(self._counting, reverse=True)[:STEPS_TOLD_MAX]:
            if key in self._in_memory or self._places(key):
                found[key[1]] = None
        return list(found)

    def lost(self, chosen: Candidate | None) -> list[str]:
        """What is newer than ``chosen`` in memory, but lacks ranks; told once."""
        told = [text for key, text in self._lost if chosen is None or key > chosen.key]
        self._lost = []
        return told

    def _incomplete(
        self, in_memory: Mapping[Key, Collection[int]], worlds: Mapping[int, int], step: int | None
    ) -> list[tuple[Key, str]]:
        """The newest step of each incarnation of which memory has something, but no step whole: a node is gone,
        or lost its memory. (That some ranks are a step ahead of the others is no loss.)"""
        if not self.records:
            return []
        lineage = Lineage(self.records)
        whole = {incarnation for incarnation, _ in self._in_memory}
        newest: dict[int, Key] = {}
        for key in in_memory:
            wanted = key[0] in worlds and lineage.counts(*key) and (step is None or key[1] == step)
            if wanted and key[0] not in whole:
                newest[key[0]] = max(key, newest.get(key[0], key))
        told = []
        for key in newest.values():
            missing = sorted(set(range(worlds[key[0]])) - set(in_memory[key]))
            reason = self._why(key)
            text = f"step {key[1]} (incarnation {key[0]}): no node's memory has rank(s) {missing} of it"
            told.append((key, f"{text}: {reason}" if reason else text))
        return told

    def _commit_older(self, chosen: Key) -> None:
        """Below the chosen step a crash may have left attempts with all votes and no decision. Nobody comes by
        them again, fsck calls them damage, and rotation keeps its hands off: so a writer decides them here."""
        if not self._writes:
            return
        told = len(self.problems)
        for key, names in self._names.items():
            if key < chosen and key in self._counting and set(names.attempts) - set(names.decisions):
                with contextlib.suppress(EverstepError):  # the step that is loaded does not depend on it
                    self._decided(names)
        del self.problems[told:]

    def record(self, incarnation: int) -> IncarnationRecord:
        return next(record for record in self.records if record.number == incarnation)

    def _decided(self, names: StepNames | None) -> bool:
        """Whether a manifest counts for it. A damaged or lost one is a problem that is told, never a silence."""
        if names is None:
            return False
        try:
            decision = run_blocking(read_decision(self._backend, names))
            if decision is None:
                decision = self._undecided(names)
        except FALL_BACK as error:
            self.problems.append(f"step {names.step} (incarnation {names.incarnation}): {error}")
            return False
        return self._noted(names.key, 0, decision)

    def _noted(self, key: Key, number: int, decision: Decision | None) -> bool:
        """Whether it is a manifest, which :meth:`manifests` then gives."""
        if isinstance(decision, Manifest):
            self._manifests[key, number] = decision
        return isinstance(decision, Manifest)

    def manifests(self, chosen: Candidate | None) -> dict[int, Manifest]:
        """By place, what was read to find that ``chosen`` counts there."""
        if chosen is None:
            return {}
        return {number: self._manifests[chosen.key, number] for number in chosen.places}

    def _undecided(self, names: StepNames) -> Manifest | None:
        """All votes are in, but no decision: a crash hit the instant between, or the manifest was lost. The votes
        prove everything, so a writer commits it, as any agent would have."""
        attempts = run_blocking(complete_undecided(self._backend, names))
        if not attempts:
            return None
        manifest = file_names.decision(names.step, names.incarnation, attempts[-1])
        told = f"step {names.step} (incarnation {names.incarnation}): all votes are in, but {manifest} is missing"
        if not self._writes:
            decision = self._wait_for_commit(names)
            if decision is not None:
                return decision if isinstance(decision, Manifest) else None
            self.problems.append(f"{told}; a training run that loads here commits it")
            return None
        world = run_blocking(read_vote(self._backend, names.step, names.incarnation, attempts[-1], 0))[
            1
        ].world
        decided = run_blocking(try_commit(self._backend, names.step, names.incarnation, attempts[-1], world))
        self.problems.append(
            f"{told}; committed now" if isinstance(decided, Manifest) else f"{told}; given up"
        )
        return decided if isinstance(decided, Manifest) else None

    def _wait_for_commit(self, names: StepNames) -> Decision | None:
        """In a live run the manifest follows the last vote within moments."""
        until = time.monotonic() + COMMIT_GRACE_S
        while time.monotonic() < until:
            time.sleep(COMMIT_POLL_S)
            now = run_blocking(list_step(self._backend, names.step, names.incarnation))
            decision = run_blocking(read_decision(self._backend, now))
            if decision is not None or not run_blocking(complete_undecided(self._backend, now)):
                return decision
        return None


def is_durable(backend: Backend, key: Key) -> bool:
    """Whether a manifest counts for the checkpoint."""

    async def read() -> bool:
        found = await list_step(backend, key[1], key[0])
        return isinstance(await read_decision(backend, found), Manifest)

    try:
        return run_blocking(read())
    except FALL_BACK:
        return False
