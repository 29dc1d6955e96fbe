"""Ranks of one node read once what several of them need; threads are the ranks, but where one is killed."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from everstep import sharing
from everstep.backends.count import Counting
from everstep.backends.errors import Retryable
from everstep.backends.files import LocalBackend
from everstep.errors import CannotTell, Damaged, RankError
from everstep.format import names
from everstep.format.entries import Box, Entry, EntrySpec, Layout, Scope
from everstep.format.layout import build_layout
from everstep.format.manifest import Manifest
from everstep.plan.reads import chunk_ranges, plan_reads
from everstep.ranks import Ranks
from everstep.sharing import LABEL, fill_shared
from everstep.store.blocking import run_blocking
from everstep.store.catalog import list_step, read_decision
from everstep.store.commit import try_commit
from everstep.store.fill import FillReport
from everstep.store.sources import ArenaSource, DurableSource, Source
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.store import store_kit as kit

from .kit import forget_memory, run_ranks

WORLD = 3
STEP = 1
ROWS = 300
TIMEOUT_S = 20.0
SHARED = 8 * kit.CHUNK
"""Two halves of four chunks: the state takes several rounds."""


def whole(key: str, scope: Scope, stored: bool = True) -> EntrySpec:
    return EntrySpec("model", key, "float32", (ROWS, 33), (Box.full((ROWS, 33)),), scope, stored)


def layouts() -> list[Layout]:
    """Three replicated tensors, each stored by another rank, and one of each rank's own."""
    return [
        build_layout(
            [whole(f"t{i}", Scope.GLOBAL, i == rank) for i in range(WORLD)] + [whole("own", Scope.RANK)]
        )
        for rank in range(WORLD)
    ]


class Saved:
    """A checkpoint on disk, and its bytes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.layouts = layouts()
        self.pins = {r: kit.snapshot(STEP, r, world=WORLD, layout=x) for r, x in enumerate(self.layouts)}
        self.manifest = asyncio.run(self._save())
        self.image_bytes = sum(image.nbytes for layout in self.layouts for image in layout.images)

    async def _save(self) -> Manifest:
        backend = LocalBackend(self.root)
        await kit.start_run(backend)
        for rank, pinned in self.pins.items():
            await kit.flush(backend, STEP, rank, world=WORLD, pinned=pinned)
        decision = await try_commit(backend, STEP, 1, 1, WORLD)
        await backend.close()
        assert isinstance(decision, Manifest)
        return decision

    def bytes_of(self, entry: Entry, rank: int) -> bytes:
        """What the boxes of ``entry`` hold."""
        holder = rank if entry.scope is Scope.RANK else int(entry.key[1:])
        stored = next(e for e in self.layouts[holder].entries if e.key == entry.key)
        data = self.pins[holder].data["image:model"][stored.offset :]
        rows = [data[i * 132 : (i + 1) * 132] for i in range(ROWS)]
        return b"".join(
            row[4 * box.offsets[1] : 4 * (box.offsets[1] + box.lengths[1])]
            for box in entry.boxes
            for row in rows[box.offsets[0] : box.offsets[0] + box.lengths[0]]
        )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("run"))


class Rank:
    """One rank's sources, with what they read of images."""

    def __init__(self, rank: int, roots: Sequence[Path], manifest: Manifest) -> None:
        self.rank = rank
        self.backends = [Counting(LocalBackend(root)) for root in roots]
        self.durable = [DurableSource(backend, manifest, kit.CHUNK) for backend in self.backends]
        for source in self.durable:
            for saved_rank in range(WORLD):
                run_blocking(source.layout(saved_rank))
        for backend in self.backends:
            backend.reset()

    @property
    def image_bytes_read(self) -> int:
        return sum(backend.bytes_read for backend in self.backends)


Outcome = FillReport | BaseException


def load(
    saved: Saved,
    nodes: Sequence[str],
    wanted: Sequence[Sequence[Entry]],
    *,
    roots: Sequence[Path] = (),
    prepare: Callable[[Rank, int], Sequence[Source]] = lambda rank, _: rank.durable,
) -> tuple[list[Outcome], list[Rank], list[list[bytes]]]:
    """All ranks load what they want: what became of each, its sources, and its targets."""
    store = HashStore()
    members = [Rank(rank, roots or [saved.root], saved.manifest) for rank in range(len(nodes))]
    outcomes: list[Any] = [None] * len(nodes)
    targets = [[bytearray(entry.nbytes) for entry in some] for some in wanted]

    def act(rank: int) -> None:
        try:
            sources = prepare(members[rank], rank)
            reads = plan_reads(wanted[rank], saved.layouts, rank)
            views = {at: memoryview(data) for at, data in enumerate(targets[rank])}
            place = Ranks(rank, len(nodes), store, prefix="t")
            outcomes[rank] = fill_shared(
                place, nodes[rank], sources, reads, views, timeout_s=TIMEOUT_S, shared_bytes=SHARED
            )
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes, members, [[bytes(data) for data in some] for some in targets]


