"""Small runs for the store's tests: snapshots in memory, checkpoints on a backend, and loading them again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.backends.api import Backend
from everstep.backends.files import LocalBackend
from everstep.errors import Damaged, EverstepError
from everstep.format.hashing import chunk_hashes, image_root
from everstep.format.layout import Box, EntrySpec, Layout, Scope, build_layout, encode, layout_hash
from everstep.format.manifest import Manifest
from everstep.format.records import IncarnationRecord, RunRecord, Writer
from everstep.format.vote import STATE_IMAGE, ImageRecord, Vote
from everstep.memory.errors import SlotGone
from everstep.plan.reads import plan_reads
from everstep.plan.retention import Retention, RetentionPlan
from everstep.store.catalog import list_steps, read_decision
from everstep.store.commit import next_attempt, try_commit
from everstep.store.fill import FillReport, fill
from everstep.store.flush import FlushJob, flush_rank, write_meta
from everstep.store.runs import add_incarnation, create_run, open_run, read_incarnations
from everstep.store.shelf import Shelf
from everstep.store.sources import DurableSource

CHUNK = 4096
WORLD = 2


@dataclass(frozen=True)
class Info:
    index: int
    generation: int
    state: int
    incarnation: int
    step: int
    layout_hash: str


class MemoryPinned:
    """A pinned slot as the store sees it, over plain byte arrays that tests may change."""

    def __init__(self, info: Info, data: dict[str, bytearray], chunk_bytes: int) -> None:
        self.info = info
        self.data = data
        self.chunk_bytes = chunk_bytes
        self.records: tuple[ImageRecord, ...] | None = None
        self.gone = False

    @property
    def regions(self) -> dict[str, int]:
        return {name: len(data) for name, data in self.data.items()}

    def view(self, name: str) -> memoryview:
        return memoryview(self.data[name]).toreadonly()

    def check(self) -> None:
        if self.gone:
            raise SlotGone("reused", slot=self.info.index)

    def sealed(self) -> tuple[ImageRecord, ...] | None:
        return self.records

    def seal(self, records: tuple[ImageRecord, ...]) -> None:
        self.check()
        if self.records is not None and self.records != records:
            raise Damaged("sealed otherwise", name="slot")
        self.records = records

    def compute(self, names: Sequence[str], pool: object = None) -> tuple[ImageRecord, ...]:
        records = []
        for name in names:
            chunks = chunk_hashes(self.view(name), self.chunk_bytes)
            nbytes = len(self.data[name])
            records.append(
                ImageRecord(name.removeprefix("image:"), nbytes, image_root(nbytes, chunks), chunks)
            )
        return tuple(records)


def specs(rank: int, world: int = WORLD, rows: int = 40) -> list[EntrySpec]:
    """A replicated tensor (rank 0 stores it), one in boxes over the ranks, and the rank's own ones."""
    per = rows // world
    box = Box((rank * per, 0), (per, 33))
    return [
        EntrySpec("model", "w", "float32", (31, 17), (Box.full((31, 17)),), Scope.GLOBAL, rank == 0),
        EntrySpec("model", "sharded", "float32", (per * world, 33), (box,), Scope.GLOBAL),
        EntrySpec("optimizer", "exp_avg", "float64", (100 + rank,), (Box.full((100 + rank,)),)),
        EntrySpec("optimizer", "flags", "uint8", (7,), (Box.full((7,)),)),
    ]


def images_of(layout: Layout, seed: object) -> dict[str, bytearray]:
    """Every image with its header and random data."""
    numbers = random.Random(repr(seed))
    return {
        spec.name: bytearray(spec.header + numbers.randbytes(spec.nbytes - len(spec.header)))
        for spec in layout.images
    }


def meta_of(rank: int, world: int) -> dict[str, object]:
    return {
        "mesh": {"dp": world},
        "coordinates": {"dp": rank},
        "parts": {
            "model": {"class": "Net", "settings": {}},
            "optimizer": {"class": "AdamW", "settings": {"lr": 0.1}},
        },
        "data": {"kind": "finite", "position": 7 + rank},
        "rng": ["python", "torch"],
        "metrics": {"loss": 1.5},
        "config_hash": "abc",
        "libraries": {"torch": "2.13"},
        "facts": {},
    }


def snapshot(
    step: int,
    rank: int,
    *,
    incarnation: int = 1,
    world: int = WORLD,
    chunk_bytes: int = CHUNK,
    layout: Layout | None = None,
    meta: dict[str, object] | None = None,
) -> MemoryPinned:
    layout = layout or build_layout(specs(rank, world))
    encoded = encode(layout)
    data = {f"image:{name}": image for name, image in images_of(layout, (incarnation, step, rank)).items()}
    data[STATE_IMAGE] = bytearray(f"state of step {step} rank {rank} ".encode() * 300)
    data["meta"] = bytearray(write_meta(meta or meta_of(rank, world)))
    data["layout"] = bytearray(encoded)
    info = Info(0, step, 2, incarnation, step, layout_hash(encoded))
    return MemoryPinned(info, data, chunk_bytes)


def incarnation_record(
    number: int, adopted: tuple[int, int] | None = None, **other: object
) -> IncarnationRecord:
    values: dict[str, object] = {
        "number": number,
        "id": f"id{number}",
        "parent": None if adopted is None else number - 1,
        "adopted_incarnation": None if adopted is None else adopted[0],
        "adopted_step": None if adopted is None else adopted[1],
        "fresh": None,
        "world": WORLD,
        "mesh": {},
        "config_hash": None,
        "config": None,
        "config_changes": {},
        "config_reason": None,
        "loosened": (),
        "writer": Writer("host", "boot", 1, 2),
        "created": "",
    }
    return IncarnationRecord(**{**values, **other})  # type: ignore[arg-type]


