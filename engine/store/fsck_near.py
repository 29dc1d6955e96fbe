"""Proving a node's own tier (:mod:`.staged`): shares of attempts without decisions, each proved by its vote.

Nothing is decided there, and nothing written but objects that are mended: a vote by what the root's manifest says of
it, an image's object chunk by chunk, a layout by its name. Shares come and go while the node is at work: what has no
vote is not whole yet, or not any more, and is no damage.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from everstep.backends.api import Backend
from everstep.backends.errors import NotFound
from everstep.errors import CannotTell, Damaged, EverstepError, Pruned, RunError, UnknownFormat
from everstep.format import names
from everstep.format.layout import Layout
from everstep.format.manifest import Manifest
from everstep.format.vote import ImageRecord, Vote, VoteHeader, header_of

from .asking import reading
from .catalog import StepNames, list_steps, read_decision_at, read_vote, voted_ranks
from .commit import make_manifest
from .findings import Finding, Kind, Severity
from .fsck import Progress, Seen
from .fsck_images import Extent, Images
from .proving import check_size
from .runs import incarnation_numbers, open_run
from .sources import DurableSource

NODE_SCOPE = "node"


async def is_node_tier(place: Backend) -> bool:
    """Whether ``place`` is what a node's own tier looks like: shares, but no decision, nor any incarnation's record,
    which every other place of a run has from its beginning. A place that does not answer is none: checking it tells."""
    try:
        if await incarnation_numbers(place):
            return False
        steps = await list_steps(place)
    except CannotTell:
        return False
    return bool(steps) and not any(found.decisions for found in steps)


class _NearSource(DurableSource):
    """Of ranks whose votes are there: they go first where shares are removed."""

    async def check_image(self, rank: int, image: str) -> None:
        record, name = (await self.records(rank))[image], self.locate(rank, image)
        check_size(name, await self.size(name), record.object.nbytes)

    async def _raise_if_pruned(self) -> None:
        place = self.step, self.incarnation, self.manifest.attempt
        if not self.ranks <= set(await voted_ranks(self.backend, *place)):
            raise Pruned(f"step {self.step} was removed from the node's tier meanwhile", step=self.step)


class _NearImages(Images):
    """Objects as they are stored: what a delta is decoded with may lie elsewhere, and is proved there."""

    def _coverage(self, source: DurableSource, layouts: list[Layout]) -> list[EverstepError]:
        return []  # a node has its own ranks' shares

    async def _chunks(
        self, source: DurableSource, rank: int, record: ImageRecord, name: str
    ) -> list[EverstepError]:
        return [] if record.stored is not None else await super()._chunks(source, rank, record, name)


async def check_near(
    near: Backend,
    others: Sequence[Backend],
    *,
    step: int | None = None,
    extent: Extent,
    progress: Progress | None = None,
    seen: Seen | None = None,
) -> AsyncIterator[Finding]:
    """Check a node's own tier. ``others`` are the run's further places, whose manifests prove its votes; ``seen`` gets
    the bytes of images that were read, and that were not. Raises NotARun, UnknownFormat."""
    yield Finding(
        Severity.INFO,
        Kind.NODE_TIER,
        "",
        None,
        None,
        "a node's own tier: shares on their way to the root, and no decisions; its objects are checked by their votes",
    )
    chunk_bytes = None
    try:
        chunk_bytes = (await open_run(near)).chunk_bytes
    except Damaged as error:
        yield _damage(error, names.RUN, None)
    except CannotTell as error:
        yield _cannot_tell(error, names.RUN, None)
    images = _NearImages(near, chunk_bytes, extent, progress)
    for found in reversed(await list_steps(near)):
        if step not in (None, found.step):
            continue
        for attempt in found.attempts:
            try:
                async for finding in _attempt(near, others, found, attempt, images):
                    yield finding
            except CannotTell as error:
                yield _cannot_tell(error, names.attempt_dir(*found.place, attempt), found)
    if seen is not None:
        seen.proved_bytes, seen.unread_bytes = images.proved_bytes, images.unread_bytes


async def _attempt(
    near: Backend, others: Sequence[Backend], found: StepNames, attempt: int, images: Images
) -> AsyncIterator[Finding]:
    place = *found.place, attempt
    votes = await shares_at(near, others, found, attempt)
    for error in votes.errors:
        yield _damage(error, names.attempt_dir(*place), found)
    if votes.manifest is not None:
        images.expect(votes.manifest)
        told: set[str] = set()
        async for error in images.check(_NearSource(near, votes.manifest, images.chunk_bytes or 1)):
            make = _cannot_tell if isinstance(error, CannotTell) else _damage
            finding = make(error, names.attempt_dir(*place), found)
            if finding.name not in told:
                told.add(finding.name)
                yield finding
    parsed = [names.parse(f"{names.attempt_dir(*place)}/{child}") for child in await _children(near, place)]
    ranks = {one.rank for one in parsed if one is not None and one.kind is names.Kind.VOTE}
    if any(one is not None and one.rank not in ranks for one in parsed):
        message = "shares without a vote: being written, or removed in part"
        name = names.attempt_dir(*place)
        yield Finding(Severity.INFO, Kind.LEFTOVER, name, found.step, found.incarnation, message)


async def _children(near: Backend, place: tuple[int, int, int]) -> list[str]:
    with reading(near, names.attempt_dir(*place)):
        return await near.list_names(names.attempt_dir(*place))


@dataclass(slots=True)
class Shares:
    """The shares of one attempt. ``manifest`` has the ranks whose votes are there, None if none is that can be proved;
    ``errors`` are votes that are damaged, and that no place's manifest proves."""

    manifest: Manifest | None = None
    errors: list[EverstepError] = field(default_factory=list)


async def shares_at(near: Backend, others: Sequence[Backend], found: StepNames, attempt: int) -> Shares:
    """What lies of the attempt in the node's tier: by the manifest of the first of ``others`` that has one, else by the
    votes themselves. Raises CannotTell."""
    voted = await voted_ranks(near, *found.place, attempt)
    for other in others:
        with suppress(RunError):
            decision = await read_decision_at(other, *found.place, attempt)
            if isinstance(decision, Manifest) and decision.attempt == attempt:
                known = tuple([record for record in decision.ranks if record.rank in voted])
                return Shares(replace(decision, ranks=known) if known else None)
    shares = Shares()
    first: Vote | None = None
    headers: list[VoteHeader] = []
    for rank in voted:
        try:
            data, vote = await read_vote(near, *found.place, attempt, rank)
        except NotFound:
            continue  # removed meanwhile
        except (Damaged, UnknownFormat) as error:
            shares.errors.append(error)
        else:
            first = first or vote
            headers.append(header_of(vote, data))
    if first is not None:
        shares.manifest = make_manifest(first, headers, NODE_SCOPE)
    return shares


def _damage(error: EverstepError, name: str, found: StepNames | None) -> Finding:
    kind = Kind.MISSING if "is missing" in error.message else Kind.DAMAGED
    return _finding(Severity.DAMAGE, kind, error, name, found)


def _cannot_tell(error: EverstepError, name: str, found: StepNames | None) -> Finding:
    return _finding(Severity.CANNOT_TELL, Kind.CANNOT_TELL, error, name, found)


def _finding(
    severity: Severity, kind: Kind, error: EverstepError, name: str, found: StepNames | None
) -> Finding:
    """It hurts no checkpoint: loads take from the root what is not right here."""
    at = str(error.fields.get("name") or name)
    step, incarnation = (None, None) if found is None else found.place
    return Finding(severity, kind, at, step, incarnation, str(error).removeprefix(f"{at}: "))
