"""Filling tensors: pieces, shared chunks, fallback between sources, memory, pruning in mid load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from everstep.backends.errors import Retryable
from everstep.backends.files import LocalBackend
from everstep.errors import CannotTell, Damaged, Pruned, StateMismatch
from everstep.format import names
from everstep.format.hashing import chunk_hashes, image_root
from everstep.format.layout import Box, EntrySpec, ImageSpec, Layout, build_layout
from everstep.format.manifest import Manifest
from everstep.format.vote import ImageRecord
from everstep.memory.arena import Arena
from everstep.memory.errors import SlotGone
from everstep.memory.process import Process
from everstep.plan.reads import Read, plan_reads
from everstep.store.fill import fill
from everstep.store.flush import FlushJob, flush_rank
from everstep.store.pieces import InFlight
from everstep.store.rotate import rotate
from everstep.store.sources import ArenaSource, DurableSource
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.store import store_kit as kit

STEP = 3


class BytesSource:
    """One image of random bytes, and how much of it was read."""

    def __init__(self, data: bytes, chunk_bytes: int, header_bytes: int = 0, label: str = "bytes") -> None:
        self.label, self.kind = label, "disk"
        self.step = self.incarnation = self.world = 1
        self.chunk_bytes = chunk_bytes
        self.ranks = frozenset({0})
        self.data = data
        self.reads: list[tuple[int, int]] = []
        chunks = chunk_hashes(memoryview(data), chunk_bytes)
        self.record = ImageRecord("i", len(data), image_root(len(data), chunks), chunks)
        self.spec = ImageSpec("i", "i", bytes(header_bytes), len(data))

    async def layout(self, rank: int) -> Layout:
        return Layout((), (self.spec,))

    async def records(self, rank: int) -> dict[str, ImageRecord]:
        return {"i": self.record}

    def has(self, rank: int, image: str) -> bool:
        return True

    async def check_image(self, rank: int, image: str) -> None: ...

    async def read_into(self, rank: int, image: str, offset: int, view: memoryview) -> None:
        self.reads.append((offset, len(view)))
        view[:] = self.data[offset : offset + len(view)]

    def mapped(self, rank: int, image: str) -> memoryview | None:
        return None

    def locate(self, rank: int, image: str) -> str:
        return f"{self.label}/{image}"

    async def confirm(self) -> None: ...


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    nbytes=st.integers(1, 5000),
    chunk_bytes=st.sampled_from([64, 256, 1024]),
    piece_bytes=st.sampled_from([1, 256, 700, 4096]),
    header_bytes=st.integers(0, 300),
    data=st.data(),
)
def test_every_read_arrives_and_no_chunk_is_read_twice(
    nbytes: int, chunk_bytes: int, piece_bytes: int, header_bytes: int, data: st.DataObject
) -> None:
    spans = data.draw(st.lists(st.tuples(st.integers(0, nbytes - 1), st.integers(0, nbytes)), max_size=20))
    content = random.Random(nbytes).randbytes(nbytes)
    source = BytesSource(content, chunk_bytes, min(header_bytes, nbytes))
    reads, targets = [], {}
    for index, (start, length) in enumerate(spans):
        count = min(length, nbytes - start)
        reads.append(Read(index, 0, "i", start, count, 3))
        targets[index] = memoryview(bytearray(count + 5))

    report = asyncio.run(fill([source], reads, targets, most=InFlight(2, piece_bytes)))  # type: ignore[list-item]
    for read, target in zip(reads, targets.values(), strict=True):
        wanted = content[read.image_offset : read.image_offset + read.nbytes]
        assert bytes(target) == bytes(3) + wanted + bytes(2)
    assert report.nbytes == sum(read.nbytes for read in reads)
    chunks = [
        c
        for offset, size in source.reads
        for c in range(offset // chunk_bytes, -(-(offset + size) // chunk_bytes))
    ]
    assert len(chunks) == len(set(chunks)) and all(offset % chunk_bytes == 0 for offset, _ in source.reads)
    assert all(size <= max(piece_bytes, chunk_bytes) for _, size in source.reads)


@hypothesis_settings(max_examples=100, deadline=None)
@given(
    runs=st.lists(
        st.tuples(
            st.integers(0, 900),
            st.integers(1, 300),
            st.integers(1, 20),
            st.integers(0, 600),
            st.integers(0, 9),
        ),
        max_size=6,
    ),
    chunk_bytes=st.sampled_from([64, 256, 1024]),
    piece_bytes=st.sampled_from([1, 700, 4096]),
    mapped=st.booleans(),
)
def test_runs_at_equal_distances_arrive(
    runs: list[tuple[int, int, int, int, int]], chunk_bytes: int, piece_bytes: int, mapped: bool
) -> None:
    """Rows that chunks and pieces cut anywhere, from near together to farther apart than a chunk."""
    reads, targets, wanted = [], {}, []
    for index, (start, nbytes, count, gap, dest_gap) in enumerate(runs):
        strides = (nbytes + gap, nbytes + dest_gap) if count > 1 else (0, 0)
        reads.append(Read(index, 0, "i", start, nbytes, 3, count, *strides))
        targets[index] = memoryview(bytearray(3 + (count - 1) * strides[1] + nbytes))
    content = random.Random(len(runs)).randbytes(max((read.image_end for read in reads), default=10))
    for read, target in zip(reads, targets.values(), strict=True):
        expected = bytearray(len(target))
        for i in range(read.runs):
            at, dest = read.image_offset + i * read.image_stride, 3 + i * read.dest_stride
            expected[dest : dest + read.nbytes] = content[at : at + read.nbytes]
        wanted.append(bytes(expected))
    source = BytesSource(content, chunk_bytes)
    if mapped:
        source.mapped = lambda rank, image: memoryview(content)  # type: ignore[method-assign]
    report = asyncio.run(fill([source], reads, targets, most=InFlight(2, piece_bytes)))  # type: ignore[list-item]
    assert [bytes(target) for target in targets.values()] == wanted
    assert report.nbytes == sum(read.total for read in reads)
    touched = {
        chunk
        for read in reads
        for i in range(read.runs)
        for begin in [read.image_offset + i * read.image_stride]
        for chunk in range(begin // chunk_bytes, (begin + read.nbytes - 1) // chunk_bytes + 1)
    }
    assert report.read_bytes.get("bytes", 0) == sum(
        min(chunk_bytes, len(content) - chunk * chunk_bytes) for chunk in touched
    ), "the chunks that are needed, once each"


@pytest.mark.parametrize("read", [(90, 20, 0), (10, 20, 0, 4, 30, 20)])
def test_a_read_outside_the_image_is_refused(read: tuple[int, ...]) -> None:
    source = BytesSource(bytes(100), 64)
    one = Read(0, 0, "i", *read)
    with pytest.raises(StateMismatch, match="outside"):
        asyncio.run(fill([source], [one], {0: memoryview(bytearray(80))}))  # type: ignore[list-item]


def test_nothing_is_written_outside_a_target() -> None:
    read = Read(0, 0, "i", 0, 8, 0, 4, 16, 8)
    with pytest.raises((TypeError, ValueError)):
        asyncio.run(fill([BytesSource(bytes(100), 64)], [read], {0: memoryview(bytearray(31))}))  # type: ignore[list-item]


def test_nothing_of_a_bad_chunk_reaches_a_tensor() -> None:
    data = bytearray(random.Random(1).randbytes(1024))
    source = BytesSource(bytes(data), 256)
    data[300] ^= 1
    source.data = bytes(data)
    target = memoryview(bytearray(1024))
    read = Read(0, 0, "i", 0, 1024, 0)
    with pytest.raises(Damaged, match=r"bytes/i.*offset 256") as caught:
        asyncio.run(fill([source], [read], {0: target}))  # type: ignore[list-item]
    assert caught.value.offset == 256 and caught.value.found != caught.value.expected
    assert bytes(target[256:512]) == bytes(256)
    assert all(
        bytes(part) in (bytes(256), bytes(data[at : at + 256]))
        for at, part in ((at, target[at : at + 256]) for at in (0, 512, 768))
    )


def test_a_bad_chunk_comes_from_the_next_source_and_is_reported() -> None:
    good = random.Random(2).randbytes(1000)
    bad = bytearray(good)
    bad[600] ^= 1
    first, other, last = (BytesSource(good, 256, label=label) for label in ("near", "stranger", "far"))
    first.data = bytes(bad)
    stranger = BytesSource(bytes(1000), 256)
    other.record, other.data = stranger.record, stranger.data
    target = memoryview(bytearray(1000))
    read = Read(0, 0, "i", 0, 1000, 0)
    report = asyncio.run(fill([first, other, last], [read], {0: target}))  # type: ignore[list-item]
    assert bytes(target) == good
    assert [(f.source, f.served_by, f.offset, f.nbytes) for f in report.fallbacks] == [
        ("near", "far", 512, 256)
    ]
    assert last.reads == [(512, 256)] and not other.reads


def with_run(root: Path, work: Callable[[LocalBackend], Awaitable[None]]) -> None:
    async def go() -> None:
        backend = LocalBackend(root)
        await kit.start_run(backend)
        try:
            await work(backend)
        finally:
            await backend.close()

    asyncio.run(go())


def arena_with(directory: Path, rank: int, step: int = STEP) -> Arena:
    """A real arena that holds the snapshot that the kit would make of this rank and step."""
    made = kit.snapshot(step, rank)
    arena = Arena.create(
        directory,
        run_key="0" * 16,
        node="n",
        rank=rank,
        world=2,
        slots=3,
        slot_bytes=1 << 18,
        chunk_bytes=kit.CHUNK,
    )
    arena.take(Process.current(), run_id="r", incarnation=1, world=2)
    slot = arena.begin(1, step, complete=None)
    assert slot is not None
    views = slot.place(
        [(name, len(data)) for name, data in made.data.items() if name.startswith("image:")]
        + [(name, len(made.data[name])) for name in ("state", "meta", "layout")]
    )
    for name, view in views.items():
        view[:] = made.data[name]
    slot.publish(made.info.layout_hash)
    return arena


def pin_of(arena: Arena) -> object:
    info = arena.snapshots()[0]
    return arena.pin(info.index, info.generation)


def test_a_snapshot_in_real_slots_is_flushed_and_loads_from_memory_and_from_disk(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        run = await kit.create_run(backend, chunk_bytes=kit.CHUNK)
        arenas = [arena_with(tmp_path, rank) for rank in range(2)]
        pins = {rank: pin_of(arena) for rank, arena in enumerate(arenas)}
        memory = ArenaSource(pins, kit.CHUNK)  # type: ignore[arg-type]
        assert (await memory.records(0)).keys() == {"model", "optimizer", "state"}
        for rank, pinned in pins.items():
            job = FlushJob(STEP, 1, 1, rank, 2)
            await flush_rank(backend, job, pinned, chunk_bytes=kit.CHUNK, run=run)  # type: ignore[arg-type]
        manifest = await kit.try_commit(backend, STEP, 1, 1, 2)
        assert isinstance(manifest, Manifest)
        durable = DurableSource(backend, manifest, kit.CHUNK)
        assert (await kit.load_from([memory, durable], manifest)).read_bytes.keys() == {"memory"}
        assert (await kit.load_from([durable], manifest)).read_bytes.keys() == {backend.url}
        assert await memory.meta(1) == await durable.meta(1)
        for arena in arenas:
            arena.unlink()

    with_run(tmp_path / "run", work)


async def saved(
    backend: LocalBackend,
) -> tuple[Manifest, DurableSource, ArenaSource, dict[int, kit.MemoryPinned]]:
    manifest = await kit.save(backend, STEP)
    pins = {rank: kit.snapshot(STEP, rank) for rank in range(2)}
    memory = ArenaSource(pins, kit.CHUNK)  # type: ignore[arg-type]
    for rank in pins:
        await memory.records(rank)
    return manifest, DurableSource(backend, manifest, kit.CHUNK), memory, pins


def test_changes_of_a_sealed_slot_are_made_good_from_disk(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        manifest, durable, memory, pins = await saved(backend)
        pins[1].data["image:optimizer"][4200] ^= 1
        report = await kit.load_from([memory, durable], manifest)
        assert [(f.rank, f.image, f.source) for f in report.fallbacks] == [(1, "optimizer", "memory")]
        with pytest.raises(Damaged, match="slot of rank 1, image:optimizer"):
            await kit.load_from([memory], manifest)

    with_run(tmp_path, work)


def test_a_slot_that_is_reused_in_mid_load_is_not_believed(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        _, durable, memory, pins = await saved(backend)
        layouts = [await memory.layout(rank) for rank in range(2)]
        reads = plan_reads(layouts[0].entries, layouts, 0)
        targets = {i: memoryview(bytearray(e.nbytes)) for i, e in enumerate(layouts[0].entries)}
        await fill([memory], reads, targets)
        mapped = memory.mapped

        def reused(rank: int, image: str) -> memoryview:
            pins[
                0
            ].gone = True  # when all has been asked but for the bytes: only the look at the end can know
            return mapped(rank, image)

        memory.mapped = reused  # type: ignore[method-assign]
        with pytest.raises(SlotGone):
            await fill([memory], reads, targets)
        fresh = ArenaSource(pins, kit.CHUNK)  # type: ignore[arg-type]
        report = await fill([fresh, durable], reads, targets)
        assert {type(f.error) for f in report.fallbacks} == {SlotGone}
        assert report.read_bytes.keys() == {backend.url}

    with_run(tmp_path, work)


def test_files_that_are_missing_or_short_come_from_another_copy(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        manifest, durable, memory, _ = await saved(backend)
        (tmp_path / names.image(STEP, 1, 1, 0, "model")).unlink()
        path = tmp_path / names.image(STEP, 1, 1, 1, "model")
        path.write_bytes(path.read_bytes()[:-1])
        report = await kit.load_from([durable, memory], manifest)
        assert {f.served_by for f in report.fallbacks} == {"memory"}
        with pytest.raises(Damaged, match="is missing") as caught:
            await kit.load_from([durable], manifest)
        assert caught.value.name == names.image(STEP, 1, 1, 0, "model")

    with_run(tmp_path, work)


def test_storage_that_stops_answering_is_not_called_damage(tmp_path: Path) -> None:
    async def work(backend: LocalBackend) -> None:
        manifest, durable, _, _ = await saved(backend)
        layouts = [await durable.layout(rank) for rank in range(2)]

        async def failing(name: str, offset: int, view: memoryview) -> None:
            raise Retryable(name, "timed out")

        real = backend.read_into
        backend.read_into = failing  # type: ignore[method-assign]
        reads = plan_reads(layouts[0].entries, layouts, 0)
        targets = {i: memoryview(bytearray(e.nbytes)) for i, e in enumerate(layouts[0].entries)}
        with pytest.raises(CannotTell, match="timed out"):
            await fill([durable], reads, targets)
        backend.read_into = real  # type: ignore[method-assign]
        assert (await fill([durable], reads, targets)).nbytes == sum(read.nbytes for read in reads)

        async def failing_once(name: str, nbytes_max: int = 256 << 20) -> bytes:
            backend.read = read  # type: ignore[method-assign]
            raise Retryable(name, "timed out")

        read, fresh = backend.read, DurableSource(backend, manifest, kit.CHUNK)
        backend.read = failing_once  # type: ignore[method-assign]
        with pytest.raises(CannotTell):
            await fresh.layout(0)
        assert await fresh.layout(0) == layouts[0]

    with_run(tmp_path, work)


@pytest.mark.parametrize("wait_s", [3600.0, 0.0])
def test_rotation_in_mid_load_says_pruned(tmp_path: Path, wait_s: float) -> None:
    async def work(backend: LocalBackend) -> None:
        manifest, durable, _, _ = await saved(backend)
        layouts = [await durable.layout(rank) for rank in range(2)]
        await kit.save(backend, STEP + 1)
        plan = await kit.plan_for(backend)
        for _ in range(2):
            await rotate(backend, plan, is_superseded=kit.not_superseded, tombstone_wait_s=wait_s)
        reads = plan_reads(layouts[0].entries, layouts, 0)
        targets = {i: memoryview(bytearray(e.nbytes)) for i, e in enumerate(layouts[0].entries)}
        with pytest.raises(Pruned):
            await fill([durable], reads, targets)
        with pytest.raises(Pruned):
            await DurableSource(backend, manifest, kit.CHUNK).state(0)

    with_run(tmp_path, work)


def test_small_tensors_share_their_chunks(tmp_path: Path) -> None:
    """A thousand tensors in one chunk are one read."""
    specs = [EntrySpec("m", f"t{i}", "uint8", (3,), (Box.full((3,)),)) for i in range(1000)]
    layout = build_layout(specs)
    image = layout.images[0]
    content = image.header + random.Random(3).randbytes(image.nbytes - len(image.header))
    source = BytesSource(content, 1 << 20)
    source.spec = image
    source.record = ImageRecord(image.name, source.record.nbytes, source.record.root, source.record.chunks)

    async def records(rank: int) -> dict[str, ImageRecord]:
        return {image.name: source.record}

    source.records = records  # type: ignore[method-assign]
    targets = {i: memoryview(bytearray(3)) for i in range(1000)}
    asyncio.run(fill([source], plan_reads(layout.entries, [layout], 0), targets))  # type: ignore[list-item]
    assert len(source.reads) == 1
    assert all(bytes(targets[i]) == content[e.offset : e.offset + 3] for i, e in enumerate(layout.entries))