def replicated(saved: Saved) -> list[list[Entry]]:
    return [[e for e in layout.entries if e.scope is Scope.GLOBAL] for layout in saved.layouts]


def require_right(saved: Saved, wanted: Sequence[Sequence[Entry]], found: Sequence[Sequence[bytes]]) -> None:
    for rank, (some, data) in enumerate(zip(wanted, found, strict=True)):
        assert [saved.bytes_of(entry, rank) for entry in some] == list(data), f"rank {rank}"


def union_of_chunks(saved: Saved, wanted: Sequence[Sequence[Entry]], ranks: Sequence[int]) -> int:
    """Bytes of all chunks that any of ``ranks`` needs, headers included."""
    needed: dict[tuple[int, str], set[int]] = {}
    for rank in ranks:
        reads = plan_reads(wanted[rank], saved.layouts, rank)
        for r, image in {(read.rank, read.image) for read in reads}:
            spec = next(spec for spec in saved.layouts[r].images if spec.name == image)
            some = [read for read in reads if (read.rank, read.image) == (r, image)]
            for begin, end in chunk_ranges(some, kit.CHUNK, spec.nbytes, len(spec.header)):
                needed.setdefault((r, image), set()).update(range(begin, end))
    return sum(len(offsets) for offsets in needed.values())


@pytest.mark.parametrize(("nodes", "times"), [("aaa", 1), ("aab", 2), ("abc", 3)])
def test_replicated_state_is_read_once_on_each_node(saved: Saved, nodes: str, times: int) -> None:
    wanted = replicated(saved)
    outcomes, members, found = load(saved, nodes, wanted)
    require_right(saved, wanted, found)
    once = union_of_chunks(saved, wanted, range(WORLD))
    assert sum(member.image_bytes_read for member in members) == times * once
    for outcome, some in zip(outcomes, wanted, strict=True):
        assert isinstance(outcome, FillReport) and not outcome.fallbacks
        assert outcome.nbytes == sum(entry.nbytes for entry in some)
    if times == 1:
        reads = [member.image_bytes_read for member in members]
        assert max(reads) - min(reads) < once / 4, "dealt out evenly"
        assert once / SHARED > 3, "there are several rounds"


def random_wants(rng: random.Random, saved: Saved) -> list[list[Entry]]:
    """Some tensors, whole or in boxes, and the own one; nothing at all for some ranks."""
    wanted: list[list[Entry]] = []
    for _ in range(WORLD):
        specs = []
        for key in rng.sample(["t0", "t1", "t2"], rng.choice([0, 1, 3, 3])):
            rows, columns = rng.randrange(ROWS), rng.randrange(33)
            box = Box((rows, columns), (rng.randint(0, ROWS - rows), rng.randint(0, 33 - columns)))
            boxes = (rng.choice([box, box, Box.full((ROWS, 33))]),)
            specs.append(EntrySpec("model", key, "float32", (ROWS, 33), boxes, Scope.GLOBAL))
        if rng.random() < 0.5:
            specs.append(whole("own", Scope.RANK))
        wanted.append(list(build_layout(specs).entries))
    return wanted


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_needed_each_chunk_is_read_once_on_each_node(saved: Saved, seed: int) -> None:
    rng = random.Random(seed)
    wanted = random_wants(rng, saved)
    nodes = rng.choice(["aaa", "aaa", "aab", "aba"])
    outcomes, members, found = load(saved, nodes, wanted)
    assert all(isinstance(outcome, FillReport) for outcome in outcomes), outcomes
    require_right(saved, wanted, found)
    for node in set(nodes):
        ranks = [rank for rank in range(WORLD) if nodes[rank] == node]
        once = union_of_chunks(saved, wanted, ranks)
        assert sum(members[rank].image_bytes_read for rank in ranks) == once


def test_one_rank_reads_straight(saved: Saved) -> None:
    wanted = replicated(saved)[:1]
    (outcome,), (member,), found = load(saved, "a", wanted)
    assert isinstance(outcome, FillReport) and LABEL not in outcome.read_bytes
    require_right(saved, wanted, found)
    assert member.image_bytes_read == union_of_chunks(saved, wanted, [0])


