"""``everstep pin`` and ``everstep unpin``."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .frame import answering, command, json_option, table
from .options import period

if TYPE_CHECKING:
    from everstep.backends.api import Backend
    from everstep.store.pins import Held

PIN_EPILOG = """\
Exit codes:
  0  pinned, or the pins were listed
  1  no such checkpoint, or the run cannot be read or written
  2  usage

Example:
  everstep pin runs/gpt 12000 --reason "figure 2"
  everstep pin runs/gpt 12000 --for 2h
  everstep pin runs/gpt --json
"""

UNPIN_EPILOG = """\
Exit codes:
  0  the pins are gone
  1  there was no such pin, or the run cannot be read or written
  2  usage

Example:
  everstep unpin runs/gpt 12000
  everstep unpin runs/gpt --id 000012000-0001-5f0c9a1e
"""

R = TypeVar("R")

incarnation_option = click.option(
    "--incarnation",
    type=click.IntRange(1),
    metavar="N",
    help="Of this incarnation, not of the run's lineage.",
)


def _lasting(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    from everstep.store.pins import PIN_FOR_S_MAX

    found = period(ctx, param, text)
    if found is not None and found > PIN_FOR_S_MAX:
        raise click.BadParameter(f"{text!r} is too long: pin without a time, and unpin")
    return found


@command("pin", epilog=PIN_EPILOG)
@click.argument("run")
@click.argument("step", type=click.IntRange(0), required=False)
@click.option(
    "--for",
    "for_s",
    metavar="DURATION",
    callback=_lasting,
    help="Hold it for 90s, 30m, 2h or 7d; without this until it is unpinned.",
)
@click.option("--reason", default="", help="Why, for people.")
@incarnation_option
@json_option
def pin(
    run: str, step: int | None, for_s: float | None, reason: str, incarnation: int | None, as_json: bool
) -> None:
    """Keep the checkpoint at STEP of RUN from being removed, by retention or "everstep prune", and what it stands on
    with it. Without STEP: list the pins.

    RUN may be live. Each further tier is a run of its own, with its own pins.
    """
    with answering(as_json) as answer:
        if step is None:
            held = _with(run, lambda backend: _list(backend))
            answer.give({"run": run, "pins": [describe(one) for one in held]}, lambda: _as_text(held))
            return
        made = _with(run, lambda backend: _add(backend, step, incarnation, for_s, reason))
        until = (
            "until it is unpinned"
            if made.pin is None or made.pin.expires is None
            else f"until {made.pin.expires}"
        )
        answer.give(
            {"run": run, "pin": describe(made)},
            lambda: f"step {made.key[1]} of incarnation {made.key[0]} stays {until}: pin {made.id}",
        )


@command("unpin", epilog=UNPIN_EPILOG)
@click.argument("run")
@click.argument("step", type=click.IntRange(0), required=False)
@click.option("--id", "pin_id", metavar="ID", help="Remove this pin alone.")
@json_option
def unpin(run: str, step: int | None, pin_id: str | None, as_json: bool) -> None:
    """Remove all pins of the checkpoints at STEP of RUN, or the one pin that --id names."""
    if (step is None) == (pin_id is None):
        raise click.UsageError("say STEP or --id, one of the two")
    with answering(as_json) as answer:
        gone = _with(run, lambda backend: _remove(backend, step, pin_id))
        answer.give(
            {"run": run, "removed": [describe(one) for one in gone]},
            lambda: "\n".join(f"pin {one.id} is removed" for one in gone),
        )


def _with(run: str, work: Callable[[Backend], Awaitable[R]]) -> R:
    from everstep.places import locate
    from everstep.store.blocking import run_blocking
    from everstep.store.runs import open_run

    async def go() -> R:
        backend = locate(run).open()
        try:
            await open_run(backend)
            return await work(backend)
        finally:
            await backend.close()

    return run_blocking(go())


async def _list(backend: Backend) -> list[Held]:
    from everstep.store.pins import list_pins

    return await list_pins(backend)


async def _add(
    backend: Backend, step: int, incarnation: int | None, for_s: float | None, reason: str
) -> Held:
    from everstep.store.pins import Held, add_pin, find_step

    key = await find_step(backend, step, incarnation)
    made = await add_pin(backend, key, for_s=for_s, reason=reason, who=_who())
    return Held(made.id, made.key, made)


async def _remove(backend: Backend, step: int | None, pin_id: str | None) -> list[Held]:
    from everstep.errors import NoCheckpoint
    from everstep.store.pins import list_pins, remove_pins

    held = await list_pins(backend)
    gone = [one for one in held if (one.key[1] == step if pin_id is None else one.id == pin_id)]
    if not gone:
        raise NoCheckpoint(
            f"no such pin: {f'of step {step}' if pin_id is None else pin_id}",
            found=[one.id for one in held] or "no pin at all",
            hint="See everstep pin RUN",
        )
    await remove_pins(backend, [one.id for one in gone])
    return gone


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a user id without a name
        return f"@{socket.gethostname()}"


def describe(held: Held) -> dict[str, Any]:
    import time

    found = {"id": held.id, "step": held.key[1], "incarnation": held.key[0]}
    if held.pin is None:
        return {**found, "error": None if held.error is None else held.error.to_wire()}
    pin = held.pin
    rest = {"reason": pin.reason, "who": pin.who, "created": pin.created, "expires": pin.expires}
    return {**found, **rest, "expired": held.expired(time.time())}


def _as_text(held: list[Held]) -> str:
    if not held:
        return "no pins"
    rows = []
    for one in held:
        said = describe(one)
        until = said.get("expires") or ("cannot be read" if one.pin is None else "unpinned")
        rows.append((one.key[1], one.key[0], one.id, until, said.get("who", ""), said.get("reason", "")))
    return table(("step", "incarnation", "pin", "until", "who", "reason"), rows, right=(0, 1))
