"""Mending what fsck found, from whoever has it right: the place's own good bytes, other tiers, memory.

Everything that is written is proved first by what points at it: a chunk by the vote's hash, a vote by the manifest's,
a layout by its name, records and decisions by their own hash and by being the same at another place. Objects are
replaced whole, by one atomic step, so that a crash leaves each as it was or mended, and repairing again goes on. What
no holder has right is never removed: the checkpoint is set aside by a decision that hides it from loads and rotation
(:class:`~everstep.format.manifest.Quarantine`), and a later repair that mends it takes that back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from everstep.backends.api import Backend
from everstep.backends.errors import NotFound
from everstep.backends.points import reach
from everstep.errors import Damaged, EverstepError, RunError, SaveFailed, StorageFull, UnknownFormat
from everstep.format import names
from everstep.format.layout import compress, layout_hash, proved
from everstep.format.manifest import Abort, Manifest, Quarantine, decode_decision, encode_decision
from everstep.format.names import Kind as Name
from everstep.format.pin import decode_pin
from everstep.format.records import decode_incarnation, decode_run

from .asking import reading, writing
from .catalog import StepNames, list_step, look_at, open_vote, read_decision, read_numbered
from .commit import publish_decision, try_commit
from .findings import Finding, Kind, Severity
from .memories import NO_MEMORY, Memory
from .mirror import read_small
from .repair_base import ASIDE_MAX, bring_base, directory_of, make_way
from .repair_rank import Share
from .repair_records import counting_below, hiding_record, is_damaged, passed_record
from .runs import now

log = logging.getLogger("everstep.store")

Place = tuple[int, int]
"""(step, incarnation)"""


@dataclass(frozen=True, slots=True)
class Repair:
    """One object that was put right: how, and the bytes that were written for it."""

    name: str
    step: int | None
    incarnation: int | None
    how: str
    nbytes: int = 0


@dataclass(slots=True)
class Repairs:
    """``done``, and by name why something could not be: the objects that nobody has right."""

    done: list[Repair] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


async def repair(
    target: Backend,
    findings: Iterable[Finding],
    *,
    others: Sequence[Backend] = (),
    memory: Memory = NO_MEMORY,
) -> Repairs:
    """Mend at ``target`` what ``findings`` say. ``others`` are further places of the same run, nearest first.

    What cannot be written is told among the failed. Raises CannotTell where ``target`` does not answer: what was mended
    stays mended. A holder that does not answer is passed by.
    """
    work = _Work(target, others, memory)
    damage = [finding for finding in findings if finding.severity is Severity.DAMAGE]
    places: dict[Place, None] = {}
    # What several checkpoints need, once.
    for finding in {finding.name: finding for finding in damage}.values():
        with work.telling(finding.name):
            await work.shared(finding)
    for finding in damage:
        if finding.step is not None and finding.incarnation is not None:
            places[finding.step, finding.incarnation] = None
    for place in places:
        wanted = {finding.name for finding in damage if (finding.step, finding.incarnation) == place}
        with work.telling(names.checkpoint_dir(*place)):
            await work.checkpoint(place, wanted)
    return work.report


class _Work:
    def __init__(self, target: Backend, others: Sequence[Backend], memory: Memory) -> None:
        self.target = target
        self.report = Repairs()
        self._others = others
        self._memory = memory
        self._chunk_bytes: int | None = None

    @contextmanager
    def telling(self, name: str) -> Iterator[None]:
        """One thing that cannot be mended, for want of another or because it cannot be written, keeps no other from it:
        why is told of ``name``, or of what the error names."""
        try:
            yield
        except (Damaged, SaveFailed, StorageFull) as error:
            self.report.failed[str(error.fields.get("name") or name)] = str(error)

    async def shared(self, finding: Finding) -> None:
        """What is not of one rank of a checkpoint."""
        parsed = names.parse(finding.name)
        kind = parsed.kind if parsed is not None else None
        if kind in (Name.RUN, Name.INCARNATION):
            await self.record(finding.name)
        elif kind is Name.LAYOUT:
            await self.layout(finding)
        elif kind is Name.GATHER:
            await self.gather(finding.name)
        elif kind is Name.PIN:
            await self.pin(finding.name)
        elif kind is Name.DECISION and finding.kind is not Kind.UNDECIDED:
            await self.decision(finding)
        elif finding.kind is Kind.UNDECIDED:
            await self.commit(finding)
        elif directory_of(finding.name) not in (None, (finding.step, finding.incarnation)):
            await self.base(finding.name)

    # -- what others have under the same name

    async def record(self, name: str) -> None:
        """run.json, or the record of an incarnation, as another place of the same run has it."""

        def is_good(data: bytes) -> bool:
            if name == names.RUN:
                decode_run(data, name)
            else:
                decode_incarnation(data, name)
            return True

        await self._take(name, is_good, await self._same_run())

    async def pin(self, name: str) -> None:
        """As another place has it, which is rare: each has pins of its own."""

        def is_good(data: bytes) -> bool:
            decode_pin(data, name)
            return True

        if not await self._take(name, is_good, await self._same_run()):
            pin_id = name.rpartition("/")[2].removesuffix(".json")
            why = f"no other place has it; everstep unpin --id {pin_id} lets go of the checkpoint"
            self.report.failed[name] = why

    async def layout(self, finding: Finding) -> None:
        """As another place has it, or a slot of a checkpoint that needs it."""
        name = finding.name
        parsed = names.parse(name)
        assert parsed is not None
        assert parsed.hash is not None
        hash_text = parsed.hash

        def is_good(data: bytes) -> bool:
            proved(data, hash_text, name)
            return True

        if await self._take(name, is_good, self._others):
            return
        if finding.hurts:
            await self._layout_from_memory(finding, hash_text)
        elif await is_damaged(self.target, name):
            await self._set_aside(name)
            self.done(name, f"kept under {names.QUARANTINE}: nothing needs it")

    async def gather(self, name: str) -> None:
        """Gathered votes of a checkpoint that counts are of no use any more."""
        if await is_damaged(self.target, name):
            await self._set_aside(name)
            self.done(name, f"kept under {names.QUARANTINE}: nothing needs it")

    async def _layout_from_memory(self, finding: Finding, hash_text: str) -> None:
        manifest = None
        if finding.step is not None and finding.incarnation is not None:
            manifest = await counting_manifest(self.target, (finding.step, finding.incarnation))
        if manifest is None:
            return
        ranks = {record.rank for record in manifest.ranks if record.layout_hash == hash_text}
        for look in (self._memory.here, self._memory.elsewhere):
            for snapshot in await look(manifest):
                for rank in sorted(ranks & snapshot.ranks):
                    try:
                        encoded = await snapshot.layout_bytes(rank)
                    except EverstepError:
                        continue
                    if layout_hash(encoded) == hash_text:
                        await self.put(finding.name, compress(encoded), f"from {snapshot.label}")
                        return

    async def decision(self, finding: Finding) -> None:
        """As another place has it; else, where its attempt has all its votes, decided anew."""
        name = finding.name
        passed = await passed_record(self.target, name)
        if not isinstance(passed, Manifest) and await self._take_decision(name):
            return
        if passed is not None:
            await self.put(name, encode_decision(passed), "written anew: a later decision counts")
            return
        parsed = names.parse(name)
        assert parsed is not None
        if finding.kind is not Kind.DAMAGED or not await is_damaged(self.target, name):
            return
        if parsed.attempt is not None and await self._complete(parsed):
            await self._set_aside(name)
            self.report.failed.pop(name, None)
            await self.commit(finding)
            return
        found = await hiding_record(self.target, name)
        if found is not None:
            await self._set_aside(name, keep=True)
            await self.put(name, encode_decision(found), f"written anew: {found.reason}")

    async def _take_decision(self, name: str) -> bool:
        """Whether another place has it. What is said against a checkpoint (given up, removed, set aside) is said of
        that place alone: it is taken only where a higher decision counts here."""
        parsed = names.parse(name)
        assert parsed is not None
        assert parsed.step is not None
        assert parsed.incarnation is not None
        assert parsed.attempt is not None
        found = await list_step(self.target, parsed.step, parsed.incarnation)
        higher = tuple([number for number in found.decisions if number > (parsed.attempt or 0)])
        try:
            passed = await read_numbered(self.target, replace(found, decisions=higher)) is not None
        except Damaged:
            passed = False

        def is_good(data: bytes) -> bool:
            return isinstance(decode_decision(data, name), Manifest) or passed

        return await self._take(name, is_good, await self._same_run())

    async def commit(self, finding: Finding) -> None:
        """Decide an attempt whose votes are all in, as another place has it, or anew."""
        parsed = names.parse(finding.name)
        if parsed is None or parsed.step is None or parsed.incarnation is None or parsed.attempt is None:
            return
        if await self._take_decision(finding.name):
            return
        world = await self._complete(parsed)
        if world is None:
            self.report.failed[finding.name] = "the attempt's votes are not all there, or one is damaged"
            return
        try:
            decided = await try_commit(self.target, parsed.step, parsed.incarnation, parsed.attempt, world)
        except Damaged as error:
            self.report.failed[finding.name] = str(error)
            return
        if isinstance(decided, Manifest):
            self.done(finding.name, "committed: all votes are there and agree")
        elif isinstance(decided, Abort):
            self.done(finding.name, f"given up: {decided.reason}")

    async def _complete(self, parsed: names.Parsed) -> int | None:
        """The number of ranks that voted for the attempt, if all of them did, and every vote is right: one that is not
        would have the attempt given up, and what may be mended yet removed."""
        assert parsed.step is not None
        assert parsed.incarnation is not None
        assert parsed.attempt is not None
        place = parsed.step, parsed.incarnation, parsed.attempt
        standing = await look_at(self.target, *place)
        worlds = set()
        for rank in standing.ranks:
            name = names.vote(*place, rank)
            try:
                worlds.add(open_vote(await read_small(self.target, name), name, (*place, rank)).world)
            except (Damaged, NotFound):
                return None
        return len(standing.ranks) if worlds == {len(standing.ranks)} else None

    async def _take(self, name: str, is_good: Callable[[bytes], bool], holders: Sequence[Backend]) -> bool:
        """Write the object as the first of ``holders`` has it that has it right."""
        for holder in holders:
            try:
                data = await read_small(holder, name)
                if not is_good(data):
                    continue
            except (NotFound, RunError):
                continue
            await self.put(name, data, f"from {holder.url}")
            return True
        self.report.failed[name] = "no other place has it"
        return False

    async def put(self, name: str, data: bytes, how: str) -> None:
        await make_way(self.target, name)
        reach("repair.put.before", name)
        with writing(self.target, name):
            await self.target.write(name, data)
        reach("repair.put.after", name)
        self.done(name, how, len(data))

    def done(self, name: str, how: str, nbytes: int = 0) -> None:
        parsed = names.parse(name)
        place = (parsed.step, parsed.incarnation) if parsed is not None else (None, None)
        self.report.failed.pop(name, None)
        self.report.done.append(Repair(name, *place, how, nbytes))

    async def _set_aside(self, name: str, *, keep: bool = False) -> None:
        """Keep a damaged object under another name; unless it is to ``keep`` its own, too, until that is written anew,
        it is removed."""
        if await make_way(self.target, name):
            return
        data = await read_small(self.target, name)
        for number in range(1, ASIDE_MAX + 1):
            aside = names.aside(name, number)
            try:
                if await read_small(self.target, aside) == data:
                    break
            except Damaged:
                continue
            except NotFound:
                with writing(self.target, aside):
                    await self.target.write(aside, data)
                break
        reach("repair.aside", name)
        if keep:
            return
        with writing(self.target, name):
            await self.target.delete([name])

    async def _same_run(self) -> Sequence[Backend]:
        """The other places that are known to be this very run: by its id, or, where run.json is damaged here, by a
        decision that is the same at both."""
        found = []
        mine = await self._run_id(self.target)
        for other in self._others:
            with suppress(RunError, NotFound):
                theirs = await self._run_id(other)
                if theirs is not None and (theirs == mine if mine is not None else await self._shares(other)):
                    found.append(other)
        return found

    async def _run_id(self, place: Backend) -> str | None:
        with suppress(Damaged, NotFound):
            run = decode_run(await read_small(place, names.RUN), names.RUN)
            self._chunk_bytes = self._chunk_bytes or run.chunk_bytes
            return run.run_id
        return None

    async def _shares(self, other: Backend) -> bool:
        """Whether a decision or incarnation's record is the same at both."""
        for prefix in (names.INCARNATIONS, names.CHECKPOINTS):
            with reading(self.target, prefix):
                async for item in self.target.list(prefix):
                    parsed = names.parse(item.name)
                    if parsed is None or parsed.kind not in (Name.DECISION, Name.INCARNATION):
                        continue
                    with suppress(NotFound, RunError):
                        if await read_small(self.target, item.name) == await read_small(other, item.name):
                            return True
        return False

    async def base(self, name: str) -> None:
        """A checkpoint that a delta stands on and that does not count, called by its directory."""
        place = directory_of(name)
        assert place is not None
        found = await bring_base(self.target, await self._same_run(), place)
        if isinstance(found, str):
            self.report.failed[name] = found
        else:
            self.report.done.append(Repair(name, *place, f"from {found[0]}", found[1]))

    # -- a checkpoint that counts

    async def checkpoint(self, place: Place, wanted: set[str]) -> None:
        """Votes, layouts, states and images of the checkpoint, so far as ``wanted`` names them."""
        manifest = await counting_manifest(self.target, place)
        if manifest is None:
            return
        if self._chunk_bytes is None:
            await self._run_id(self.target)
        attempt = names.attempt_dir(*place, manifest.attempt) + "/"
        for record in manifest.ranks:
            mine = {name for name in wanted if name.startswith(attempt) and _rank_of(name) == record.rank}
            if mine:
                places = [self.target, *self._others]
                share = Share(places, manifest, record, self._memory, self._chunk_bytes)
                try:
                    failed = await share.mend(mine)
                finally:
                    for name, how, nbytes in share.mended:
                        self.done(name, how, nbytes)
                self.report.failed.update(failed)