def test_what_lies_in_memory_is_not_shared(saved: Saved) -> None:
    wanted = replicated(saved)

    def prepare(rank: Rank, _: int) -> list[Source]:
        return [ArenaSource(saved.pins, kit.CHUNK), *rank.durable]  # type: ignore[arg-type]

    outcomes, members, found = load(saved, "aaa", wanted, prepare=prepare)
    require_right(saved, wanted, found)
    assert [list(o.read_bytes) for o in outcomes if isinstance(o, FillReport)] == [["memory"]] * WORLD
    assert sum(member.image_bytes_read for member in members) == 0


def failing(rank: Rank, which: int, error: Callable[[str], Exception]) -> Sequence[Source]:
    async def read_into(name: str, offset: int, view: memoryview) -> None:
        raise error(name)

    if rank.rank == which:
        rank.backends[0].read_into = read_into  # type: ignore[method-assign]
    return rank.durable


def test_a_reader_that_fails_fails_its_node_at_once_and_by_name(saved: Saved) -> None:
    wanted = replicated(saved)
    began = time.monotonic()
    outcomes, _, _ = load(
        saved,
        "aaa",
        wanted,
        prepare=lambda rank, _: failing(rank, 1, lambda name: Retryable(name, "timed out")),
    )
    assert time.monotonic() - began < TIMEOUT_S / 2
    assert isinstance(outcomes[1], CannotTell)
    for other in (outcomes[0], outcomes[2]):
        assert isinstance(other, RankError) and other.ranks == [1] and "timed out" in str(other)


def test_a_fault_of_the_code_is_told_too(saved: Saved) -> None:
    outcomes, _, _ = load(
        saved, "aaa", replicated(saved), prepare=lambda rank, _: failing(rank, 2, ZeroDivisionError)
    )
    assert isinstance(outcomes[2], ZeroDivisionError)
    assert all(isinstance(o, RankError) and "ZeroDivisionError" in str(o) for o in outcomes[:2]), outcomes


@pytest.fixture
def spoilt(saved: Saved, tmp_path: Path) -> Iterator[Path]:
    """A copy of the run with a flipped bit in the middle of one image."""
    shutil.copytree(saved.root, tmp_path / "copy")
    path = tmp_path / "copy" / names.image(STEP, 1, 1, 1, "model")
    data = bytearray(path.read_bytes())
    data[20_000] ^= 4
    path.chmod(0o600)
    path.write_bytes(bytes(data))
    yield tmp_path / "copy"


def test_damage_that_nobody_makes_good_is_damage_for_all(saved: Saved, spoilt: Path) -> None:
    outcomes, _, _ = load(saved, "aaa", replicated(saved), roots=[spoilt])
    for outcome in outcomes:
        assert isinstance(outcome, Damaged) and names.image(STEP, 1, 1, 1, "model") in str(outcome)


def test_a_lost_image_is_damage_for_all(saved: Saved, spoilt: Path) -> None:
    (spoilt / names.image(STEP, 1, 1, 2, "model")).unlink()
    wanted = replicated(saved)
    wanted[0] = []  # it needs nothing, and hears of it all the same
    outcomes, _, _ = load(saved, "aaa", wanted, roots=[spoilt])
    assert all(isinstance(outcome, Damaged) and "is missing" in str(outcome) for outcome in outcomes), (
        outcomes
    )


def test_damage_is_made_good_by_another_source(saved: Saved, spoilt: Path) -> None:
    wanted = replicated(saved)
    outcomes, members, found = load(saved, "aaa", wanted, roots=[spoilt, saved.root])
    require_right(saved, wanted, found)
    reports = [outcome for outcome in outcomes if isinstance(outcome, FillReport)]
    assert sum(report.fallbacks_count for report in reports) == 1, "its reader met it, and nobody else"
    assert sum(member.backends[1].bytes_read for member in members) == kit.CHUNK