async def start_run(backend: Backend, chunk_bytes: int = CHUNK) -> RunRecord:
    run = await create_run(backend, chunk_bytes=chunk_bytes)
    if not await read_incarnations(backend):
        await add_incarnation(backend, incarnation_record)
    return run


def make_run(root: Path, *steps: int) -> None:
    """A run of full checkpoints."""

    async def make() -> None:
        backend = LocalBackend(root)
        await start_run(backend)
        for step in steps:
            await save(backend, step)
        await backend.close()

    asyncio.run(make())


async def adopt(backend: Backend, incarnation: int, step: int) -> IncarnationRecord:
    return await add_incarnation(backend, lambda number: incarnation_record(number, (incarnation, step)))


async def flush(
    backend: Backend,
    step: int,
    rank: int,
    *,
    attempt: int = 1,
    incarnation: int = 1,
    world: int = WORLD,
    pinned: MemoryPinned | None = None,
    base: DurableSource | None = None,
) -> Vote:
    run = await open_run(backend)
    pinned = pinned or snapshot(step, rank, incarnation=incarnation, world=world, chunk_bytes=run.chunk_bytes)
    job = FlushJob(step, incarnation, attempt, rank, world)
    return await flush_rank(backend, job, pinned, chunk_bytes=run.chunk_bytes, run=run, base=base)  # type: ignore[arg-type]


async def save(
    backend: Backend,
    step: int,
    *,
    incarnation: int = 1,
    world: int = WORLD,
    base: DurableSource | None = None,
) -> Manifest:
    """What an agent does for one step, from the attempt's number to the manifest. With ``base`` the first rank's images
    are deltas: their headers are the base's."""
    attempt, standing = await next_attempt(backend, step, incarnation)
    if standing is not None:
        return standing
    for rank in range(world):
        await flush(
            backend,
            step,
            rank,
            attempt=attempt,
            incarnation=incarnation,
            world=world,
            base=base if rank == 0 else None,
        )
    decision = await try_commit(backend, step, incarnation, attempt, world)
    assert isinstance(decision, Manifest), decision
    return decision


async def plan_for(backend: Backend, keep_last: int = 1) -> RetentionPlan:
    return (await Shelf().look(backend)).plan(Retention(keep_last))


async def not_superseded() -> bool:
    return False


async def load(backend: Backend, manifest: Manifest) -> FillReport:
    """Load all ranks of a checkpoint as they were saved, and compare every byte with what was saved."""
    run = await open_run(backend)
    source = DurableSource(backend, manifest, run.chunk_bytes)
    return await load_from([source], manifest)


async def load_from(sources: Sequence[object], manifest: Manifest) -> FillReport:
    source = sources[0]
    layouts = [await source.layout(rank) for rank in range(manifest.world)]  # type: ignore[attr-defined]
    total = FillReport()
    for rank, layout in enumerate(layouts):
        reads = plan_reads(layout.entries, layouts, rank)
        buffers = [bytearray(_held_bytes(entry)) for entry in layout.entries]
        targets = {index: memoryview(buffer) for index, buffer in enumerate(buffers)}
        report = await fill(sources, reads, targets)  # type: ignore[arg-type]
        total.fallbacks += report.fallbacks
        total.read_bytes.update(report.read_bytes)
        assert buffers == expected_bytes(manifest, layouts, rank), f"step {manifest.step} rank {rank}"
        state = await source.state(rank)  # type: ignore[attr-defined]
        assert state == f"state of step {manifest.step} rank {rank} ".encode() * 300
    return total


def _held_bytes(entry: object) -> int:
    volume = sum(box.volume for box in entry.boxes)  # type: ignore[attr-defined]
    return volume * {"float32": 4, "float64": 8, "uint8": 1}[entry.dtype]  # type: ignore[attr-defined]


def expected_bytes(manifest: Manifest, layouts: Sequence[Layout], rank: int) -> list[bytearray]:
    """The entries' bytes of a rank at the save; replicated ones are those of the rank that stores them."""
    found = []
    for entry in layouts[rank].entries:
        holder, stored = rank, entry
        if entry.image is None:
            holder = next(
                r
                for r, layout in enumerate(layouts)
                for e in layout.entries
                if e.key == entry.key and e.image is not None
            )
            stored = next(e for e in layouts[holder].entries if e.key == entry.key)
        images = images_of(layouts[holder], (manifest.incarnation, manifest.step, holder))
        assert stored.image is not None
        image = images[layouts[holder].images[stored.image].name]
        found.append(image[stored.offset : stored.offset + stored.nbytes])
    return found


async def loadable(backend: Backend) -> tuple[set[tuple[int, int]], dict[tuple[int, int], EverstepError]]:
    """Keys of the checkpoints that load and are right, and the errors of those that do not."""
    good: set[tuple[int, int]] = set()
    bad: dict[tuple[int, int], EverstepError] = {}
    for found in await list_steps(backend):
        try:
            decision = await read_decision(backend, found)
            if isinstance(decision, Manifest):
                await load(backend, decision)
                good.add(found.key)
        except EverstepError as error:
            bad[found.key] = error
    return good, bad
