"""``everstep show``."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .arenas import MemorySnapshot, directory_of_run, memory_option, memory_snapshots, ranks_here
from .frame import answering, command, human_bytes, json_option, strict_json, table
from .survey import Listed, Survey, choose, survey

if TYPE_CHECKING:
    from everstep.backends.api import Backend
    from everstep.format.layout import Layout
    from everstep.format.manifest import Manifest
    from everstep.format.records import IncarnationRecord

DATA_RANKS_MAX = 16
"""Ranks whose position in the data is shown."""

VALUES_DEPTH_MAX = 12
VALUES_ITEMS_MAX = 200
"""Longer containers are cut, and say so."""

EPILOG = """\
Exit codes:
  0  shown
  1  no run there, no such checkpoint, or it cannot be read
  2  usage

Example:
  everstep show runs/gpt
  everstep show runs/gpt 12000 --values --rank 1
"""


@command("show", epilog=EPILOG)
@click.argument("run")
@click.argument("step", type=click.IntRange(min=0), required=False)
@click.option(
    "--values", is_flag=True, help="Show the plain values, too: counters, positions, hyper-parameters."
)
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Whose values.")
@memory_option
@json_option
def show(run: str, step: int | None, values: bool, rank: int, memory: Path, as_json: bool) -> None:
    """Show RUN and its checkpoint of STEP (without it: the newest), with sizes by part and dtype.

    Where several incarnations wrote STEP, the one that a load takes is shown.
    """
    with answering(as_json) as answer:
        found = survey(run)
        chosen = choose(found, step)
        detail = None if chosen is None else _detail(run, found, chosen.manifest, rank if values else None)
        if chosen is not None and detail is not None:
            key = chosen.manifest.incarnation, chosen.manifest.step
            here = memory_snapshots(directory_of_run(memory, run))
            detail.memory = [x for x in here if (x.incarnation, x.step) == key]
        answer.give(_as_json(found, chosen, detail), lambda: _as_text(found, chosen, detail))


@dataclass
class Detail:
    """What the layouts and the state image of one checkpoint say."""

    by_part: dict[str, int] = field(default_factory=dict)
    by_dtype: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """(part, dtype) -> (tensors, bytes), over all ranks; what has one owner counts once."""
    data: dict[int, Any] = field(default_factory=dict)
    """Position in the data by rank, of the first ranks."""
    values: dict[str, Any] | None = None
    memory: list[MemorySnapshot] = field(default_factory=list)
    """What this node's memory has of it."""


def _detail(run: str, found: Survey, manifest: Manifest, rank: int | None) -> Detail:
    from everstep.places import locate
    from everstep.store.blocking import run_blocking

    async def read() -> Detail:
        backend = locate(run).open()
        try:
            return await _read_detail(backend, found.run.chunk_bytes, manifest, rank)
        finally:
            await backend.close()

    return run_blocking(read())


async def _read_detail(backend: Backend, chunk_bytes: int, manifest: Manifest, rank: int | None) -> Detail:
    from everstep.errors import NoCheckpoint
    from everstep.store.asking import each
    from everstep.store.catalog import read_layout
    from everstep.store.sources import DurableSource

    detail = Detail()
    # One layout after the other: those of a large job together would fill the memory.
    for layout_hash, ranks in Counter(record.layout_hash for record in manifest.ranks).items():
        _add_sizes(detail, await read_layout(backend, layout_hash), ranks)
    detail.by_part["plain values"] = sum(record.state_nbytes for record in manifest.ranks)
    source = DurableSource(backend, manifest, chunk_bytes)
    some = [record.rank for record in manifest.ranks[:DATA_RANKS_MAX]]
    detail.data = {
        one: meta["data"]
        for one, meta in zip(some, await each(some, source.meta), strict=True)
        if meta.get("data")
    }
    if rank is not None:
        if rank not in {record.rank for record in manifest.ranks}:
            raise NoCheckpoint(
                f"step {manifest.step} has no rank {rank}",
                found=f"{manifest.world} ranks",
                step=manifest.step,
            )
        detail.values = _plain_values(await source.state(rank), await source.layout(rank))
    return detail


def _add_sizes(detail: Detail, layout: Layout, ranks: int) -> None:
    """Count what ``ranks`` ranks store that have this layout."""
    for spec in layout.images:
        detail.by_part[spec.part] = detail.by_part.get(spec.part, 0) + ranks * spec.nbytes
    for entry in layout.entries:
        if entry.image is not None:
            tensors, nbytes = detail.by_dtype.get((entry.part, entry.dtype), (0, 0))
            detail.by_dtype[entry.part, entry.dtype] = tensors + ranks, nbytes + ranks * entry.nbytes


def _plain_values(state: bytes, layout: Layout) -> dict[str, Any]:
    from everstep.errors import Damaged
    from everstep.state.codec import decode_state

    def stand_in(index: int) -> str:
        if not 0 <= index < len(layout.entries):
            raise Damaged("the state names a tensor that the layout does not have", found=index)
        entry = layout.entries[index]
        return f"<{entry.dtype} {list(entry.shape)}>"

    values = decode_state(state, stand_in, light=True)
    return {part: readable(value) for part, value in values.items()}


