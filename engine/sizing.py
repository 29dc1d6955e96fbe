"""``everstep.plan_memory``: what the memory tier will take, before a job is started. Needs no torch, reserves
nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import BadOption, NoCheckpoint
from .format.constants import CHUNK_BYTES
from .memory.directory import find_arenas
from .memory.header import Kind, aligned
from .memory.room import limits
from .memory.sizes import (
    AGENT_BYTES,
    SHARED_BYTES,
    arena_bytes,
    around_bytes,
    estimated_slot_bytes,
)
from .peers.keeper import with_records
from .peers.nodemap import IMAGES_PER_RANK, STATE_BYTES
from .peers.shelf import SLOTS as HELD_SLOTS
from .places import Place, locate
from .plan.room import Job, Limit, Loss, Room, Verdict, advice, compare, plan, survival
from .policy import Memory

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "float8": 1}
OPTIMIZERS = {
    "adam": 2,
    "adamw": 2,
    "adagrad": 1,
    "adafactor": 1,
    "muon": 1,
    "rmsprop": 1,
    "momentum": 1,
    "sgd": 0,
    "none": 0,
}
"""Tensors as large as each parameter."""

TENSORS = 1000
"""Of a rank, where nobody says how many: 320 bytes of room each."""


@dataclass(frozen=True)
class MemoryPlan:
    """``job`` is what was planned for, ``room`` what it takes (bytes per rank and node), ``verdicts`` whether that fits
    on this node, ``advice`` what to set where it does not, ``survival`` what survives what. ``source`` says where
    the size of the state is from."""

    job: Job
    room: Room
    verdicts: tuple[Verdict, ...]
    advice: tuple[str, ...]
    survival: tuple[Loss, ...]
    source: str

    @property
    def fits(self) -> bool:
        """Whether the plan fits on this node, the moment of recovery included."""
        return all(one.fits_recovery for one in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        room = self.room
        return {
            "source": self.source,
            "job": asdict(self.job),
            "bytes": {
                **asdict(room),
                "node": room.node,
                "recovery": room.recovery,
                "most": room.most,
            },
            "limits": [
                {**asdict(one), "fits": one.fits, "fits_recovery": one.fits_recovery} for one in self.verdicts
            ],
            "fits": self.fits,
            "advice": list(self.advice),
            "survives_nodes": self.job.survives,
            "survival": [{"lost": one.what, **one.goes_on} for one in self.survival],
        }


@dataclass(frozen=True)
class _State:
    """The state of the fullest rank: ``tensor_bytes`` that it stores, second copies included; ``device_bytes`` that it
    holds; ``slot_bytes`` if slots are there already. ``ranks`` and ``here`` (of them on this node) if that is known."""

    source: str
    tensor_bytes: int
    device_bytes: int
    tensors: int = TENSORS
    plain_bytes: int = 0
    slot_bytes: int | None = None
    chunk_bytes: int = CHUNK_BYTES
    ranks: int | None = None
    here: int | None = None


def plan_memory(
    run: str | os.PathLike[str] | None = None,
    *,
    memory: Memory = Memory(),  # noqa: B008  (frozen)
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    state_bytes: int | None = None,
    parameters: int | None = None,
    dtype: str = "float32",
    optimizer: str = "adam",
    replicated: bool = False,
    growth: float = 1.0,
    storage_options: Mapping[str, Any] | None = None,
) -> MemoryPlan:
    """What a job's memory tier will take on each node, whether that fits here, and what it survives.

    The state's size is that of ``run`` (its arenas on this node, else its newest checkpoint), or ``state_bytes`` of
    tensors that each rank stores, or follows from the number of ``parameters``, their ``dtype`` ("float32", ...) and
    the ``optimizer`` ("adam", ...), sharded over all ranks, or ``replicated`` (DDP: each rank stores a share, and holds
    all). ``memory`` is what the job would be given, ``growth`` how many times as large the state may become.

    Raises BadOption, NoCheckpoint (nothing to go by in ``run``), and what reading it raises.
    """
    given = [one for one in (run, state_bytes, parameters) if one is not None]
    if len(given) != 1:
        raise BadOption(
            "the size of the state is said in one way",
            found=f"{len(given)}",
            expected="run, state_bytes or parameters",
        )
    place = locate(run, options=storage_options) if run is not None else None
    if place is not None:
        state = _of_run(place, memory)
    elif state_bytes is not None:
        state = _State("bytes per rank, as given", _positive("state_bytes", state_bytes), state_bytes)
    else:
        world = (nodes or 1) * (ranks_per_node or 1)
        state = _of_parameters(parameters or 0, dtype, optimizer, world, memory.copies, replicated=replicated)
    here = ranks_per_node or state.here or 1
    count = nodes or -(-(state.ranks or here) // here)
    job = _job(state, memory, nodes=count, ranks_per_node=here, growth=growth)

    def arena(slots: int, slot_bytes: int) -> int:
        return arena_bytes(slots, slot_bytes, state.chunk_bytes)

    room = plan(job, arena)
    verdicts = compare(room, _limits(memory.directory, place))
    return MemoryPlan(job, room, verdicts, advice(job, arena, verdicts), survival(job), state.source)


def _job(state: _State, memory: Memory, *, nodes: int, ranks_per_node: int, growth: float) -> Job:
    slot = aligned(memory.bytes) if memory.bytes is not None else state.slot_bytes
    if slot is None:
        slot = estimated_slot_bytes(state.tensor_bytes, state.tensors, state.plain_bytes)
    # The buffers of a load, of a store or another node: of files it takes less.
    from .store.pieces import FROM_OTHERS

    return Job(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        slot_bytes=slot,
        held_bytes=with_records(slot, state.chunk_bytes),
        small_bytes=aligned(
            around_bytes(state.tensors, state.plain_bytes) + with_records(slot, state.chunk_bytes) - slot
        ),
        chunk_bytes=state.chunk_bytes,
        slots=memory.slots,
        held_slots=HELD_SLOTS,
        replicas=memory.replicas,
        parity=memory.parity,
        spares=len(memory.spares),
        device_slots=memory.device_slots,
        device_bytes=estimated_slot_bytes(state.device_bytes, state.tensors, 0),
        growth=growth,
        parity_spare_chunks=IMAGES_PER_RANK,
        parity_state_bytes=STATE_BYTES,
        agent_bytes=AGENT_BYTES,
        load_bytes_node=SHARED_BYTES if ranks_per_node > 1 else 0,
        load_bytes_rank=FROM_OTHERS.nbytes,
    )


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise BadOption(f"{name} must be a whole number above 0", found=repr(value))
    return value


def _of_parameters(
    parameters: int, dtype: str, optimizer: str, world: int, copies: int, *, replicated: bool
) -> _State:
    _positive("parameters", parameters)
    for name, value, known in (("dtype", dtype, DTYPES), ("optimizer", optimizer, OPTIMIZERS)):
        if value not in known:
            raise BadOption(f"{name} is unknown", found=value, expected=", ".join(known))
    whole = parameters * DTYPES[dtype] * (1 + OPTIMIZERS[optimizer])
    share = -(-whole // world)
    source = f"{parameters:,} parameters of {dtype} with {optimizer}"
    if replicated:
        return _State(f"{source}, replicated on {world} ranks", min(whole, share * (1 + copies)), whole)
    return _State(f"{source}, sharded over {world} ranks", share, share)


# -- a run


def _of_run(place: Place, memory: Memory) -> _State:
    """Its slots on this node, if there are any; else its newest checkpoint."""
    found = _of_checkpoint(place)
    arenas = _arenas(place, memory.directory)
    if not arenas:
        if found is None:
            raise NoCheckpoint(
                "the run has no checkpoint yet, and no slots on this node",
                found=place.url,
                hint="Say how large the state is: state_bytes= or parameters=",
            )
        return found
    largest = max(arenas, key=lambda info: info.slot_bytes)
    base = found or _State("", largest.slot_bytes, largest.slot_bytes)
    return _State(
        f"the slots of {len(arenas)} rank(s) on this node",
        base.tensor_bytes,
        base.device_bytes,
        base.tensors,
        base.plain_bytes,
        largest.slot_bytes,
        largest.chunk_bytes,
        largest.world,
        len({info.rank for info in arenas}),
    )


def _arenas(place: Place, base: Path) -> list[Any]:
    """The run's arenas here of the newest incarnation; looking makes no directory."""
    directory = base / f"everstep-{os.geteuid()}" / place.run_key
    own = find_arenas(directory, Kind.OWN)
    newest = max((info.incarnation for info in own), default=0)
    return [info for info in own if info.incarnation == newest]


