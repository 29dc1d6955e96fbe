"""Held snapshots as a holder's agent leaves them, made from dead ranks' arenas; damage; ranks that load, on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import everstep
import torch
from everstep.format.names import shared_with
from everstep.format.records_table import encode_records
from everstep.format.vote import STATE_IMAGE, ImageRecord
from everstep.memory.arena import Arena
from everstep.memory.directory import find_arenas
from everstep.memory.header import Kind
from everstep.memory.process import Process
from everstep.memory.slots import Pinned
from everstep.places import locate
from everstep.reading import into_state

from tests.exchange.kit import WAIT_S, Job, Loaded, directory_of, load_on

Say = Callable[..., None]
IMAGE = "image:own"
BIG = 3 << 18
"""float32 elements of 3 MiB: three whole chunks and a bit."""


def contents(rank: int, step: int, size: int = 3000) -> dict[str, Any]:
    """What rank ``rank`` has to save at ``step``: two parts."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    own = {"w": torch.rand(size + rank, generator=generator), "n": step * 10 + rank}
    return {"own": own, "more": {"m": torch.rand(50, generator=generator)}}


def update(values: Mapping[str, dict[str, Any]], new: Mapping[str, dict[str, Any]]) -> None:
    for part, some in new.items():
        values[part].update(some)


def state_with(values: Mapping[str, Any]) -> everstep.TrainState:
    return everstep.TrainState(rng=False, **values)


def save(
    job: Job,
    places: Sequence[str],
    steps: Mapping[int, Collection[int]] | Collection[int],
    *,
    durable: Collection[int] = (),
    size: int = 3000,
    load: bool = True,
) -> None:
    """Each rank saves its contents of ``steps`` (of all ranks, or by step those that get to it) into memory, those in
    ``durable`` to disk too; then all are killed."""

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        values = contents(rank, 0, size)
        state = state_with(values)
        if load:
            ckpt.load(state)
        for step in steps:
            if isinstance(steps, Mapping) and rank not in steps[step]:
                continue
            update(values, contents(rank, step, size))
            ckpt.step(step, state)
            if step in durable:
                ckpt.save(step, state).wait()
        say("saved")
        threading.Event().wait(WAIT_S)

    for rank in job.start(places, body):
        assert rank.line() == "saved"
    job.kill()


# -- what lies in memory


@contextmanager
def pins(root: Path, node: str, *kinds: Kind) -> Iterator[list[tuple[Arena, Pinned]]]:
    """Every snapshot on the node."""
    with ExitStack() as stack:
        found = []
        for info in find_arenas(directory_of(root, node), *kinds):
            assert info.path is not None
            arena = stack.enter_context(Arena.attach(info.path))
            for one in arena.snapshots():
                found.append((arena, stack.enter_context(arena.pin(one.index, one.generation))))
        yield found


def hold(
    root: Path,
    owner: str,
    holder: str,
    *,
    ranks: Collection[int] | None = None,
    steps: Collection[int] | None = None,
    without: Collection[str] = (),
) -> None:
    """Have ``holder`` keep what ``owner``'s own arenas hold of ``ranks`` and ``steps``, as if it had been sent: images
    that ranks of the holder copy themselves, and those in ``without``, are left out."""
    local = {info.rank for info in find_arenas(directory_of(root, holder), Kind.OWN)}
    directory_of(root, holder).mkdir(parents=True, exist_ok=True)
    with pins(root, owner, Kind.OWN) as found:
        for rank in sorted({arena.info.rank for arena, _ in found}):
            some = [
                (arena, pin)
                for arena, pin in found
                if arena.info.rank == rank and (steps is None or pin.info.step in steps)
            ]
            if some and (ranks is None or rank in ranks):
                _keep(root, holder, rank, some, local, without)


def _keep(
    root: Path,
    holder: str,
    rank: int,
    some: Sequence[tuple[Arena, Pinned]],
    local: Collection[int],
    without: Collection[str],
) -> None:
    info = some[0][0].info
    with Arena.create(
        directory_of(root, holder),
        run_key=locate(root, node=holder).run_key,
        node=holder,
        rank=rank,
        world=info.world,
        slots=max(2, len(some)),
        slot_bytes=info.slot_bytes + (1 << 20),
        chunk_bytes=info.chunk_bytes,
        kind=Kind.HELD,
    ) as arena:
        arena.take(
            Process.current(),
            run_id=info.run_id,
            incarnation=max(pin.info.incarnation for _, pin in some),
            world=info.world,
        )
        for _, pin in sorted(some, key=lambda one: one[1].info.key):
            _write(arena, pin, records_of(pin), local, without)


