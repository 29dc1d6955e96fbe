"""Deltas are read ahead: from both checkpoints, once, whole blocks, in no more memory, with the same errors."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from everstep.backends.aligned import BLOCK, is_aligned
from everstep.backends.files import LocalBackend
from everstep.backends.localfs import LocalFiles
from everstep.errors import Damaged
from everstep.format import names, packed
from everstep.format.manifest import Manifest
from everstep.plan.reads import plan_reads
from everstep.store import ahead, bases, fill
from everstep.store.ahead import Ahead
from everstep.store.blocking import run_blocking
from everstep.store.fill import FillReport
from everstep.store.pieces import InFlight
from everstep.store.sources import DurableSource, bases_at

from tests.buffers import Buffers
from tests.store import store_kit

from . import kit

STATES = [kit.first(rank) for rank in range(kit.WORLD)]
CHANGED = [kit.dense(data, rank) for rank, data in enumerate(STATES)]
WAIT_S = 20.0
BASE = names.image(1, 1, 1, 0, "model")
DELTA = names.packed(2, 1, 1, 0, "model")
PIECES, PIECE_BYTES = 3, 4 * kit.CHUNK

Prepare = Callable[[Path], Sequence[str]]
"""Changes the run; the places of bases, nearest first."""


class Reads:
    """Reads into memory: how often each place, and whether they are such that direct I/O takes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places: Counter[tuple[str, int]] = Counter()
        self.whole: list[bool] = []
        self.began = threading.Event()
        lock = threading.Lock()
        plain = LocalFiles.read_into

        def read_into(files: LocalFiles, name: str, offset: int, view: memoryview) -> None:
            with lock:
                self.places[name, offset] += 1
                self.whole.append(offset % BLOCK == 0 and is_aligned(view))
            if name in (BASE, DELTA):
                self.began.set()
            plain(files, name, offset, view)

        monkeypatch.setattr(LocalFiles, "read_into", read_into)


def loaded(tmp_path: Path, prepare: Prepare | None = None) -> FillReport:
    """What a load of rank 0's delta does, its images read ahead; all that comes is compared."""
    made: list[Manifest] = []

    async def work(backend: LocalBackend) -> None:
        full = await kit.save(backend, 1, STATES)
        made.append(await kit.save(backend, 2, CHANGED, kit.source_of(backend, full)))

    kit.on(tmp_path, work)
    [delta] = made
    places = prepare(tmp_path) if prepare is not None else ["run"]
    backends = [LocalBackend(tmp_path / place) for place in places]
    source = DurableSource(backends[0], delta, kit.CHUNK, bases=bases_at(backends, kit.CHUNK))
    early = Ahead(InFlight(PIECES, PIECE_BYTES))
    try:
        early.begin([source], 0)
        layouts = [run_blocking(source.layout(rank)) for rank in range(kit.WORLD)]
        entries = layouts[0].entries
        buffers = [bytearray(store_kit._held_bytes(entry)) for entry in entries]
        targets = {at: memoryview(buffer) for at, buffer in enumerate(buffers)}
        report = run_blocking(fill.fill([source], plan_reads(entries, layouts, 0), targets, ahead=early))
    finally:
        early.end()
        for backend in backends:
            run_blocking(backend.close())
    for entry, buffer in zip(entries, buffers, strict=True):
        if entry.image is not None:
            image = CHANGED[0][layouts[0].images[entry.image].name]
            assert buffer == image[entry.offset : entry.offset + entry.nbytes], entry.key
    return report


def test_base_and_delta_are_read_once_and_in_whole_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    begun: list[bool] = []
    plain = Ahead.first

    async def first(self: Ahead, pieces: Any) -> Any:
        begun.append(reads.began.wait(WAIT_S) and {BASE, DELTA} <= {name for name, _ in reads.places})
        return await plain(self, pieces)

    monkeypatch.setattr(Ahead, "first", first)

    def prepare(path: Path) -> list[str]:
        reads.places.clear()
        reads.whole.clear()
        reads.began.clear()
        return ["run"]

    loaded(tmp_path, prepare)
    assert begun == [True]
    tails = {
        name: (tmp_path / "run" / name).stat().st_size
        - packed.tail_bytes(len(CHANGED[0][name.split(".")[1]]), kit.CHUNK)
        for name, _ in reads.places
        if name.endswith(".packed")
    }
    assert len(tails) == len(CHANGED[0])
    assert reads.whole.count(False) == len(tails)  # the tables
    assert max(reads.places.values()) == 1


def test_no_more_buffers_than_a_filling_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Buffers] = []

    def prepare(path: Path) -> list[str]:
        found.append(Buffers(monkeypatch, ahead, fill, bases))
        return ["run"]

    loaded(tmp_path, prepare)
    assert found[0].most == PIECES
    assert found[0].largest <= 2 * PIECE_BYTES + 2 * BLOCK


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("chunk", [1, 9], ids=["read ahead", "read later"])
def test_a_damaged_chunk_of_the_base(tmp_path: Path, chunk: int) -> None:
    def prepare(path: Path) -> list[str]:
        shutil.copytree(path / "run", path / "far")
        damage(path / "run" / BASE, chunk * kit.CHUNK + 7)
        return ["run", "far"]

    assert loaded(tmp_path / "served", prepare).fallbacks == []
    with pytest.raises(Damaged) as caught:
        loaded(tmp_path / "lost", lambda path: prepare(path)[:1])
    assert (caught.value.name, caught.value.fields["offset"]) == (BASE, chunk * kit.CHUNK)


@pytest.mark.parametrize("at", [0, 20_000], ids=["read ahead", "read later"])
def test_a_damaged_payload_is_named(tmp_path: Path, at: int) -> None:
    def prepare(path: Path) -> list[str]:
        damage(path / "run" / DELTA, at)
        return ["run"]

    with pytest.raises(Damaged) as caught:
        loaded(tmp_path, prepare)
    assert caught.value.name == DELTA


def test_a_base_that_is_gone_is_named(tmp_path: Path) -> None:
    def prepare(path: Path) -> list[str]:
        (path / "run" / BASE).unlink()
        return ["run"]

    with pytest.raises(Damaged, match=f"{BASE} is missing"):
        loaded(tmp_path, prepare)