def test_memory_that_was_written_over_is_not_believed(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = replicated(saved)
    real = sharing._Sharing._read

    async def scribble(self: Any, round_: Any, half: memoryview) -> FillReport:
        report = await real(self, round_, half)
        for share in round_:
            if share.reader == self._board.me:
                half[share.at + 77] ^= 1
        return report

    monkeypatch.setattr(sharing._Sharing, "_read", scribble)
    outcomes, _, found = load(saved, "aaa", wanted)
    require_right(saved, wanted, found)
    for outcome in outcomes:
        assert isinstance(outcome, FillReport)
        assert {fallback.source for fallback in outcome.fallbacks} == {LABEL}


@pytest.mark.parametrize("who", ["none", "one"])
def test_ranks_that_cannot_reach_the_memory_read_alone(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    wanted = replicated(saved)
    if who == "none":
        monkeypatch.setattr(sharing.os, "memfd_create", _refused)
    else:
        told = sharing._offer

        def misleading(*args: Any) -> Any:
            mine = told(*args)
            return mine._replace(told=mine.told._replace(token="00" * 16))

        monkeypatch.setattr(sharing, "_offer", misleading)
    outcomes, members, found = load(saved, "aaa", wanted)
    require_right(saved, wanted, found)
    assert all(isinstance(o, FillReport) and LABEL not in o.read_bytes for o in outcomes)
    once = union_of_chunks(saved, wanted, range(WORLD))
    assert sum(member.image_bytes_read for member in members) == WORLD * once


def _refused(*_: Any) -> int:
    raise OSError(38, "no memory files here")


def test_an_error_fits_into_its_page() -> None:
    long = "\N{SNOWMAN}" * 5000
    error = Damaged(long, found=long, expected=long, name=long, hint=long)
    assert len(msgspec.msgpack.encode(sharing._short(error))) <= sharing.PAGE - 16


JOB = """
import os, signal, sys, time
from pathlib import Path
from everstep.phases import Phases
from everstep.sharing import shared_fill
from torch.distributed import FileStore
from tests.facade import test_sharing as t

root, rank = Path(sys.argv[1]), int(sys.argv[3])
saved = t.Saved.__new__(t.Saved)
saved.layouts = t.layouts()
backend = t.LocalBackend(root)
manifest = t.open_manifest(backend)
member = t.Rank(rank, [root], manifest)
if rank == 1:
    async def die(name, offset, view):
        os.kill(os.getpid(), signal.SIGKILL)
    member.backends[0].read_into = die
wanted = t.replicated(saved)[rank]
reads = t.plan_reads(wanted, saved.layouts, rank)
targets = {i: memoryview(bytearray(e.nbytes)) for i, e in enumerate(wanted)}
place = t.Ranks(rank, 3, FileStore(sys.argv[2], 3), prefix="t")
place.agree("start", 0, timeout_s=60)
began = time.monotonic()
try:
    phases = Phases(place, "loading", timeout_s=60, node="n")
    with shared_fill(phases, member.durable, reads, targets, shared_bytes=t.SHARED) as fill_now:
        fill_now()
    print("no error")
except t.RankError as error:
    print("RankError", error.ranks, time.monotonic() - began < 10, error)
"""


def open_manifest(backend: LocalBackend) -> Manifest:
    async def read() -> Any:
        return await read_decision(backend, await list_step(backend, STEP, 1))

    found = run_blocking(read())
    assert isinstance(found, Manifest)
    return found


@pytest.mark.timeout(120)
def test_a_killed_reader_is_noticed_long_before_the_timeout(saved: Saved, tmp_path: Path) -> None:
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, str(saved.root), str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    told = [job.communicate(timeout=100) for job in jobs]
    assert jobs[1].returncode == -signal.SIGKILL, told[1]
    for rank in (0, 2):
        assert told[rank][0].startswith("RankError [1] True"), told[rank]


LOADING = """
import torch.distributed as dist
from everstep.backends.files import LocalBackend

dist.init_process_group("gloo")
rank = dist.get_rank()
counted = [0]
real = LocalBackend.read_into
async def read_into(self, name, offset, view):
    if name.endswith(".safetensors"):
        counted[0] += len(view)
    await real(self, name, offset, view)
LocalBackend.read_into = read_into
values = torch.arange(3 << 20, dtype=torch.float32)
state = everstep.TrainState(rng=False, replicated=("w",), w={"t": values.clone()})
if sys.argv[3] == "save":
    with everstep.Checkpointer(root, policy=policy()) as ckpt:
        ckpt.load(state)
        ckpt.save(1, state).wait()
else:
    target = {"t": torch.zeros_like(values)}
    state = everstep.TrainState(rng=False, replicated=("w",), w=target)
    with everstep.Checkpointer(root, policy=policy()) as ckpt:
        counted[0] = 0
        assert ckpt.load(state) == 1 and ckpt.recovery.tier == "disk", ckpt.recovery
        assert torch.equal(target["t"], values)
        (Path(sys.argv[2]) / f"read.{rank}").write_text(str(counted[0]))
dist.barrier()
"""


@pytest.mark.timeout(200)
def test_two_ranks_load_what_they_have_in_common_once(root: Path, tmp_path: Path) -> None:
    run_ranks(LOADING, root, tmp_path, "save")
    forget_memory(root)
    run_ranks(LOADING, root, tmp_path, "load")
    images = sum(path.stat().st_size for path in (root / "checkpoints").rglob("*.safetensors"))
    read = [int((tmp_path / f"read.{rank}").read_text()) for rank in range(2)]
    assert images > 12 << 20 and sum(read) == images
    assert min(read) > images / 3
