"""``everstep du``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from .frame import DONE, FAILED, answering, command, human_bytes, json_option, table
from .survey import Listed, Survey, read_survey

if TYPE_CHECKING:
    from everstep.errors import EverstepError
    from everstep.store.usage import Usage

EPILOG = """\
Exit codes:
  0  shown
  1  no run there, or one of the places could not be read, or is another run's
  2  usage

Example:
  everstep du runs/gpt
  everstep du runs/gpt s3://bucket/gpt --keep-last 3
"""


@dataclass
class Held:
    """What one place has. ``freed``: by checkpoint that a prune would remove, its bytes."""

    survey: Survey
    usage: Usage
    freed: dict[tuple[int, int], int]
    given_up: int


@command("du", epilog=EPILOG)
@click.argument("places", nargs=-1, required=True, metavar="RUN [TIER]...")
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    help="Say what a prune would free that keeps so many of the newest, and what these stand on.",
)
@json_option
def du(places: tuple[str, ...], keep_last: int | None, as_json: bool) -> None:
    """Say where the bytes of RUN lie, by kind, part and step; of each of its further tiers that is named, too.

    Sizes are those of the objects as they are stored. "given up" are attempts that count for nothing any more: the next
    rotation or prune removes them.
    """
    from everstep.errors import EverstepError

    with answering(as_json) as answer:
        found: dict[str, Held] = {}
        failed: dict[str, EverstepError] = {}
        for place in places:
            try:
                held = _look(place, keep_last)
                _require_same_run(found, place, held)
                found[place] = held
            except EverstepError as problem:
                if len(places) == 1:
                    raise
                failed[place] = problem
        value = {
            "places": [_as_json(held) for held in found.values()],
            "nbytes": sum(held.usage.nbytes for held in found.values()),
            "unreadable": [{"place": place, "error": error.to_wire()} for place, error in failed.items()],
        }
        answer.give(value, lambda: "\n\n\n".join(_as_text(held, keep_last) for held in found.values()))
        for place, error in failed.items():
            click.echo(f"error: {place}: {error}", err=True)
        sys.exit(FAILED if failed else DONE)


def _require_same_run(found: Mapping[str, Held], place: str, held: Held) -> None:
    from everstep.errors import BadOption

    for first, one in found.items():
        if one.survey.run.run_id != held.survey.run.run_id:
            raise BadOption(
                f"{place}: another run is there",
                found=f"run {held.survey.run.run_id}",
                expected=f"run {one.survey.run.run_id}, as at {first}",
                hint="Name places of one run only",
            )


def _look(place: str, keep_last: int | None) -> Held:
    from everstep.places import locate
    from everstep.plan.retention import Retention
    from everstep.store.blocking import run_blocking
    from everstep.store.shelf import Shelf
    from everstep.store.usage import usage

    async def read() -> Held:
        backend = locate(place).open()
        try:
            survey = await read_survey(backend)
            going: tuple[tuple[int, int], ...] = ()
            if keep_last is not None:
                going = (await Shelf().look(backend)).plan(Retention(keep_last)).remove
            return _held(survey, await usage(backend), going)
        finally:
            await backend.close()

    return run_blocking(read())


def _held(survey: Survey, usage: Usage, going: Sequence[tuple[int, int]]) -> Held:
    """``going`` are what a prune would remove."""
    counting = {_key(one): one.manifest.attempt for one in survey.checkpoints}
    given_up = sum(
        usage.steps[key].beside(attempt) for key, attempt in counting.items() if key in usage.steps
    )
    gone = [*survey.removing, *survey.removed]
    given_up += sum(usage.steps[one.key].nbytes for one in gone if one.key in usage.steps)
    freed = {key: usage.steps[key].nbytes for key in going if key in usage.steps}
    return Held(survey, usage, freed, given_up)


def _key(one: Listed) -> tuple[int, int]:
    return one.manifest.incarnation, one.manifest.step


def _as_json(held: Held) -> dict[str, Any]:
    usage = held.usage
    return {
        "place": held.survey.url,
        "nbytes": usage.nbytes,
        "objects": usage.objects,
        "kinds": usage.by_kind(),
        "parts": usage.by_part(),
        "given_up": held.given_up,
        "checkpoints": [
            {
                "step": one.manifest.step,
                "incarnation": one.manifest.incarnation,
                "kind": one.manifest.kind,
                "in_lineage": one.in_lineage,
                "nbytes": usage.steps[_key(one)].nbytes,
                "parts": usage.steps[_key(one)].by_part,
                "prune": _key(one) in held.freed,
            }
            for one in held.survey.checkpoints
            if _key(one) in usage.steps
        ],
        "prune_frees": sum(held.freed.values()),
    }


def _as_text(held: Held, keep_last: int | None) -> str:
    usage = held.usage
    blocks = [f"{held.survey.url}: {human_bytes(usage.nbytes)} in {usage.objects} objects"]
    kinds = [(kind, human_bytes(nbytes)) for kind, nbytes in usage.by_kind().items() if nbytes]
    kinds += [("given up", human_bytes(held.given_up))] if held.given_up else []
    blocks.append(table(("kind", "size"), kinds, right=(1,)))
    parts = sorted(usage.by_part().items(), key=lambda item: -item[1])
    if parts:
        blocks.append(table(("part", "size"), [(part, human_bytes(n)) for part, n in parts], right=(1,)))
    headers = ["step", "incarnation", "kind", "in lineage", "size"]
    headers += ["prune"] if keep_last is not None else []
    rows = []
    for one in held.survey.checkpoints:
        step = usage.steps.get(_key(one))
        if step is None:
            continue
        m = one.manifest
        row: list[object] = [m.step, m.incarnation, m.kind, "yes" if one.in_lineage else "no"]
        row.append(human_bytes(step.nbytes))
        if keep_last is not None:
            row.append("goes" if _key(one) in held.freed else "")
        rows.append(row)
    if rows:
        blocks.append(table(headers, rows, right=(0, 1, 4)))
    if keep_last is not None:
        freed = human_bytes(sum(held.freed.values()))
        blocks.append(f"a prune that keeps the last {keep_last} would free {freed}")
    return "\n\n".join(blocks)
