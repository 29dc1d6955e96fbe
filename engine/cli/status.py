"""``everstep status``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .arenas import memory_option
from .frame import FAILED, answering, command, json_option, table

if TYPE_CHECKING:
    from everstep.errors import EverstepError

    from .sight import Sight

EXIT_CODES = {
    "healthy": 0,
    "nothing is running": 3,
    "a rank is suspect": 5,
    "cannot tell": 8,
    "just begun": 8,
}
CANNOT_TELL = 8

EPILOG = """\
Exit codes:
  0  every rank gives signs of life
  1  no run there
  2  usage
  3  nothing is running: no rank gives a sign of life
  5  a rank is suspect: beats are missed and a second sign agrees, while others live
  8  cannot tell: the storage did not answer, or ranks are out of sight; or just begun: other nodes have not
     said anything yet, look again

A rank that is late (one sign is missing) is shown, and is no failure.

Example:
  everstep status runs/gpt
  everstep status runs/gpt --json | jq '.tiers.durable'
"""


@command("status", epilog=EPILOG)
@click.argument("run")
@memory_option
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    help="Watch other nodes' beacons for at most this many seconds (default: until each moves, or its timeout).",
)
@json_option
def status(run: str, memory: Path, wait_s: float | None, as_json: bool) -> None:
    """Show who is alive in RUN, a directory or URL, and the newest step in each tier.

    Ranks on this node are seen in its memory; those of other nodes in the beacons that their agents leave in the
    run, which takes two looks. Reads only. "Last step" is the newest one that the trainer finished, and how long
    ago: a trainer that hangs still beats, while its last step grows old. Spare nodes are listed where an agent of the
    job runs on this node: as that one sees them. Ages with ">" are those of a node that says nothing more, and grow
    only while it is watched.
    """
    with answering(as_json, exit_code=_code_of) as answer:
        from .sight import look

        sight = look(run, memory, wait_s)
        value = _as_json(sight)
        answer.give(value, lambda: _as_text(sight, value))
        sys.exit(EXIT_CODES[value["health"]])


def _code_of(error: EverstepError) -> int:
    from everstep.errors import NotARun, UsageError

    return FAILED if isinstance(error, (NotARun, UsageError)) else CANNOT_TELL


def _as_json(sight: Sight) -> dict[str, Any]:
    return {
        "run": sight.url,
        "run_id": None if sight.survey is None else sight.survey.run.run_id,
        "health": sight.health().value,
        "incarnation": sight.incarnation,
        "world": sight.world,
        "ranks": [
            {
                "rank": rank,
                "node": seen.node,
                "pid": seen.found.pid,
                "state": seen.state.value,
                "why": seen.why,
                "step": seen.found.step,
                "step_age_s": _older(seen.found.step_age_s, seen.passed_s),
                "ages_at_least": seen.passed_s is not None,
                "step_s": seen.found.step_s,
                "beat_age_s": seen.signs.beat_age_s,
                "in_memory": seen.found.snapshot,
                "protected": seen.found.protected,
                "source": seen.source,
            }
            for rank, seen in sorted(sight.ranks.items())
        ],
        "out_of_sight": [rank for rank in range(sight.world or 0) if rank not in sight.ranks],
        "nodes": [
            {
                "node": node.node,
                "source": node.source,
                "agent": node.agent,
                "beacon_moves": node.moves,
                "beacon_error": node.error,
                "queue": node.beacon.queue,
            }
            for node in sight.nodes
        ],
        "spares": sight.spares,
        "tiers": _tiers(sight),
        "farther": sight.farther,
        "flushes": [{name: one[name] for name in ("step", "kind", "base")} for one in sight.flushes],
        "merging": sight.merging,
        "queue": sum(node.beacon.queue for node in sight.nodes),
        "problems": sight.problems,
    }


def _tiers(sight: Sight) -> dict[str, dict[str, Any]]:
    """Newest step by tier. What all ranks must have counts only if all are in sight."""
    ranks = [seen.found for seen in sight.ranks.values()]
    whole = sight.world is not None and len(ranks) == sight.world
    complete = [node.beacon.complete for node in sight.nodes if node.beacon.complete is not None]
    memory = _least([rank.snapshot for rank in ranks]) if whole else None
    return {
        "memory": {"step": memory},
        "protected": {"step": _least([rank.protected for rank in ranks]) if whole else None},
        "complete": {"step": max(complete, default=memory)},
        "durable": _durable(sight),
    }


def _on_its_way(tier: dict[str, Any]) -> str:
    """What is owed to a further tier, and what is in the way."""
    owed = ", ".join(map(str, tier["owed"]))
    told = [f"owed: {owed}"] if owed else []
    return "; ".join([*told, *([tier["error"]] if tier["error"] else [])])


def _least(steps: list[int | None]) -> int | None:
    known = [step for step in steps if step is not None]
    return min(known) if known and len(known) == len(steps) else None


def _durable(sight: Sight) -> dict[str, Any]:
    """The checkpoint that a load takes, and its age: as an agent saw it, else by the clocks of its writer and this
    node."""
    from .sight import since

    newest = sight.survey.newest() if sight.survey is not None else None
    if newest is None:
        return {"step": None, "kind": None, "base": None, "age_s": None, "age_by": None}
    step, base = newest.manifest.step, newest.manifest.parent_key
    known = {"step": step, "kind": newest.manifest.kind, "base": None if base is None else base[1]}
    ages = [
        node.beacon.durable_age_s
        for node in sight.nodes
        if node.beacon.durable == step and node.beacon.durable_age_s is not None
    ]
    if ages:
        return {**known, "age_s": min(ages), "age_by": "agent"}
    return {**known, "age_s": since(newest.manifest.created), "age_by": "clock"}


def _as_text(sight: Sight, value: dict[str, Any]) -> str:
    blocks = [f"{value['health']}: incarnation {value['incarnation']}, {value['world'] or 'no'} rank(s)"]
    if value["ranks"]:
        headers = ["rank", "node", "pid", "state", "last step", "ago", "beat", "in memory", "protected"]
        rows = [
            [
                rank["rank"],
                rank["node"],
                rank["pid"],
                rank["state"],
                _or_dash(rank["step"]),
                _ago(rank["step_age_s"], at_least=rank["ages_at_least"]),
                _ago(rank["beat_age_s"], at_least=rank["ages_at_least"]),
                _or_dash(rank["in_memory"]),
                _or_dash(rank["protected"]),
            ]
            for rank in value["ranks"]
        ]
        blocks.append(table(headers, rows, right=(0, 2, 4, 5, 6, 7, 8)))
    tiers = value["tiers"]
    lines = [
        ("memory, all ranks", tiers["memory"], ""),
        ("protected, all ranks", tiers["protected"], ""),
        ("complete (W)", tiers["complete"], ""),
        ("durable", tiers["durable"], f"{_kind(tiers['durable'])}, {_ago(tiers['durable']['age_s'])} ago"),
    ]
    rows = [
        [name, _or_dash(tier["step"]), note if tier["step"] is not None else ""] for name, tier, note in lines
    ]
    rows += [
        [f"durable, {one['name']}", _or_dash(one["newest"]), _on_its_way(one)] for one in value["farther"]
    ]
    blocks.append(table(["tier", "newest step", ""], rows, right=(1,)))
    notes = [f"flushes unfinished: {value['queue']}"]
    notes += [f"flushing step {one['step']}: {_kind(one)}" for one in value["flushes"]]
    notes += [f"step {step}: a delta that is being made a full" for step in value["merging"]]
    notes += [f"rank {rank['rank']}: {rank['why']}" for rank in value["ranks"] if rank["why"]]
    if value["out_of_sight"]:
        notes.append(f"out of sight: rank(s) {value['out_of_sight']}")
    for node in sight.nodes:
        if node.error is not None:
            notes.append(f"node {node.node}: its beacon cannot be written: {node.error}")
        if node.source == "memory" and node.agent is None:
            notes.append(f"node {node.node}: no agent answers")
    notes += [_of_spare(spare) for spare in value["spares"]]
    return "\n\n".join([*blocks, "\n".join([*notes, *value["problems"]])])


def _kind(one: dict[str, Any]) -> str:
    """Of a checkpoint: whether it needs another one."""
    return "full" if one["base"] is None else f"delta on step {one['base']}"


def _of_spare(spare: dict[str, Any]) -> str:
    if spare["reached"] is None:
        return f"spare node {spare['spare']}: keeps nothing of this node"
    if not spare["reached"]:
        return f"spare node {spare['spare']}: not reached: {spare['error']}"
    kept = "nothing yet" if spare["step"] is None else f"step {spare['step']}"
    return f"spare node {spare['spare']}: reached, keeps {kept} of this node"


def _or_dash(value: object) -> object:
    return "-" if value is None else value


def _older(age_s: float | None, passed_s: float | None) -> float | None:
    return age_s if age_s is None or passed_s is None else age_s + passed_s


def _ago(seconds: float | None, *, at_least: bool = False) -> str:
    """An age for people; ``at_least``: nobody has said anything since."""
    if seconds is None:
        return "-"
    if at_least:
        return f"> {_ago(seconds)}"
    if seconds < 100:
        return f"{seconds:.1f} s"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
