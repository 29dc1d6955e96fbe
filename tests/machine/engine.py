"""What agents and commands do, step by step, on the backends of one process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from everstep.backends.api import Backend
from everstep.errors import Damaged
from everstep.format.manifest import Manifest
from everstep.plan.retention import Retention
from everstep.store.catalog import list_step, read_decision
from everstep.store.commit import next_attempt, try_commit
from everstep.store.flush import FlushJob, flush_rank
from everstep.store.merge import merge_rank
from everstep.store.mirror import conclude, copy_records, mirror_rank
from everstep.store.rotate import RotationReport, rotate
from everstep.store.runs import incarnation_numbers, open_run, read_incarnations
from everstep.store.shelf import Shelf
from everstep.store.sources import DurableSource, bases_at

from tests.store import store_kit as kit

from .world import WORLD, Held, Key, compare, snapshot

ATTEMPTS_MAX = 3


async def standing(backend: Backend, key: Key) -> Manifest | None:
    decision = await read_decision(backend, await list_step(backend, key[1], key[0]))
    return decision if isinstance(decision, Manifest) else None


async def save(
    root: Backend, places: Sequence[Backend], key: Key, held: Held, base: Key | None, compress: str | None
) -> Manifest | None:
    """A checkpoint, as a delta of ``base`` if that still counts; None where it was given up each time."""
    run = await open_run(root)
    for _ in range(ATTEMPTS_MAX):
        attempt, found = await next_attempt(root, key[1], key[0])
        if found is not None:
            return found
        of = await standing(root, base) if base is not None else None
        bases = bases_at(places, run.chunk_bytes)
        source = DurableSource(root, of, run.chunk_bytes, bases=bases) if of is not None else None
        for rank in range(WORLD):
            job = FlushJob(key[1], key[0], attempt, rank, WORLD)
            await flush_rank(
                root,
                job,
                snapshot(key, rank, held),  # type: ignore[arg-type]
                chunk_bytes=run.chunk_bytes,
                run=run,
                base=source,
                compress=compress,
            )
        decision = await try_commit(root, key[1], key[0], attempt, WORLD)
        if isinstance(decision, Manifest):
            return decision
    return None


async def merge(root: Backend, places: Sequence[Backend], key: Key) -> Manifest | None:
    """A synthetic full, unless it is one or does not count."""
    run = await open_run(root)
    attempt, found = await next_attempt(root, key[1], key[0])
    if found is None or found.kind == "full":
        return found
    source = DurableSource(root, found, run.chunk_bytes, bases=bases_at(places, run.chunk_bytes))
    with ThreadPoolExecutor(2) as pool:
        for rank in range(WORLD):
            job = FlushJob(key[1], key[0], attempt, rank, WORLD)
            await merge_rank(root, job, source, run=run, pool=pool)
    decision = await try_commit(root, key[1], key[0], attempt, WORLD)
    return decision if isinstance(decision, Manifest) else None


async def mirror(source: Backend, target: Backend, chain: Sequence[Key]) -> None:
    """The checkpoints of ``chain``, which begins with a full one."""
    run = await copy_records(source, target)
    with ThreadPoolExecutor(2) as pool:
        for key in chain:
            manifest = await standing(source, key)
            if manifest is None:
                return
            for rank in range(WORLD):
                await mirror_rank(source, target, manifest, rank, run=run, pool=pool)
            await conclude(source, target, manifest)


async def prune(
    backend: Backend, root: Backend, shelf: Shelf, retention: Retention, writer: int
) -> RotationReport:
    """By the writer of incarnation ``writer``, by the lineage as ``root`` has it; those before it are gone."""
    records = await read_incarnations(root)
    look = await shelf.look(backend, records)

    async def is_superseded() -> bool:
        return max(await incarnation_numbers(root)) > writer

    return await rotate(
        backend,
        look.plan(retention),
        is_superseded=is_superseded,
        is_gone=lambda number: number < writer,
        clock=shelf.clock,
        shelf=shelf,
        look=look,
    )


async def load(places: Sequence[Backend], key: Key, held: Held) -> None:
    """From all ``places`` where it counts, nearest first; raises what loads do, AssertionError where a byte differs."""
    bases = bases_at(places, kit.CHUNK)
    sources: list[DurableSource] = []
    errors: list[Damaged] = []
    for place in places:
        try:
            manifest = await standing(place, key)
        except Damaged as error:
            errors.append(error)
            continue
        if manifest is not None:
            sources.append(DurableSource(place, manifest, kit.CHUNK, bases=bases))
    if not sources:
        raise errors[0]
    await compare(sources, held)
