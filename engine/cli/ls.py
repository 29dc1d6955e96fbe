"""``everstep ls``."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .arenas import MemorySnapshot, directory_of_run, memory_option, memory_snapshots, ranks_here
from .frame import DONE, FAILED, answering, command, human_bytes, json_option, table
from .survey import Listed, Survey, survey

if TYPE_CHECKING:
    from everstep.format.manifest import Manifest

EPILOG = """\
Exit codes:
  0  listed
  1  no run there, or not everything could be read
  2  usage

Example:
  everstep ls runs/gpt
  everstep ls runs/gpt --json | jq '.checkpoints[-1].step'
"""


@command("ls", epilog=EPILOG)
@click.argument("run")
@click.option("--metrics", is_flag=True, help="Show the checkpoints' metrics, too.")
@memory_option
@json_option
def ls(run: str, metrics: bool, memory: Path, as_json: bool) -> None:
    """List the checkpoints of RUN, a directory or URL, on disk and in this node's memory.

    A checkpoint is "in lineage" if a load may take it: a step that a later resume or rollback went back before is cut
    off, and stays listed until it is pruned.
    What was begun and never committed is no checkpoint; it is counted below the table. "held" are snapshots that
    this node keeps for ranks of other nodes.
    """
    with answering(as_json) as answer:
        found = survey(run)
        snapshots = memory_snapshots(directory_of_run(memory, run))
        answer.give(_as_json(found, snapshots), lambda: _as_text(found, snapshots, metrics))
        for name, error in found.unreadable:
            click.echo(f"error: {name}: {error}", err=True)
        sys.exit(FAILED if found.unreadable else DONE)


def _as_json(found: Survey, snapshots: list[MemorySnapshot]) -> dict[str, Any]:
    newest = found.newest()
    return {
        "run": found.url,
        "run_id": found.run.run_id,
        "newest": None if newest is None else newest.manifest.step,
        "checkpoints": [
            {**describe(one.manifest), "in_lineage": one.in_lineage} for one in found.checkpoints
        ],
        "memory": [
            {**dataclasses.asdict(one), "in_lineage": found.counts(one.incarnation, one.step)}
            for one in snapshots
        ],
        "rollbacks": [
            {
                "incarnation": record.number,
                "from_incarnation": record.adopted_incarnation,
                "step": record.adopted_step,
                "reason": record.reason,
            }
            for record in found.incarnations
            if record.reason is not None
        ],
        "undecided": [{"step": x.step, "incarnation": x.incarnation} for x in found.undecided],
        "aside": [{"step": x.step, "incarnation": x.incarnation} for x in found.aside],
        "removing": [{"step": x.step, "incarnation": x.incarnation} for x in found.removing],
        "unreadable": [{"name": name, "error": error.to_wire()} for name, error in found.unreadable],
    }


def describe(manifest: Manifest) -> dict[str, Any]:
    """A manifest in a line's worth of fields."""
    from .survey import stored_bytes

    return {
        "step": manifest.step,
        "incarnation": manifest.incarnation,
        "attempt": manifest.attempt,
        "kind": manifest.kind,
        "world": manifest.world,
        "nbytes": stored_bytes(manifest),
        "created": manifest.created,
        "metrics": manifest.metrics,
    }


def _as_text(found: Survey, snapshots: list[MemorySnapshot], metrics: bool) -> str:
    blocks = []
    if found.checkpoints:
        headers = ["step", "incarnation", "world", "kind", "size", "created", "in lineage"]
        headers += ["metrics"] if metrics else []
        blocks.append(table(headers, [_row(one, metrics) for one in found.checkpoints], right=(0, 1, 2, 4)))
    else:
        blocks.append("no checkpoint on disk yet")
    if snapshots:
        blocks.append("in this node's memory:\n" + _memory_table(found, snapshots))
    if found.cuts():
        blocks.append("\n".join(found.cuts()))
    notes = [
        _count(
            len(found.undecided),
            "flush was begun and is not committed",
            "flushes were begun and are not committed",
        )
    ]
    notes += [
        _count(len(found.aside), "checkpoint is set aside as damaged", "checkpoints are set aside as damaged")
    ]
    notes += [
        _count(
            len(found.removing),
            "checkpoint is not wholly removed yet; if that broke off, everstep gc finishes it",
            "checkpoints are not wholly removed yet; what broke off, everstep gc finishes",
        )
    ]
    notes += [f"{len(found.unreadable)} cannot be read, see below" if found.unreadable else ""]
    if any(notes):
        blocks.append("\n".join(note for note in notes if note))
    return "\n\n".join(blocks)


def _row(one: Listed, metrics: bool) -> list[object]:
    m = one.manifest
    row: list[object] = [m.step, m.incarnation, m.world, m.kind, human_bytes(one.nbytes), m.created]
    row.append("yes" if one.in_lineage else "no")
    if metrics:
        row.append(", ".join(f"{key}={_short(value)}" for key, value in m.metrics.items()))
    return row


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _memory_table(found: Survey, snapshots: list[MemorySnapshot]) -> str:
    groups: dict[tuple[int, int, int], list[MemorySnapshot]] = {}
    for snapshot in snapshots:
        groups.setdefault((snapshot.incarnation, snapshot.step, snapshot.world), []).append(snapshot)
    rows = [
        (
            step,
            incarnation,
            world,
            ranks_here(some),
            "yes" if any(x.in_use for x in some) else "no",
            "yes" if found.counts(incarnation, step) else "no",
        )
        for (incarnation, step, world), some in groups.items()
    ]
    return table(
        ("step", "incarnation", "world", "ranks here", "in use", "in lineage"), rows, right=(0, 1, 2)
    )


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}" if number else ""
