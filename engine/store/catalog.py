"""What lies in a run, by name; and the decision that counts for a checkpoint.

An uncached listing proposes; decisions decide; the lineage chooses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from everstep.backends.api import Backend
from everstep.backends.errors import NotFound
from everstep.errors import Damaged, Pruned
from everstep.format import names
from everstep.format.layout import Layout, open_layout
from everstep.format.manifest import Abort, Decision, Manifest, Quarantine, Tombstone, decode_decision
from everstep.format.vote import Vote, decode_vote

from .asking import SMALL_BYTES_MAX, each, reading

FLAT_ITEMS_MAX = 4000
"""Objects of a flat store that are listed to find all checkpoints; a run that has more is listed by its directories."""

READ_TRIES_MAX = 4
"""How often a checkpoint's directory is listed again when a listed decision has vanished meanwhile."""


@dataclass(frozen=True, slots=True)
class StepNames:
    """One checkpoint's directory: its decisions' and attempts' numbers, ascending."""

    step: int
    incarnation: int
    decisions: tuple[int, ...]
    attempts: tuple[int, ...]

    @property
    def key(self) -> tuple[int, int]:
        """(incarnation, step): the order of a lineage."""
        return self.incarnation, self.step

    @property
    def place(self) -> tuple[int, int]:
        """(step, incarnation): the order of names."""
        return self.step, self.incarnation

    @classmethod
    def of(cls, step: int, incarnation: int, children: Iterable[str]) -> StepNames:
        """From the names in the directory."""
        some = list(children)
        decisions = {number for child in some if (number := names.parse_decision(child)) is not None}
        attempts = {number for child in some if (number := names.parse_attempt(child)) is not None}
        return cls(step, incarnation, tuple(sorted(decisions)), tuple(sorted(attempts)))


@dataclass(frozen=True, slots=True)
class Standing:
    """What is there of one attempt: its checkpoint's names, the ranks whose votes are there, and those after which
    gathers of votes are named; both ascending."""

    names: StepNames
    ranks: tuple[int, ...]
    gathers: tuple[int, ...]


async def list_steps(backend: Backend, *, empty: bool = False) -> list[StepNames]:
    """All checkpoints' directories, newest (incarnation, step) last. Names that are not ours are left out,
    and (but for ``empty``) directories without decisions and attempts, which a crash may leave."""
    found = await _flat_steps(backend) if backend.capabilities.flat else None
    if found is None:
        found = await _steps_by_directory(backend)
    return sorted([one for one in found if empty or one.decisions or one.attempts], key=lambda one: one.key)


async def _flat_steps(backend: Backend) -> list[StepNames] | None:
    """From one listing of all that lies below; None where that is too much."""
    found: dict[tuple[int, int], set[str]] = {}
    count = 0
    with reading(backend, names.CHECKPOINTS):
        async for item in backend.list(names.CHECKPOINTS):
            count += 1
            if count > FLAT_ITEMS_MAX:
                return None
            _, *place = item.name.split("/", 4)
            step = names.parse_step(place[0])
            incarnation = names.parse_incarnation(place[1]) if len(place) > 2 else None
            if step is not None and incarnation is not None:
                found.setdefault((step, incarnation), set()).add(place[2])
    return [StepNames.of(*key, children) for key, children in found.items()]


async def _steps_by_directory(backend: Backend) -> list[StepNames]:
    with reading(backend, names.CHECKPOINTS):
        children = await backend.list_names(names.CHECKPOINTS)
    steps = [step for child in children if (step := names.parse_step(child)) is not None]

    async def of_step(step: int) -> list[StepNames]:
        with reading(backend, names.step_dir(step)):
            inner = await backend.list_names(names.step_dir(step))
        numbers = [number for child in inner if (number := names.parse_incarnation(child)) is not None]
        return [await list_step(backend, step, number) for number in numbers]

    return [found for some in await each(steps, of_step) for found in some]


async def list_step(backend: Backend, step: int, incarnation: int) -> StepNames:
    """One checkpoint's directory; empty where there is none."""
    directory = names.checkpoint_dir(step, incarnation)
    with reading(backend, directory):
        children = await backend.list_names(directory)
    return StepNames.of(step, incarnation, children)


async def look_at(backend: Backend, step: int, incarnation: int, attempt: int) -> Standing:
    """What is there of one attempt, in one listing where the store is flat. Votes are seen no later than decisions."""
    if not backend.capabilities.flat:
        ranks, gathers = await voted(backend, step, incarnation, attempt)
        return Standing(await list_step(backend, step, incarnation), tuple(ranks), tuple(gathers))
    directory = names.checkpoint_dir(step, incarnation)
    children: set[str] = set()
    inner: list[str] = []
    with reading(backend, directory):
        async for item in backend.list(directory):
            child, _, rest = item.name[len(directory) + 1 :].partition("/")
            children.add(child)
            if names.parse_attempt(child) == attempt:
                inner.append(rest)
    found = StepNames.of(step, incarnation, children)
    return Standing(found, *map(tuple, _votes_in(inner)))


async def read_decision_at(backend: Backend, step: int, incarnation: int, number: int) -> Decision | None:
    """Decision ``number`` of the checkpoint; None if there is none. Raises Damaged, UnknownFormat,
    CannotTell."""
    name = names.decision(step, incarnation, number)
    try:
        with reading(backend, name):
            data = await backend.read(name, SMALL_BYTES_MAX)
    except NotFound:
        return None
    return decode_decision(data, name)


