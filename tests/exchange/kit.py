"""A job on simulated nodes: ranks in processes that save into memory and are killed, ranks that load again, as
processes through the public face or as threads through the loader."""

from __future__ import annotations

import faulthandler
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import everstep
import torch
import torch.distributed as dist
from everstep.backends.open import open_backend
from everstep.discovery import open_arenas
from everstep.format.hashing import hexdigest
from everstep.format.vote import STATE_IMAGE
from everstep.loading import Loader, Recovery
from everstep.memory.arena import Arena
from everstep.memory.directory import find_arenas
from everstep.nodes import node_of
from everstep.phases import Phases
from everstep.places import locate
from everstep.ranks import Ranks
from everstep.reading import Filled, Reading
from everstep.store.blocking import run_blocking
from everstep.store.flush import IMAGE_REGION
from everstep.store.proving import check_chunks
from everstep.store.sources import DurableSource, Source

from tests.facade.kit import SHM, Forked, opened

WAIT_S = 30.0
SIZE = 3000

Digests = dict[tuple[int, str], str]
"""By saved rank and image."""


def contents(rank: int, step: int) -> dict[str, Any]:
    """What rank ``rank`` has to save at ``step``."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {
        "w": torch.rand(SIZE + rank, generator=generator),
        "b": torch.randint(0, 100, (7,), generator=generator),
        "n": step * 10 + rank,
    }


def state_with(values: dict[str, Any]) -> everstep.TrainState:
    return everstep.TrainState(rng=False, own=values)


def directory_of(root: Path, node: str) -> Path:
    return SHM / f"everstep-{os.getuid()}" / locate(root, node=node).run_key


def erase(root: Path, node: str) -> None:
    """As if the node had been replaced by another."""
    for info in find_arenas(directory_of(root, node)):
        assert info.path is not None
        info.path.unlink()


def manifests(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.glob("checkpoints/**/manifest-*.json"))


def held(root: Path, node: str) -> set[tuple[int, int, int]]:
    """(saved rank, incarnation, step) in the node's arenas."""
    found = set()
    for info in find_arenas(directory_of(root, node)):
        assert info.path is not None
        with Arena.attach(info.path) as arena:
            found |= {(info.rank, one.incarnation, one.step) for one in arena.snapshots()}
    return found


def digests_in_slots(root: Path, nodes: Sequence[str], key: tuple[int, int]) -> Digests:
    """The images of one snapshot, as they lie in the slots."""
    found: Digests = {}
    for node in nodes:
        for info in find_arenas(directory_of(root, node)):
            assert info.path is not None
            with Arena.attach(info.path) as arena:
                for one in arena.snapshots():
                    if one.key == key:
                        with arena.pin(one.index, one.generation) as pin:
                            for name in pin.regions:
                                if name.startswith(IMAGE_REGION) or name == STATE_IMAGE:
                                    image = name.removeprefix(IMAGE_REGION)
                                    found[info.rank, image] = hexdigest(bytes(pin.view(name)))
    return found


# -- ranks as processes

Body = Callable[[int, everstep.Checkpointer, Callable[..., None]], object]


def _launcher(say: Callable[..., None]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=WAIT_S), wait_for_workers=False)
    say(store.port)
    threading.Event().wait(20 * WAIT_S)


