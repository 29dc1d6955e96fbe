"""Runs of full checkpoints and deltas, and what is loadable of them."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping

from everstep.backends import points
from everstep.backends.api import Backend
from everstep.backends.files import LocalBackend
from everstep.format import names
from everstep.format.layout import build_layout
from everstep.format.manifest import Manifest
from everstep.plan.retention import Key, Retention
from everstep.store.catalog import list_steps, read_decision
from everstep.store.commit import next_attempt, try_commit
from everstep.store.flush import FlushJob, flush_rank
from everstep.store.rotate import RotationReport, rotate
from everstep.store.runs import open_run
from everstep.store.shelf import Shelf
from everstep.store.sources import DurableSource

from tests.store import store_kit as kit

WORLD = kit.WORLD


def image_bytes(key: Key, rank: int, image: str, header: bytes, nbytes: int) -> bytearray:
    """The same for all checkpoints, but for a few bytes at the end."""
    numbers = random.Random(f"{rank} {image}")
    data = bytearray(header + numbers.randbytes(nbytes - len(header)))
    data[-16:] = random.Random(repr(key)).randbytes(16)
    return data


def pinned(key: Key, rank: int) -> kit.MemoryPinned:
    incarnation, step = key
    layout = build_layout(kit.specs(rank))
    found = kit.snapshot(step, rank, incarnation=incarnation, layout=layout)
    for spec in layout.images:
        found.data[f"image:{spec.name}"] = image_bytes(key, rank, spec.name, spec.header, spec.nbytes)
    return found


async def flush(
    backend: Backend, key: Key, rank: int, base: Manifest | None = None, attempt: int = 1
) -> None:
    run = await open_run(backend)
    source = None if base is None else DurableSource(backend, base, run.chunk_bytes)
    job = FlushJob(key[1], key[0], attempt, rank, WORLD)
    await flush_rank(backend, job, pinned(key, rank), chunk_bytes=run.chunk_bytes, run=run, base=source)  # type: ignore[arg-type]


async def save(backend: Backend, step: int, base: Manifest | None = None, incarnation: int = 1) -> Manifest:
    """A full checkpoint, or a delta on ``base``."""
    attempt, _ = await next_attempt(backend, step, incarnation)
    for rank in range(WORLD):
        await flush(backend, (incarnation, step), rank, base, attempt)
    decision = await try_commit(backend, step, incarnation, attempt, WORLD)
    assert isinstance(decision, Manifest), decision
    assert (decision.parent_key is not None) == (base is not None)
    return decision


async def standing(backend: Backend) -> dict[Key, Manifest]:
    found = {}
    for names_ in await list_steps(backend):
        decision = await read_decision(backend, names_)
        if isinstance(decision, Manifest):
            found[names_.key] = decision
    return found


async def check(backend: Backend) -> set[Key]:
    """The checkpoints that stand; each must load, bit for bit."""
    manifests = await standing(backend)
    run = await open_run(backend)
    for key, manifest in manifests.items():
        source = DurableSource(backend, manifest, run.chunk_bytes)
        for rank in range(WORLD):
            layout = await source.layout(rank)
            for spec in layout.images:
                found = bytearray(spec.nbytes)
                await source.read_into(rank, spec.name, 0, memoryview(found))
                expected = image_bytes(key, rank, spec.name, spec.header, spec.nbytes)
                assert found == expected, f"{key} rank {rank} {spec.name}"
    return set(manifests)


async def prune(backend: Backend, retention: Retention | int = 1, **options: object) -> RotationReport:
    """Look, plan, remove: what the agent and the command line do."""
    shelf = Shelf()
    look = await shelf.look(backend)
    keep = Retention(retention) if isinstance(retention, int) else retention
    plan = look.plan(keep)
    return await rotate(
        backend,
        plan,
        is_superseded=kit.not_superseded,
        shelf=shelf,
        look=look,
        **options,  # type: ignore[arg-type]
    )


def on_point(name: str, work: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """Do ``work`` when that point is reached for the first time. Points are told of synchronously, so it runs in a
    loop of its own on a thread; await what is returned to have its error."""
    import asyncio
    from concurrent.futures import Future, ThreadPoolExecutor

    pool = ThreadPoolExecutor(1)
    done: list[Future[None]] = []

    def hook(reached: str, detail: str) -> None:
        if reached == name and not done:
            future = pool.submit(lambda: asyncio.run(work()))  # type: ignore[arg-type]
            done.append(future)
            future.exception()  # until it has ended

    points.hook = hook

    async def ended() -> None:
        points.hook = None
        pool.shutdown()
        assert done, f"{name} was not reached"
        done[0].result()

    return ended


def with_run(root: object, work: Callable[[LocalBackend], Awaitable[None]]) -> None:
    import asyncio
    from pathlib import Path

    async def go() -> None:
        backend = LocalBackend(Path(str(root)))
        await kit.start_run(backend)
        try:
            await work(backend)
        finally:
            points.hook = None
            await backend.close()

    asyncio.run(go())


def reasons(report: RotationReport) -> Mapping[Key, str]:
    return dict(report.kept)


async def gone(backend: Backend, key: Key) -> bool:
    """Whether nothing but its second tombstone is left of it."""
    directory = names.checkpoint_dir(key[1], key[0])
    return [item.name async for item in backend.list(directory)] == [names.decision(key[1], key[0], 3)]