def readable(value: Any, depth: int = 0) -> Any:
    """A decoded value as plain JSON-like values, cut where it is long or deep."""
    if depth > VALUES_DEPTH_MAX:
        return "..."
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        cut = {str(key): readable(item, depth + 1) for key, item in list(value.items())[:VALUES_ITEMS_MAX]}
        if len(value) > VALUES_ITEMS_MAX:
            cut["..."] = f"{len(value) - VALUES_ITEMS_MAX} more"
        return cut
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [readable(item, depth + 1) for item in list(value)[:VALUES_ITEMS_MAX]]
        return (
            [*items, f"... {len(value) - VALUES_ITEMS_MAX} more"] if len(value) > VALUES_ITEMS_MAX else items
        )
    type_name = getattr(value, "type_name", None)
    if type_name is not None:
        return {"<type>": type_name, "value": readable(value.value, depth + 1)}
    return f"<{len(value)} bytes>" if isinstance(value, (bytes, bytearray)) else str(value)


def _as_json(found: Survey, chosen: Listed | None, detail: Detail | None) -> dict[str, Any]:
    value: dict[str, Any] = {
        "run": found.url,
        "record": dataclasses.asdict(found.run),
        "incarnations": [dataclasses.asdict(record) for record in found.incarnations],
        "checkpoint": None,
    }
    if chosen is not None and detail is not None:
        value["checkpoint"] = {
            "in_lineage": chosen.in_lineage,
            "nbytes": chosen.nbytes,
            "manifest": dataclasses.asdict(chosen.manifest),
            "parts": detail.by_part,
            "memory": [dataclasses.asdict(snapshot) for snapshot in detail.memory],
            "data": {str(rank): position for rank, position in detail.data.items()},
            "dtypes": [
                {"part": part, "dtype": dtype, "tensors": tensors, "nbytes": nbytes}
                for (part, dtype), (tensors, nbytes) in detail.by_dtype.items()
            ],
        }
        if detail.values is not None:
            value["checkpoint"]["values"] = detail.values
    return value


def _as_text(found: Survey, chosen: Listed | None, detail: Detail | None) -> str:
    run = found.run
    chunk = human_bytes(run.chunk_bytes)
    blocks = [
        f"run {run.run_id}, format {run.format}, {run.hash_id}, chunks of {chunk}, created {run.created}"
    ]
    headers = ("incarnation", "from", "world", "config", "process", "created")
    rows = [_incarnation(record) for record in found.incarnations]
    if rows:
        blocks.append(table(headers, rows, right=(0, 2)))
    if chosen is None or detail is None:
        blocks.append("no checkpoint yet")
        return "\n\n".join(blocks)
    blocks.append(_manifest_text(chosen, detail))
    sizes = [
        (part, dtype, tensors, human_bytes(nbytes))
        for (part, dtype), (tensors, nbytes) in detail.by_dtype.items()
    ]
    blocks.append(table(("part", "dtype", "tensors", "size"), sizes, right=(2, 3)))
    if detail.values is not None:
        blocks.append(json.dumps(strict_json(detail.values), indent=2, ensure_ascii=False))
    return "\n\n".join(blocks)


def _incarnation(record: IncarnationRecord) -> tuple[object, ...]:
    if record.adopted_step is None:
        origin = f"fresh: {record.fresh}"
    else:
        origin = f"step {record.adopted_step} of {record.adopted_incarnation}"
    if record.reason is not None:
        origin += f" (rolled back: {record.reason})"
    config = (record.config_hash or "none")[:8]
    if record.config_changes:
        config += f" ({len(record.config_changes)} changed: {record.config_reason})"
    return (
        record.number,
        origin,
        record.world,
        config,
        f"{record.writer.pid} on {record.writer.host}",
        record.created,
    )


def _manifest_text(chosen: Listed, detail: Detail) -> str:
    from everstep.plan.agreement import equality_text

    m = chosen.manifest
    facts: dict[str, object] = {
        "step": f"{m.step} of incarnation {m.incarnation}, attempt {m.attempt} ({m.kind})",
        "created": m.created,
        "in lineage": "yes" if chosen.in_lineage else "no: a later resume went back before it",
        "size": human_bytes(chosen.nbytes),
        "world": f"{m.world}" + "".join(f", {dim}={size}" for dim, size in m.mesh.items()),
        "parts": ", ".join(f"{part} ({about.get('class', '?')})" for part, about in m.parts.items()),
        "in memory": _memory_text(detail),
        "data": _data_text(detail, m.world),
        "rng": ", ".join(m.rng) or "none",
        "metrics": ", ".join(f"{key}={value}" for key, value in m.metrics.items()) or "none",
        "libraries": ", ".join(f"{name} {version}" for name, version in m.libraries.items()) or "none",
    }
    if "equal" in m.facts:
        facts["equal"] = equality_text(m.facts["equal"])
    if "audit" in m.facts:
        facts["audited"] = f"{m.facts['audit']['entries']} replicated tensors compared"
    if "disagreements" in m.facts:
        facts["differ"] = m.facts["disagreements"]["text"]
    width = max(map(len, facts))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in facts.items())


def _memory_text(detail: Detail) -> str:
    told = ranks_here(detail.memory)
    return f"on this node, of rank(s) {told}" if told else "not on this node"


def _data_text(detail: Detail, world: int) -> str:
    if not detail.data:
        return "none"
    more = f"; of {world} ranks" if world > DATA_RANKS_MAX else ""
    return "; ".join(f"rank {rank}: {position}" for rank, position in detail.data.items()) + more
