"""Jobs of several ranks in one process: states flattened as each rank would store them, held by a source in memory,
and read by ranks that are threads which talk through a store."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
from everstep.format.hashing import chunk_hashes, image_root
from everstep.format.layout import Layout
from everstep.format.vote import STATE_IMAGE, ImageRecord
from everstep.phases import PhaseFailed, Phases
from everstep.planning import LayoutPlanner
from everstep.ranks import Ranks
from everstep.reading import Reading, as_values, into_state
from everstep.state.sharded import Shards
from everstep.state.tensors import bytes_of
from everstep.state.trainstate import TrainState

CHUNK_BYTES = 256
TIMEOUT_S = 30.0


class MemorySource:
    """A checkpoint of ``states``, one for each rank, as a holder of images. ``asked`` are the ranks whose state
    images were read."""

    label, kind, step, incarnation, chunk_bytes = "test", "own", 1, 1, CHUNK_BYTES

    def __init__(self, states: Sequence[Any], kind: str | None = None) -> None:
        self.world = len(states)
        self.ranks = frozenset(range(self.world))
        self.asked: list[int] = []
        self._kind = kind
        self._layouts: list[Layout] = []
        self._images: list[dict[str, bytearray]] = []
        self._records: list[dict[str, ImageRecord]] = []
        for rank, state in enumerate(states):
            self._add(rank, TrainState.of(state))

    def _add(self, rank: int, state: TrainState) -> None:
        flat = state.flatten()
        layout = LayoutPlanner(rank, self.world).plan(flat).layout
        images = {}
        for spec in layout.images:
            data = images[spec.name] = bytearray(spec.nbytes)
            data[: len(spec.header)] = spec.header
        for entry, leaf in zip(layout.entries, flat.leaves, strict=True):
            if entry.image is not None:
                data = b"".join(bytes(bytes_of(piece)) for piece in leaf.pieces)
                images[layout.images[entry.image].name][entry.offset : entry.offset + entry.nbytes] = data
        self._layouts.append(layout)
        self._images.append({**images, STATE_IMAGE: bytearray(flat.state)})
        self._records.append({})
        for name, data in self._images[rank].items():
            chunks = chunk_hashes(memoryview(data), CHUNK_BYTES)
            record = ImageRecord(name, len(data), image_root(len(data), chunks), chunks)
            self._records[rank][name] = record

    def damage(self, rank: int, image: str) -> None:
        """Flip the last bit of an image."""
        self._images[rank][image][-1] ^= 1

    async def meta(self, rank: int) -> dict[str, Any]:
        return {"data": None if self._kind is None else {"kind": self._kind}}

    async def layout(self, rank: int) -> Layout:
        return self._layouts[rank]

    async def records(self, rank: int) -> dict[str, ImageRecord]:
        return self._records[rank]

    async def state(self, rank: int) -> bytes:
        self.asked.append(rank)
        return bytes(self._images[rank][STATE_IMAGE])

    def has(self, rank: int, image: str) -> bool:
        return True

    async def check_image(self, rank: int, image: str) -> None:
        assert image in self._images[rank]

    async def read_into(self, rank: int, image: str, offset: int, view: memoryview) -> None:
        view[:] = self._images[rank][image][offset : offset + len(view)]

    def mapped(self, rank: int, image: str) -> memoryview | None:
        return None

    def locate(self, rank: int, image: str) -> str:
        return f"{rank}/{image}"

    async def confirm(self) -> None:
        pass


def read_alone(source: MemorySource, reading: Reading) -> Any:
    """One process that is no job."""
    try:
        return reading(lambda: [source], Phases(Ranks.alone(), "loading", timeout_s=TIMEOUT_S))
    except PhaseFailed as failed:
        raise failed.errors[0] from failed


def values(source: MemorySource, rank: int = 0, **options: Any) -> Any:
    return read_alone(source, as_values(rank, options.get("parts"), options.get("keys"))).values


def load(
    source: MemorySource, states: Sequence[Any], allow: Collection[str] = (), **options: Any
) -> list[tuple[str, ...]]:
    """Load into ``states``, one for each rank of the new job; texts of what was loosened, by rank. Raises the error
    of the first rank that failed."""
    store = torch.distributed.HashStore()
    results: list[Any] = [None] * len(states)

    def run(rank: int) -> None:
        ranks = Ranks(rank, len(states), store if len(states) > 1 else None, prefix="test")
        phases = Phases(ranks, "loading", timeout_s=TIMEOUT_S)
        try:
            reading = into_state(TrainState.of(states[rank]), allow, **options)
            results[rank] = reading(lambda: [source], phases)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [result for result in results if isinstance(result, BaseException)]
    if failed:
        assert len(failed) == len(states), results
        for error in failed:
            if isinstance(error, PhaseFailed):
                raise error.errors[min(error.errors)] from error
        raise failed[0]
    return [result.loosened for result in results]


def quietly(act: Any, *args: Any, **options: Any) -> Any:
    """The result of a load at another number of ranks, which warns of its random numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return act(*args, **options)


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def rows(full: torch.Tensor, begin: int, end: int) -> Shards:
    """Rows ``begin`` to ``end`` of ``full``, as one rank holds them: a copy."""
    lengths = (end - begin, *full.shape[1:])
    if begin == end:
        return Shards(full.shape, [], [], dtype=full.dtype)
    return Shards(full.shape, [((begin, *[0] * (full.dim() - 1)), lengths)], [full[begin:end].clone()])


def split(full: torch.Tensor, world: int) -> list[Shards]:
    """``full`` in rows over ``world`` ranks, the last ones with less or nothing."""
    size = -(-full.shape[0] // world)
    return [
        rows(full, min(rank * size, full.shape[0]), min((rank + 1) * size, full.shape[0]))
        for rank in range(world)
    ]


def joined(parts: Sequence[Shards]) -> torch.Tensor:
    """The whole tensor of what all ranks hold."""
    full = torch.full(parts[0].shape, float("nan"))
    for part in parts:
        for box, tensor in zip(part.boxes, part.tensors, strict=True):
            full[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))] = tensor
    return full
