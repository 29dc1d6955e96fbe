"""``everstep gc``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .arenas import memory_option
from .frame import answering, command, human_bytes, json_option

if TYPE_CHECKING:
    from everstep.store.leftovers import Collected

EPILOG = """\
Exit codes:
  0  done, also where there was nothing to remove
  1  the run cannot be read, or something could not be removed
  2  usage

Example:
  everstep gc runs/gpt --dry-run
  everstep gc runs/gpt --older-than 1d --json
"""

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(ctx: click.Context, param: click.Parameter, text: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no duration such as 90s, 30m, 1h or 2d")
    return float(found[1]) * UNITS_S[found[2]]


@command("gc", epilog=EPILOG)
@click.argument("run")
@click.option(
    "--older-than",
    "older_than_s",
    metavar="DURATION",
    callback=duration,
    default="1h",
    show_default=True,
    help="Leave alone what was written to later than this.",
)
@click.option("--dry-run", is_flag=True, help="Change nothing; say what would be removed.")
@memory_option
@json_option
def gc(run: str, older_than_s: float, dry_run: bool, memory: Path, as_json: bool) -> None:
    """Remove what crashed writers left in RUN: unfinished files and uploads, flushes and copies that were given up or
    that nobody finishes.

    An unfinished attempt is given up first, by a record that its writer finds should it live after all. Of a run that
    gives signs of life no open attempt is touched. Committed checkpoints, layouts, and names that are not everstep's
    stay.
    """
    with answering(as_json) as answer:
        report = _collect(run, older_than_s, dry_run, memory)
        answer.give(_as_json(run, dry_run, report), lambda: _as_text(run, dry_run, report))


def _collect(run: str, older_than_s: float, dry_run: bool, memory: Path) -> Collected:
    from everstep.places import locate
    from everstep.plan.liveness import Health
    from everstep.store.blocking import run_blocking
    from everstep.store.leftovers import collect_leftovers

    from .sight import look

    sight = look(run, memory, None)
    # An agent may still be writing when its trainers are gone.
    agents = [node for node in sight.nodes if node.moves or (node.source == "memory" and node.agent)]
    living = [sight.incarnation] if agents or sight.health() is not Health.NOTHING else []

    async def go() -> Collected:
        backend = locate(run).open()
        try:
            return await collect_leftovers(backend, living=living, older_than_s=older_than_s, dry_run=dry_run)
        finally:
            await backend.close()

    return run_blocking(go())


def _as_json(run: str, dry_run: bool, report: Collected) -> dict[str, Any]:
    return {
        "run": run,
        "dry_run": dry_run,
        "attempts": [
            {"step": key[1], "incarnation": key[0], "attempt": attempt} for key, attempt in report.attempts
        ],
        "removals_finished": [{"step": key[1], "incarnation": key[0]} for key in report.removed],
        "temporaries": [{"name": item.name, "nbytes": item.nbytes} for item in report.temporaries],
        "kept": [{"name": name, "reason": reason} for name, reason in report.kept],
        "freed_bytes": report.freed_bytes,
    }


def _as_text(run: str, dry_run: bool, report: Collected) -> str:
    did = "would remove" if dry_run else "removed"
    lines = [
        f"{did} attempt {attempt} of step {key[1]} of incarnation {key[0]}"
        for key, attempt in report.attempts
    ]
    lines += [f"{did} the rest of step {key[1]} of incarnation {key[0]}" for key in report.removed]
    lines += [f"{did} {item.name} ({human_bytes(item.nbytes)})" for item in report.temporaries]
    lines += [f"kept {name}: {reason}" for name, reason in report.kept]
    lines.append(f"{run}: {human_bytes(report.freed_bytes)} {'would be freed' if dry_run else 'freed'}")
    return "\n".join(lines)
