"""What the ranks of an attempt said, read in bulk: headers of votes, and layouts against each other.

A node's agent gathers the headers of its ranks' votes into one object when the job is large, so that whoever
commits reads few objects. Votes remain the truth: a gather that is missing, damaged or incomplete is made up for by
the votes that it lacks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

from everstep.backends.api import Backend
from everstep.backends.errors import Conflict, NotFound
from everstep.errors import Damaged, UnknownFormat, UnsupportedValue
from everstep.format import names
from everstep.format.gather import decode_gather, encode_gather, gather_bytes_max
from everstep.format.table import Table, TableReader
from everstep.format.vote import HEADER_BYTES, Vote, VoteHeader, header_of
from everstep.plan.coverage import Coverage

from .asking import SMALL_BYTES_MAX, each, reading, writing
from .catalog import read_vote

log = logging.getLogger("everstep.store")

GATHER_WORLD_MIN = 64
"""Ranks from which on votes are gathered; a smaller job's are few enough to be read one by one."""

LAYOUTS_AT_ONCE = 256
"""Layouts in memory while all ranks' are compared."""


async def gather_votes(
    backend: Backend, step: int, incarnation: int, attempt: int, ranks: Sequence[int]
) -> bool:
    """Gather the votes of these ranks (ascending, all of them are there); whether it was done. Nothing depends on
    it. Raises CannotTell, SaveFailed, StorageFull."""

    async def one(rank: int) -> bytes:
        name = names.vote(step, incarnation, attempt, rank)
        header = bytearray(HEADER_BYTES)
        with reading(backend, name):
            await backend.read_into(name, 0, memoryview(header))
        return bytes(header)

    try:
        data = encode_gather(await each(ranks, one))
    except (NotFound, Damaged, UnknownFormat, UnsupportedValue) as error:
        log.warning("step %d: the node's votes are not gathered: %s", step, error)
        return False
    name = names.gather(step, incarnation, attempt, ranks[0])
    try:
        with writing(backend, name, step=step):
            await backend.create(name, data)
    except Conflict:
        return False
    return True


async def read_gather(
    backend: Backend, step: int, incarnation: int, attempt: int, rank: int
) -> list[VoteHeader]:
    """The headers in the gather that is named after ``rank``. Raises NotFound, Damaged, UnknownFormat,
    CannotTell."""
    name = names.gather(step, incarnation, attempt, rank)
    with reading(backend, name):
        data = await backend.read(name, gather_bytes_max())
    return decode_gather(data, name)


async def read_headers(
    backend: Backend,
    step: int,
    incarnation: int,
    attempt: int,
    ranks: Sequence[int],
    gathers: Sequence[int],
    whole: dict[int, Vote] | None = None,
) -> list[VoteHeader]:
    """The headers of the votes of ``ranks``, in that order: from ``gathers``, else from the votes themselves,
    which are then read and proved whole, and put into ``whole`` as far as they are few. Raises NotFound, Damaged,
    UnknownFormat, CannotTell of a vote."""

    async def gathered(rank: int) -> list[VoteHeader]:
        try:
            return await read_gather(backend, step, incarnation, attempt, rank)
        except (NotFound, Damaged, UnknownFormat) as error:
            log.warning("step %d: gathered votes cannot be used: %s", step, error)
            return []

    async def alone(rank: int) -> VoteHeader:
        data, vote = await read_vote(backend, step, incarnation, attempt, rank)
        if whole is not None and len(whole) < GATHER_WORLD_MIN:
            whole[rank] = vote
        return header_of(vote, data)

    found = {header.rank: header for some in await each(gathers, gathered) for header in some}
    missing = [rank for rank in ranks if rank not in found]
    found.update(zip(missing, await each(missing, alone), strict=True))
    return [found[rank] for rank in ranks]


async def check_layouts(backend: Backend, hashes: Sequence[str]) -> None:
    """Check that the layouts (by rank) together cover every tensor of the job, a bounded number of them in
    memory. Raises StateMismatch, Damaged (a layout is missing or damaged), UnknownFormat, CannotTell."""
    reader, coverage = TableReader(), Coverage()
    often = {one for one, count in Counter(hashes).items() if count > 1}
    kept: dict[str, Table] = {}

    async def read(hash_text: str) -> bytes:
        name = names.layout(hash_text)
        try:
            with reading(backend, name):
                return await backend.read(name, SMALL_BYTES_MAX)
        except NotFound:
            raise Damaged(f"{name} is missing", found="nothing", expected="a layout", name=name) from None

    def add(block: Sequence[str], stored: dict[str, bytes]) -> None:
        for hash_text in block:
            table = kept.get(hash_text)
            if table is None:
                table = reader.open(stored[hash_text], hash_text, names.layout(hash_text))
                if hash_text in often and len(kept) < LAYOUTS_AT_ONCE:
                    kept[hash_text] = table
            coverage.add(table)

    for start in range(0, len(hashes), LAYOUTS_AT_ONCE):
        block = hashes[start : start + LAYOUTS_AT_ONCE]
        wanted = [one for one in dict.fromkeys(block) if one not in kept]
        stored = dict(zip(wanted, await each(wanted, read), strict=True))
        # Opening many takes a while; the loop has other things to do.
        await asyncio.to_thread(add, block, stored)
    await asyncio.to_thread(coverage.check)