def _of_checkpoint(place: Place) -> _State | None:
    """The fullest rank of the run's newest checkpoint. None where there is no checkpoint."""
    from .format.manifest import Manifest
    from .plan.lineage import Lineage
    from .store.blocking import run_blocking
    from .store.catalog import list_steps, read_decision, read_layout
    from .store.runs import open_run, read_incarnations

    async def read() -> _State | None:
        backend = place.open()
        try:
            record = await open_run(backend)
            lineage = Lineage(await read_incarnations(backend))
            for step in sorted(await list_steps(backend), key=lambda one: one.key, reverse=True):
                decision = await read_decision(backend, step)
                if not isinstance(decision, Manifest) or not lineage.counts(*step.key):
                    continue
                fullest = max(decision.ranks, key=lambda rank: rank.nbytes)
                layout = await read_layout(backend, fullest.layout_hash)
                copies = sum(image.nbytes for image in layout.copies)
                return _State(
                    f"rank {fullest.rank} of the checkpoint of step {decision.step}",
                    fullest.images_nbytes + copies,
                    sum(entry.nbytes for entry in layout.entries),
                    len(layout.entries),
                    fullest.state_nbytes,
                    None,
                    record.chunk_bytes,
                    decision.world,
                )
            return None
        finally:
            await backend.close()

    return run_blocking(read())


def _limits(base: Path, place: Place | None) -> list[Limit]:
    """What bounds memory on this node. What the run's arenas take already is not taken again."""
    held = 0
    if place is not None:
        directory = base / f"everstep-{os.geteuid()}" / place.run_key
        held = sum(info.nbytes for info in find_arenas(directory))
    found = []
    with contextlib.suppress(FileNotFoundError):
        for number, (where, free, headroom) in enumerate(limits(base)):
            found.append(Limit(where, free, headroom, files=number == 0, held=held))
    return found
