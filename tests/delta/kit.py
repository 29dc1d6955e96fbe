"""Runs whose snapshots follow from each other, for tests of deltas at the level of the store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from everstep.backends.api import Backend
from everstep.backends.files import LocalBackend
from everstep.format.layout import Layout, build_layout
from everstep.format.manifest import Manifest
from everstep.format.vote import STATE_IMAGE, Vote
from everstep.plan.reads import plan_reads
from everstep.store.commit import next_attempt, try_commit
from everstep.store.fill import FillReport, fill
from everstep.store.flush import FlushJob, flush_rank
from everstep.store.merge import merge_rank
from everstep.store.runs import open_run
from everstep.store.sources import DurableSource

from tests.store import store_kit

CHUNK = store_kit.CHUNK
WORLD = store_kit.WORLD

Data = dict[str, bytearray]
"""A rank's regions by name."""


def layout_of(rank: int, rows: int = 600) -> Layout:
    return build_layout(store_kit.specs(rank, WORLD, rows))


def first(rank: int, rows: int = 600) -> Data:
    """Images whose tensors are smooth enough to be floats of a training."""
    layout = layout_of(rank, rows)
    rng = np.random.default_rng(rank)
    found: Data = {}
    for spec in layout.images:
        count = spec.nbytes - len(spec.header)
        values = (rng.standard_normal(count // 4 + 1) * 0.02).astype(np.float32)
        found[spec.name] = bytearray(spec.header + values.tobytes()[:count])
    return found


def sparse(data: Data, seed: int) -> Data:
    """A few bytes changed, in few chunks."""
    numbers = random.Random(seed)
    changed = {name: bytearray(image) for name, image in data.items()}
    for image in changed.values():
        at = numbers.randrange(CHUNK, len(image))
        image[at] ^= 1 + numbers.randrange(255)
    return changed


def dense(data: Data, seed: int) -> Data:
    """Every float moved a little, as by a step of an optimizer; headers stay."""
    rng = np.random.default_rng(seed)
    changed = {}
    for name, image in data.items():
        tail = len(image) - len(image) % 4
        values = np.frombuffer(bytes(image[CHUNK:tail]), np.float32).copy()
        with np.errstate(all="ignore"):
            values *= 1 + rng.standard_normal(len(values)).astype(np.float32) * 1e-3
        changed[name] = bytearray(image[:CHUNK]) + bytearray(values.tobytes()) + image[tail:]
    return changed


def zeros(data: Data) -> Data:
    """Tensors of zeros; headers stay."""
    return {name: image[:CHUNK] + bytearray(len(image) - CHUNK) for name, image in data.items()}


def snapshot(
    step: int, rank: int, data: Data, *, incarnation: int = 1, rows: int = 600
) -> store_kit.MemoryPinned:
    pinned = store_kit.snapshot(step, rank, incarnation=incarnation, layout=layout_of(rank, rows))
    for name, image in data.items():
        assert len(pinned.data[f"image:{name}"]) == len(image)
        pinned.data[f"image:{name}"] = bytearray(image)
    return pinned


async def flush(
    backend: Backend,
    step: int,
    rank: int,
    data: Data,
    base: DurableSource | None = None,
    compress: str | None = None,
    *,
    attempt: int = 1,
    incarnation: int = 1,
    rows: int = 600,
) -> Vote:
    run = await open_run(backend)
    job = FlushJob(step, incarnation, attempt, rank, WORLD)
    pinned = snapshot(step, rank, data, incarnation=incarnation, rows=rows)
    return await flush_rank(
        backend,
        job,
        pinned,  # type: ignore[arg-type]
        chunk_bytes=run.chunk_bytes,
        run=run,
        base=base,
        compress=compress,
    )


async def save(
    backend: Backend,
    step: int,
    states: Sequence[Data],
    base: DurableSource | None = None,
    compress: str | None = None,
    *,
    incarnation: int = 1,
) -> Manifest:
    """All ranks' shares, and the manifest."""
    attempt, _ = await next_attempt(backend, step, incarnation)
    for rank, data in enumerate(states):
        await flush(backend, step, rank, data, base, compress, attempt=attempt, incarnation=incarnation)
    decision = await try_commit(backend, step, incarnation, attempt, WORLD)
    assert isinstance(decision, Manifest), decision
    return decision


async def merge(backend: Backend, manifest: Manifest, source: DurableSource | None = None) -> Manifest:
    """A synthetic full of the checkpoint, read from ``source`` (by default from where it is written)."""
    run = await open_run(backend)
    attempt, _ = await next_attempt(backend, manifest.step, manifest.incarnation)
    source = source or source_of(backend, manifest)
    with ThreadPoolExecutor(2) as pool:
        for rank in range(manifest.world):
            job = FlushJob(manifest.step, manifest.incarnation, attempt, rank, manifest.world)
            await merge_rank(backend, job, source, run=run, pool=pool)
    decision = await try_commit(backend, manifest.step, manifest.incarnation, attempt, manifest.world)
    assert isinstance(decision, Manifest), decision
    return decision


def source_of(backend: Backend, manifest: Manifest) -> DurableSource:
    return DurableSource(backend, manifest, CHUNK)


async def images(source: DurableSource, rank: int) -> Data:
    """All images of a rank, read whole."""
    found: Data = {}
    for name, record in (await source.records(rank)).items():
        if name != STATE_IMAGE:
            image = bytearray(record.nbytes)
            await source.read_into(rank, name, 0, memoryview(image))
            found[name] = image
    return found


async def load(
    sources: Sequence[DurableSource], states: Sequence[Data], ranks: Sequence[int] = range(WORLD)
) -> FillReport:
    """What the ranks of the save hold, read as a restore does, compared with what was saved."""
    layouts = [await sources[0].layout(rank) for rank in range(WORLD)]
    report = FillReport()
    for rank in ranks:
        reads = plan_reads(layouts[rank].entries, layouts, rank)
        buffers = [bytearray(store_kit._held_bytes(entry)) for entry in layouts[rank].entries]
        report.add(await fill(sources, reads, {at: memoryview(buffer) for at, buffer in enumerate(buffers)}))
        for entry, buffer in zip(layouts[rank].entries, buffers, strict=True):
            if entry.image is not None:
                image = states[rank][layouts[rank].images[entry.image].name]
                assert buffer == image[entry.offset : entry.offset + entry.nbytes], entry.key
    return report


def on(tmp_path: Path, work: Callable[[LocalBackend], Awaitable[None]]) -> None:
    """``work`` on a run of its own."""

    async def go() -> None:
        backend = LocalBackend(tmp_path / "run")
        await store_kit.start_run(backend)
        try:
            await work(backend)
        finally:
            await backend.close()

    asyncio.run(go())