class Job:
    """Ranks on simulated nodes, one life after another. The launcher's store is a process of its own: its threads
    must not be in the one that forks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._store = Forked(_launcher)
        self._port = self._store.line()
        self._ranks: list[Forked] = []

    def start(self, places: Sequence[str], body: Body, **options: Any) -> list[Forked]:
        """One rank on each of ``places`` (names of nodes)."""
        self._ranks = [Forked(self._rank_body(rank, places, body, options)) for rank in range(len(places))]
        return self._ranks

    def _rank_body(
        self, rank: int, places: Sequence[str], body: Body, options: dict[str, Any]
    ) -> Callable[[Callable[..., None]], object]:
        def run(say: Callable[..., None]) -> None:
            os.environ.update(
                RANK=str(rank),
                WORLD_SIZE=str(len(places)),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=self._port,
                TORCHELASTIC_USE_AGENT_STORE="True",
                EVERSTEP_NODE=places[rank],
            )
            warnings.simplefilter("always")
            faulthandler.dump_traceback_later(2 * WAIT_S, exit=True)  # a rank that hangs ends, and says where
            body(rank, opened(self.root, **options), say)

        return run

    def end(self) -> None:
        self.kill()
        self._store.stop()

    def kill(self) -> None:
        for rank in self._ranks:
            rank.stop()
        self._ranks = []

    def run(self, places: Sequence[str], body: Body, **options: Any) -> list[list[str]]:
        """What each rank said; all must end well."""
        ends = [rank.end() for rank in self.start(places, body, **options)]
        for rank in self._ranks:
            rank.stop()
        assert [code for code, _ in ends] == [0] * len(places), ends
        return [lines for _, lines in ends]

    def save_and_die(self, places: Sequence[str], steps: Sequence[int], **options: Any) -> None:
        """Each rank saves its contents of ``steps`` into memory; all are killed."""

        def body(rank: int, ckpt: everstep.Checkpointer, say: Callable[..., None]) -> None:
            values = contents(rank, 0)
            state = state_with(values)
            ckpt.load(state)
            for step in steps:
                values.update(contents(rank, step))
                ckpt.step(step, state)
            say("saved")
            threading.Event().wait(WAIT_S)

        for rank in self.start(places, body, **options):
            assert rank.line() == "saved"
        self.kill()


# -- ranks as threads


@dataclass
class Loaded:
    """What one rank's load gave."""

    recovery: Recovery | None = None
    values: Any = None
    error: BaseException | None = None
    warned: list[str] = field(default_factory=list)


def all_digests(opened: Callable[[], Sequence[Source]], phases: Phases) -> Filled:
    """Every image of every saved rank, proved chunk by chunk, from the nearest holder alone."""

    async def read(sources: Sequence[Source]) -> Digests:
        found: Digests = {}
        for rank in range(sources[0].world):
            first = next(source for source in sources if rank in source.ranks)
            await first.meta(rank)
            await first.layout(rank)
            await first.state(rank)
            for name, record in (await first.records(rank)).items():
                data = bytearray(record.nbytes)
                holder = next(one for one in sources if rank in one.ranks and one.has(rank, name))
                await holder.check_image(rank, name)
                await holder.read_into(rank, name, 0, memoryview(data))
                check_chunks(memoryview(data), 0, record, holder.chunk_bytes, holder.locate(rank, name))
                found[rank, name] = hexdigest(bytes(data))
        return found

    def act() -> Filled:
        sources = opened()
        tier = "disk" if isinstance(sources[0], DurableSource) else "memory"
        return Filled(tier, 0, values=run_blocking(read(sources)))

    return phases.each(act)


def load_on(
    root: Path,
    places: Sequence[str],
    read: Callable[[int], Reading] = lambda rank: all_digests,
    *,
    timeout_s: float = WAIT_S,
    **options: Any,
) -> list[Loaded]:
    """All ranks of a new world load, each on a thread."""
    store = dist.HashStore()
    backend = open_backend(locate(root).url, shared=True)
    results = [Loaded() for _ in places]

    def run(rank: int, node: str) -> None:
        place = locate(root, node=node)
        directory = directory_of(root, node)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with ExitStack() as stack:
                arenas = stack.enter_context(open_arenas(directory))
                loader = Loader(
                    backend,
                    Ranks(rank, len(places), store, prefix="test"),
                    arenas,
                    timeout_s=timeout_s,
                    node=node_of(place.node, directory),
                )
                found = loader.load(read(rank), step=options.get("step"))
                if found is not None:
                    results[rank].recovery, results[rank].values = found[0], found[1].values
        except BaseException as error:
            results[rank].error = error

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=run, args=(rank, node)) for rank, node in enumerate(places)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * WAIT_S)
            assert not thread.is_alive()
    run_blocking(backend.close())
    for result in results:
        result.warned = [str(one.message) for one in caught]
    return results
