"""``everstep scrub``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from .frame import FAILED, answering, command, human_bytes, json_option
from .options import period, rate

if TYPE_CHECKING:
    from everstep.errors import EverstepError
    from everstep.store.scrub import Scrubbed

DAMAGE = 4

EPILOG = """\
Exit codes:
  0  everything that was due is whole
  1  no run there, or the storage did not answer
  2  usage
  4  damage was found; each call looks again at what was damaged

Example:
  everstep scrub runs/gpt --every 7d --rate 50MiB
  everstep scrub runs/gpt --once --json
"""


@command("scrub", epilog=EPILOG)
@click.argument("run")
@click.option(
    "--every",
    "every_s",
    metavar="DURATION",
    callback=period,
    default="7d",
    show_default=True,
    help="Prove each checkpoint again after this time.",
)
@click.option(
    "--rate", metavar="BYTES", callback=rate, default="50MiB", show_default=True, help="Read no faster."
)
@click.option("--once", is_flag=True, help="End when nothing is due, instead of waiting.")
@json_option
def scrub(run: str, every_s: float, rate: float, once: bool, as_json: bool) -> None:
    """Prove RUN in the background, beside a live run: checkpoints that were never proved first, the newest first, then
    those whose proof is oldest. What was damaged is proved again by each call.

    Reads only, but for the run's event log, which says what was proved when, and with what result; a later scrub goes
    on from there. Damage is told on standard error at once; "everstep fsck --repair" mends it.
    """
    found: list[Scrubbed] = []

    def told(one: Scrubbed) -> None:
        found.append(one)
        if not once:
            del found[:-1]
        for finding in one.damage:
            click.echo(f"damage: {finding.name}: {finding.message}", err=True)

    with answering(as_json, exit_code=_code_of) as answer:
        damaged = _scrub(run, every_s, rate, once, told)
        answer.give(_as_json(run, found), lambda: _as_text(run, found))
        sys.exit(DAMAGE if damaged else 0)


def _code_of(error: EverstepError) -> int:
    from everstep.errors import Damaged

    return DAMAGE if isinstance(error, Damaged) else FAILED


def _scrub(run: str, every_s: float, rate: float, once: bool, told: Any) -> bool:
    from everstep.places import locate
    from everstep.store.blocking import run_blocking
    from everstep.store.scrub import Scrub

    damaged = False

    def hear(one: Scrubbed) -> None:
        nonlocal damaged
        damaged = damaged or bool(one.damage)
        told(one)

    async def go() -> None:
        backend = locate(run).open()
        try:
            await Scrub(backend, every_s, rate, hear).run(once=once)
        finally:
            await backend.close()

    run_blocking(go())
    return damaged


def _as_json(run: str, found: list[Scrubbed]) -> dict[str, Any]:
    return {
        "run": run,
        "proved": [
            {
                "step": one.key[1],
                "incarnation": one.key[0],
                "proved_bytes": one.proved_bytes,
                "seconds": one.seconds,
                "damage": [{"name": f.name, "message": f.message} for f in one.damage],
            }
            for one in found
        ],
    }


def _as_text(run: str, found: list[Scrubbed]) -> str:
    lines = [
        f"step {one.key[1]} of incarnation {one.key[0]}: {human_bytes(one.proved_bytes)}, "
        + (f"{len(one.damage)} damaged" if one.damage else "whole")
        for one in found
    ]
    return "\n".join(lines or [f"{run}: nothing was due"])