def _rank_of(name: str) -> int | None:
    parsed = names.parse(name)
    return None if parsed is None or parsed.kind is Name.GATHER else parsed.rank


async def counting_manifest(place: Backend, where: Place) -> Manifest | None:
    """The manifest that counts, or would if the checkpoint were not in quarantine."""
    numbered = await counting_below(place, await list_step(place, *where))
    return None if numbered is None else numbered[1]


async def quarantine(place: Backend, manifest: Manifest, reason: str) -> bool:
    """Set a checkpoint aside that cannot be mended; whether it is, now: not where it does not count any more."""
    found = await list_step(place, manifest.step, manifest.incarnation)
    try:
        stands = await read_decision(place, found)
    except (Damaged, UnknownFormat):
        return False
    if not isinstance(stands, Manifest) or stands.attempt != manifest.attempt:
        return False
    number = max(found.decisions) + 1
    record = Quarantine(manifest.step, manifest.incarnation, number, reason, now())
    reach("repair.quarantine.before", names.checkpoint_dir(*found.place))
    return await publish_decision(place, record, number) is None


async def release(place: Backend, manifest: Manifest, found: StepNames) -> bool:
    """Take a quarantine back, which is the last that ``found`` names: the manifest counts again, as a revision above
    it. Whether it does: not where another process decided something meanwhile."""
    number = max(found.decisions) + 1
    reach("repair.release.before", names.checkpoint_dir(*found.place))
    return await publish_decision(place, replace(manifest, revision=number), number) is None