def records_of(pin: Pinned) -> tuple[ImageRecord, ...]:
    """The owner's, sealed now where they were not."""
    records = pin.sealed()
    if records is None:
        records = pin.compute()
        pin.seal(records)
    return records


def _write(
    arena: Arena,
    pin: Pinned,
    records: Sequence[ImageRecord],
    local: Collection[int],
    without: Collection[str],
) -> None:
    sent = [
        one
        for one in records
        if one.name not in without and (one.name == STATE_IMAGE or not local & set(shared_with(one.name)))  # type: ignore[operator]
    ]
    names = ["state" if one.name == STATE_IMAGE else f"image:{one.name}" for one in sent] + ["layout", "meta"]
    table = encode_records(records)
    slot = arena.begin(pin.info.incarnation, pin.info.step, complete=None)
    assert slot is not None
    views = slot.place([*((name, pin.regions[name]) for name in names), ("records", len(table))])
    for name in names:
        views[name][:] = pin.view(name)
    views["records"][:] = table
    slot.publish(pin.info.layout_hash)
    with arena.pin(slot.index, slot.generation) as written:
        written.seal(tuple(sent))


def damage(
    root: Path, node: str, kind: Kind, rank: int, step: int, region: str = IMAGE, at: int = -5
) -> None:
    """Flip one bit of a region, in every arena of that kind and rank on the node."""
    hits = 0
    with pins(root, node, kind) as found:
        for arena, pin in found:
            if arena.info.rank == rank and pin.info.step == step:
                place = pin._places[region]
                view = arena._control.data(pin.info.index, place.offset, place.nbytes)
                view[at] ^= 4
                hits += 1
                view.release()
    assert hits, "nothing there to be damaged"


def regions(root: Path, node: str, kind: Kind, rank: int, step: int) -> set[str]:
    with pins(root, node, kind) as found:
        for arena, pin in found:
            if arena.info.rank == rank and pin.info.step == step:
                return set(pin.regions)
    return set()


# -- loading


class Loads:
    """What all ranks of a job got."""

    def __init__(self, results: list[Loaded], values: list[dict[str, Any]], size: int) -> None:
        self.results = results
        self.values = values
        self._size = size

    def check(self, step: int, tier: str = "memory") -> Loads:
        """All ranks have ``step``, every bit of it."""
        for rank, (result, values) in enumerate(zip(self.results, self.values, strict=True)):
            assert result.error is None, result.error
            assert result.recovery is not None
            assert (result.recovery.step, result.recovery.tier) == (step, tier), result.recovery
            wanted = contents(rank, step, self._size)
            assert values["own"]["n"] == wanted["own"]["n"]
            assert torch.equal(values["own"]["w"], wanted["own"]["w"])
            assert torch.equal(values["more"]["m"], wanted["more"]["m"])
        return self

    def kinds(self) -> list[set[str]]:
        """By rank, whence its bytes came."""
        return [set(result.recovery.sources) for result in self.results if result.recovery]

    def sources(self, rank: int) -> Mapping[str, int]:
        recovery = self.results[rank].recovery
        assert recovery is not None
        return recovery.sources

    def fallbacks(self, rank: int) -> tuple[str, ...]:
        recovery = self.results[rank].recovery
        assert recovery is not None
        return recovery.fallbacks

    def skipped(self, rank: int = 0) -> str:
        recovery = self.results[rank].recovery
        assert recovery is not None
        return "; ".join(recovery.skipped)

    @property
    def warned(self) -> str:
        return "\n".join(self.results[0].warned)


def load(root: Path, places: Sequence[str], *, size: int = 3000, **options: Any) -> Loads:
    """One rank on each of ``places`` loads the newest step into live values."""
    values = [contents(rank, 0, size) for rank in range(len(places))]
    results = load_on(root, places, lambda rank: into_state(state_with(values[rank])), **options)
    return Loads(results, values, size)
