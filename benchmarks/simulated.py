"""A large job that never ran: the layouts and votes of thousands of ranks, made in one process.

The layouts are those that the ranks would make, byte for byte (:func:`check_simulation`); only the way to them is
shorter. Images are not written, and votes name hashes of nothing: a commit looks at neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.backends.files import LocalBackend
from everstep.format import names
from everstep.format.columns import pack_array
from everstep.format.constants import CHUNK_BYTES, FORMAT_VERSION, HASH_BYTES, HASH_ID
from everstep.format.entries import Box, EntrySpec, Scope
from everstep.format.fields import Own, encode_own, read_own
from everstep.format.gather import encode_gather
from everstep.format.hashing import chunk_count, image_root, rank_root
from everstep.format.layout import build_layout, compress, encode, layout_hash
from everstep.format.records import IncarnationRecord, RunRecord, Writer, encode_incarnation, encode_run
from everstep.format.vote import STATE_IMAGE, ImageRecord, Vote, encode_vote
from everstep.plan.owners import Owners, Replica

from .common import Mismatch

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

REPLICATED = 24
"""Small replicated tensors, on top of the sharded ones."""
RANKS_PER_NODE = 8
STATE_BYTES = 20_000
CREATED = "2026-01-01T00:00:00Z"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of the job. ``cut``: "even" (sizes differ by at most one), "chunk" (as torch.chunk: the last ranks
    have less, or nothing) or "" (replicated)."""

    part: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    cut: str

    def rows(self, rank: int, world: int) -> tuple[int, int]:
        """The rows that a rank holds, from and to."""
        size = self.shape[0]
        if self.cut == "even":
            return rank * size // world, (rank + 1) * size // world
        chunk = -(-size // world)
        return min(rank * chunk, size), min((rank + 1) * chunk, size)


class Job:
    """``entries`` tensors of a model and its optimizer, cut on dimension 0 over all ``world`` ranks, and
    ``REPLICATED`` small ones that each rank holds and one stores."""

    def __init__(self, world: int, entries: int) -> None:
        import numpy as np

        self.world = world
        self.tensors = _tensors(world, entries)
        self.owners = owners_of(self.tensors, world)
        self._sizes = np.array([t.shape[0] for t in self.tensors])
        self._columns = np.array([t.shape[1] if t.cut else 1 for t in self.tensors])
        self._even = np.array([t.cut == "even" for t in self.tensors])
        self._cut = np.array([bool(t.cut) for t in self.tensors])
        self._model = np.array([t.part == "model" for t in self.tensors])
        self._item = np.array([2 if t.dtype == "bfloat16" else 4 for t in self.tensors])
        self._owner = np.array([self.owners.get((t.part, t.key), -1) for t in self.tensors])
        first = read_own(encode(build_layout(self.specs(0))), "rank 0")
        assert first is not None
        self._first = first

    def specs(self, rank: int) -> list[EntrySpec]:
        """What the rank's planner is given."""
        return [self._spec(tensor, rank) for tensor in self.tensors]

    def _spec(self, tensor: Tensor, rank: int) -> EntrySpec:
        full = Box.full(tensor.shape)
        if not tensor.cut:
            stored = self.owners[tensor.part, tensor.key] == rank
            return EntrySpec(
                tensor.part, tensor.key, tensor.dtype, tensor.shape, (full,), Scope.GLOBAL, stored
            )
        begin, end = tensor.rows(rank, self.world)
        box = Box((begin, 0), (end - begin, tensor.shape[1]))
        boxes = (box,) if end > begin else ()
        return EntrySpec(tensor.part, tensor.key, tensor.dtype, tensor.shape, boxes, Scope.GLOBAL)

    def layout(self, rank: int) -> bytes:
        """The canonical bytes of the rank's layout."""
        import numpy as np

        world, sizes = self.world, self._sizes
        chunk = -(-sizes // world)
        begin = np.where(self._even, rank * sizes // world, np.minimum(rank * chunk, sizes))
        end = np.where(self._even, (rank + 1) * sizes // world, np.minimum((rank + 1) * chunk, sizes))
        held = self._cut & (end > begin)
        stored = held | (self._owner == rank)
        rows = np.where(self._cut, end - begin, sizes)
        nbytes = np.where(stored, rows * self._columns * self._item, 0)
        flat = np.zeros((2, int(held.sum()), 2), np.int64)
        flat[0, :, 0], flat[1, :, 0], flat[1, :, 1] = begin[held], rows[held], self._columns[held]
        own = Own(
            v=FORMAT_VERSION,
            schema=self._first.schema,
            images=self._first.images,
            image_part=self._first.image_part,
            image_bytes=[int(nbytes[self._model].sum()), int(nbytes[~self._model].sum())],
            boxes=pack_array(np.where(self._cut, 1 + held, 0)),
            offsets=pack_array(flat[0].ravel()),
            lengths=pack_array(flat[1].ravel()),
            image=pack_array(np.where(stored, np.where(self._model, 1, 2), 0)),
            begin=None,
        )
        return encode_own(own)


def owners_of(tensors: Sequence[Tensor], world: int) -> dict[tuple[str, str], int]:
    """The rank that stores each replicated tensor, found as every rank finds it."""
    whole = [Replica(tensor.part, tensor.key, 4 * tensor.shape[0]) for tensor in tensors if not tensor.cut]
    return {key: found[0] for key, found in Owners(world).assign(whole).items()}


def _tensors(world: int, entries: int) -> list[Tensor]:
    found = []
    parameters = -(-entries // 3)
    modules = (
        "attention.wq",
        "attention.wk",
        "attention.wv",
        "attention.wo",
        "feed_forward.w1",
        "feed_forward.w2",
    )
    for index in range(parameters):
        layer, module = divmod(index, len(modules))
        shape = (world * (1 + index % 4) + index * 37 % world, 64 * (1 + index % 8))
        cut = "chunk" if index % 10 == 9 else "even"
        name = f"layers.{layer}.{modules[module]}.weight"
        found.append(Tensor("model", name, "bfloat16", shape, cut))
        found += [
            Tensor("optimizer", f"state/{name}/{moment}", "float32", shape, cut)
            for moment in ("exp_avg", "exp_avg_sq")
        ]
    found = sorted(found[:entries], key=lambda tensor: tensor.part)
    norms = [
        Tensor("model", f"layers.{layer}.norm.weight", "float32", (64 * (1 + layer % 8),), "")
        for layer in range(REPLICATED)
    ]
    return [*norms, *found]


def check_simulation(job: Job, ranks: Sequence[int]) -> None:
    """Raise Mismatch unless these ranks' layouts are the ones that planning makes."""
    for rank in ranks:
        if encode(build_layout(job.specs(rank))) != job.layout(rank):
            raise Mismatch(f"the simulated layout of rank {rank} is not the one that rank {rank} makes")


@dataclass(frozen=True, slots=True)
class Written:
    """What was put into a run's directory. Bytes of all ranks' layouts as stored, and of one canonical."""

    layouts_bytes: int
    canonical_bytes: int
    votes_bytes: int


def write_run(root: Path, job: Job, step: int) -> Written:
    """A run in which all ranks of ``job`` have voted for attempt 1 of ``step``, votes gathered by node, and nothing
    is decided. Not made durable: what is measured is reading."""
    record = RunRecord("5" * 32, FORMAT_VERSION, (), HASH_ID, CHUNK_BYTES, CREATED)
    _put(root, names.RUN, encode_run(record))
    _put(root, names.incarnation(1), encode_incarnation(_incarnation(job.world)))
    (root / names.LAYOUTS).mkdir()
    (root / names.attempt_dir(step, 1, 1)).mkdir(parents=True)
    layouts_bytes = canonical_bytes = votes_bytes = 0
    node: list[bytes] = []
    for rank in range(job.world):
        encoded = job.layout(rank)
        stored = compress(encoded)
        hash_text = layout_hash(encoded)
        (root / names.layout(hash_text)).write_bytes(stored)
        vote = encode_vote(_vote(job, rank, step, hash_text, encoded))
        (root / names.vote(step, 1, 1, rank)).write_bytes(vote)
        layouts_bytes, canonical_bytes = layouts_bytes + len(stored), max(canonical_bytes, len(encoded))
        votes_bytes += len(vote)
        node.append(vote)
        if len(node) == RANKS_PER_NODE or rank == job.world - 1:
            (root / names.gather(step, 1, 1, rank + 1 - len(node))).write_bytes(encode_gather(node))
            node = []
    return Written(layouts_bytes, canonical_bytes, votes_bytes)


def backend_of(root: Path) -> LocalBackend:
    return LocalBackend(root, shared=True)


def _put(root: Path, name: str, data: bytes) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _incarnation(world: int) -> IncarnationRecord:
    return IncarnationRecord(
        number=1,
        id="1" * 16,
        parent=None,
        adopted_incarnation=None,
        adopted_step=None,
        fresh=None,
        world=world,
        mesh={"dp": world},
        config_hash=None,
        config=None,
        config_changes={},
        config_reason=None,
        loosened=(),
        writer=Writer("simulated", "", 1, 1),
        created=CREATED,
    )


def _vote(job: Job, rank: int, step: int, hash_text: str, encoded: bytes) -> Vote:
    own = read_own(encoded, "layout")
    assert own is not None
    sizes = {**dict(zip(own.images, own.image_bytes, strict=True)), STATE_IMAGE: STATE_BYTES + rank % 100}
    records = tuple([_record(name, nbytes) for name, nbytes in sizes.items()])
    meta = {
        "mesh": {"dp": job.world},
        "coordinates": {"dp": rank},
        "parts": {
            "model": {"class": "Transformer", "settings": {}},
            "optimizer": {"class": "AdamW", "settings": {}},
        },
        "data": {"kind": "stream", "position": {"shard": rank, "offset": 12345 * step}},
        "rng": ["python", "numpy", "torch"],
        "metrics": {"loss": 2.5},
        "config_hash": "ab" * 16,
        "libraries": {"torch": "2.13.0", "everstep": "0.1.0"},
    }
    vote = Vote(step, 1, 1, rank, job.world, "full", hash_text, bytes(HASH_BYTES), records, None, meta)
    return replace(vote, root=rank_root(records))


def _record(name: str, nbytes: int) -> ImageRecord:
    chunks = bytes(HASH_BYTES * chunk_count(nbytes, CHUNK_BYTES))
    return ImageRecord(name, nbytes, image_root(nbytes, chunks), chunks)
