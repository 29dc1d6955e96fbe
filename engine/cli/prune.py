"""``everstep prune``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from .frame import DONE, FAILED, answering, command, human_bytes, json_option, table

if TYPE_CHECKING:
    from everstep.plan.retention import Retention, RetentionPlan
    from everstep.store.rotate import RotationReport
    from everstep.store.shelf import Look

EPILOG = """\
Exit codes:
  0  done, also where there was nothing to remove
  1  the run, or one of its checkpoints, cannot be read; something could not be removed; or
     the run was gone on with from an earlier step meanwhile: prune again
  2  usage

Example:
  everstep prune runs/gpt --keep-last 3 --keep-every 1000 --dry-run
  everstep prune runs/gpt --keep-last 3 --keep-best 2 --best min:loss --json
"""

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Pruned:
    """``report`` is None for a dry run."""

    look: Look
    plan: RetentionPlan
    report: RotationReport | None


@command("prune", epilog=EPILOG)
@click.argument("run")
@click.option("--keep-last", type=int, required=True, metavar="N", help="The N newest checkpoints stay.")
@click.option("--keep-every", type=int, metavar="M", help="So does every one whose step M divides,")
@click.option(
    "--keep-interval", metavar="DURATION", help="one in each 90m, 6h or 2d, by the manifests' times,"
)
@click.option("--keep-best", type=int, metavar="K", help="the K best by a metric,")
@click.option("--best", metavar="min:NAME|max:NAME", help="this one: min:loss, max:accuracy,")
@click.option(
    "--keep-incarnations",
    type=int,
    metavar="K",
    help="and the newest of each of the last K incarnations, given up or not.",
)
@click.option("--dry-run", is_flag=True, help="Change nothing; say what stays and what would go, and why.")
@json_option
def prune(run: str, dry_run: bool, as_json: bool, **keep: Any) -> None:
    """Remove the checkpoints of RUN, a directory or URL, that none of the rules keeps.

    What is pinned stays ("everstep pin"), and so does whatever a delta that stays stands on. What was given up by going
    back to an earlier step goes once the run has passed it. Of names that are not everstep's, nothing is touched.

    RUN may be live, and its own retention goes on: a checkpoint is removed only after a look for whoever came to depend
    on it meanwhile, and whoever does looks again, too. To remove what crashed writers left, see "everstep gc".
    """
    from everstep.errors import BadOption
    from everstep.plan.retention import Retention

    try:
        retention = Retention(**keep)
    except BadOption as error:
        option = "--" + str(error.fields["option"]).replace("_", "-")
        given = "" if error.found == "None" else f"{error.found}; "
        raise click.BadParameter(f"{given}expected {error.expected}", param_hint=option) from None
    with answering(as_json) as answer:
        done = _prune(run, retention, dry_run)
        answer.give(_as_json(run, done), lambda: _as_text(run, done))
        for found, seen in done.look.seen.items():
            if seen.error is not None:
                click.echo(
                    f"error: step {found.step} of incarnation {found.incarnation}: {seen.error}", err=True
                )
        bad = any(seen.error is not None for seen in done.look.seen.values())
        if done.report is not None and done.report.superseded:
            click.echo("error: the run was gone on with otherwise meanwhile: prune again", err=True)
            bad = True
        sys.exit(FAILED if bad else DONE)


def _prune(run: str, retention: Retention, dry_run: bool) -> Pruned:
    from everstep.places import locate
    from everstep.store.blocking import run_blocking

    place = locate(run)

    async def go() -> Pruned:
        from everstep.store.rotate import rotate
        from everstep.store.runs import incarnation_numbers, open_run
        from everstep.store.shelf import Shelf

        from .sight import owed_steps

        backend = place.open()
        try:
            record = await open_run(backend)
            shelf = Shelf()
            look = await shelf.look(backend)
            _require_records(look)
            owed = owed_steps(place, record.run_id)
            plan = look.plan(retention, [key for key in look.facts if key[1] in owed])
            if dry_run:
                return Pruned(look, plan, None)
            planned = [record.number for record in look.records]

            async def is_superseded() -> bool:
                return await incarnation_numbers(backend) != planned

            report = await rotate(backend, plan, is_superseded=is_superseded, shelf=shelf, look=look)
            return Pruned(look, plan, report)
        finally:
            await backend.close()

    return run_blocking(go())


def _require_records(look: Look) -> None:
    """Whose record is missing belongs to nobody that is known: nothing is removed then."""
    from everstep.store.runs import require_records

    require_records(look.records, [found.incarnation for found in look.steps if found.decisions])


def _as_json(run: str, done: Pruned) -> dict[str, Any]:
    nbytes = {found.key: seen.nbytes for found, seen in done.look.seen.items()}
    report = done.report

    def told(keys: Iterable[Key]) -> list[dict[str, Any]]:
        return [{"step": key[1], "incarnation": key[0], "nbytes": nbytes.get(key, 0)} for key in keys]

    kept = [*done.plan.keep, *([] if report is None else report.kept)]
    gone = done.plan.remove if report is None else report.removed
    return {
        "run": run,
        "dry_run": report is None,
        "keep": [{**told([key])[0], "reason": why} for key, why in kept],
        "remove": told(gone),
        "expired_pins": list(done.look.expired if report is None else report.pins),
        "freed_bytes": sum(nbytes.get(key, 0) for key in gone) if report is None else report.freed_bytes,
        "superseded": report is not None and report.superseded,
        "unreadable": [
            {"step": found.step, "incarnation": found.incarnation, "error": seen.error.to_wire()}
            for found, seen in done.look.seen.items()
            if seen.error is not None
        ],
    }


def _as_text(run: str, done: Pruned) -> str:
    said = _as_json(run, done)
    dry = bool(said["dry_run"])
    rows = [
        (one["step"], one["incarnation"], human_bytes(one["nbytes"]), one["reason"]) for one in said["keep"]
    ]
    gone = "would go" if dry else "removed"
    rows += [(one["step"], one["incarnation"], human_bytes(one["nbytes"]), gone) for one in said["remove"]]
    lines = (
        [table(("step", "incarnation", "size", "why it stays"), sorted(rows), right=(0, 1, 2))]
        if rows
        else []
    )
    lines += [f"pin {pin_id} {'has' if dry else 'had'} expired" for pin_id in said["expired_pins"]]
    count, freed = len(said["remove"]), human_bytes(said["freed_bytes"])
    lines.append(
        f"{run}: {count} {gone}, {len(said['keep'])} stay; {freed} {'would be freed' if dry else 'freed'}"
    )
    return "\n".join(lines)