async def read_decision(backend: Backend, found: StepNames) -> Manifest | Tombstone | Quarantine | None:
    """The decision that counts: the highest that is no abort record; None where nothing was decided.

    A decision that vanishes between listing and reading (rotation at work) makes it list again. Raises
    Damaged, UnknownFormat, CannotTell: a decision that cannot be read hides whatever lies below it.
    """
    numbered = await read_numbered(backend, found)
    return None if numbered is None else numbered[1]


async def read_numbered(
    backend: Backend, found: StepNames
) -> tuple[int, Manifest | Tombstone | Quarantine] | None:
    """As :func:`read_decision`, with the number under which the decision is stored."""
    for _ in range(READ_TRIES_MAX):
        for number in reversed(found.decisions):
            decision = await read_decision_at(backend, found.step, found.incarnation, number)
            if decision is None:
                break
            if not isinstance(decision, Abort):
                return number, decision
        else:
            return None
        found = await list_step(backend, found.step, found.incarnation)
    name = names.checkpoint_dir(found.step, found.incarnation)
    raise Damaged(
        f"{name}: decisions are listed that cannot be read",
        found=f"decisions {list(found.decisions)}, gone when read",
        expected="every listed decision",
        name=name,
    )


async def require_standing(backend: Backend, step: int, incarnation: int) -> Manifest:
    """The manifest of a checkpoint that must still be there: what whoever comes to depend on one asks after
    having published that. Raises Pruned if rotation was first, Damaged, CannotTell."""
    decision = await read_decision(backend, await list_step(backend, step, incarnation))
    if isinstance(decision, Manifest):
        return decision
    raise Pruned(
        f"step {step} of incarnation {incarnation} was removed by rotation meanwhile",
        found="nothing decided" if decision is None else f"it is given up: {decision.reason}",
        expected="its manifest",
        hint="Load again: a newer checkpoint is there",
        step=step,
    )


async def read_vote(
    backend: Backend, step: int, incarnation: int, attempt: int, rank: int
) -> tuple[bytes, Vote]:
    """One vote, as stored and decoded, checked against its name. Raises NotFound, Damaged, CannotTell."""
    name = names.vote(step, incarnation, attempt, rank)
    with reading(backend, name):
        data = await backend.read(name)
    return data, open_vote(data, name, (step, incarnation, attempt, rank))


def open_vote(data: bytes, name: str, place: tuple[int, int, int, int]) -> Vote:
    """The vote, checked against its (step, incarnation, attempt, rank). Raises Damaged."""
    vote = decode_vote(data, name)
    found = (vote.step, vote.incarnation, vote.attempt, vote.rank)
    if found != place:
        raise Damaged(
            f"{name} is the vote of another place",
            found=f"(step, incarnation, attempt, rank) {found}",
            expected=f"{place}",
            name=name,
        )
    return vote


async def voted_ranks(backend: Backend, step: int, incarnation: int, attempt: int) -> list[int]:
    """The ranks whose votes of the attempt are there, ascending."""
    return (await voted(backend, step, incarnation, attempt))[0]


async def voted(backend: Backend, step: int, incarnation: int, attempt: int) -> tuple[list[int], list[int]]:
    """The ranks whose votes of the attempt are there, and those after which gathers of votes are named; both
    ascending."""
    directory = names.attempt_dir(step, incarnation, attempt)
    with reading(backend, directory):
        children = await backend.list_names(directory)
    return _votes_in(children)


def _votes_in(children: list[str]) -> tuple[list[int], list[int]]:
    ranks = [rank for child in children if (rank := names.parse_vote(child)) is not None]
    gathers = [rank for child in children if (rank := names.parse_gather(child)) is not None]
    return sorted(ranks), sorted(gathers)


async def complete_undecided(backend: Backend, found: StepNames) -> tuple[int, ...]:
    """Attempts with all their votes but no decision: what a lost manifest looks like. (A crash leaves it only
    between the last vote and the commit.) Such a checkpoint can be committed still."""
    complete = []
    for attempt in found.attempts:
        if attempt in found.decisions:
            continue
        ranks = await voted_ranks(backend, found.step, found.incarnation, attempt)
        for rank in ranks:  # the first one that can be read; others may be damaged, and mended yet
            try:
                _, vote = await read_vote(backend, found.step, found.incarnation, attempt, rank)
            except (NotFound, Damaged):
                continue
            if ranks == list(range(vote.world)):
                complete.append(attempt)
            break
    return tuple(complete)


async def read_layouts(backend: Backend, hashes: set[str]) -> dict[str, Layout]:
    """The layouts of these hashes, verified. Raises Damaged (missing, or other bytes), CannotTell."""
    ordered = sorted(hashes)

    async def one(hash_text: str) -> Layout:
        return await read_layout(backend, hash_text)

    return dict(zip(ordered, await each(ordered, one), strict=True))


async def read_layout(backend: Backend, hash_text: str) -> Layout:
    """One layout, verified against its name."""
    return await decode_layout(await read_layout_bytes(backend, hash_text), hash_text)


async def read_layout_bytes(backend: Backend, hash_text: str) -> bytes:
    """One layout as it is stored; not verified."""
    name = names.layout(hash_text)
    try:
        with reading(backend, name):
            return await backend.read(name, SMALL_BYTES_MAX)
    except NotFound:
        raise Damaged(f"{name} is missing", found="nothing", expected="a layout", name=name) from None


async def decode_layout(data: bytes, hash_text: str) -> Layout:
    """What :func:`read_layout_bytes` gave, verified. A large one takes a while; the loop has other things to do."""
    return await asyncio.to_thread(open_layout, data, hash_text, names.layout(hash_text))
