"""``everstep demo``."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .frame import DONE, FAILED, answering, command, json_option, progress, table

if TYPE_CHECKING:
    from everstep.demo.story import Incident, Story

EPILOG = """\
Exit codes:
  0  every check holds
  1  a check does not hold, or the job failed
  2  usage

Example:
  everstep demo --ranks 2 --keep /tmp/demo
  everstep ls /tmp/demo/disturbed/run
"""


@command("demo", epilog=EPILOG)
@click.option("--ranks", type=int, default=2, show_default=True, help="Processes that train together.")
@click.option("--steps", type=int, default=100, show_default=True, help="Optimizer steps of the whole run.")
@click.option(
    "--keep", type=click.Path(path_type=Path, file_okay=False), help="Keep runs and logs in this directory."
)
@json_option
def demo(ranks: int, steps: int, keep: Path | None, as_json: bool) -> None:
    """Train a small GPT, kill it in three ways, and compare with a run that nothing disturbed.

    A byte-level GPT learns the source text of Python's standard library under torchrun, in DDP over gloo,
    with a snapshot in memory at every step. It is killed (a) in one rank, (b) as a whole node with its
    memory, (c) as a whole node in the middle of a flush. Its losses and final weights must be those of the
    undisturbed run, bit for bit.
    """
    with answering(as_json) as answer:
        from everstep.demo.story import Plan, tell_story

        plan = Plan.make(ranks, steps)
        with _directory(keep) as directory, progress("demo", unit="step", total=2 * steps) as bar:

            def tell(text: str, done: int) -> None:
                if text:
                    bar.set_description_str(text)
                    if not as_json and not sys.stderr.isatty():
                        click.echo(text, err=True)
                if done:
                    bar.update(done)

            story = tell_story(plan, directory, tell)
        answer.give(_as_json(story), lambda: _as_text(story, keep))
        sys.exit(DONE if story.good else FAILED)


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        yield keep
        return
    temporary = tempfile.mkdtemp(prefix="everstep-demo-")
    try:
        yield Path(temporary)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _as_json(story: Story) -> dict[str, Any]:
    return {
        "good": story.good,
        "ranks": story.plan.ranks,
        "steps": story.plan.steps,
        "seconds": story.seconds,
        "incidents": [_incident(incident) for incident in story.incidents],
        "checks": [{"what": c.what, "holds": c.holds, "found": c.found} for c in story.checks],
    }


def _incident(incident: Incident) -> dict[str, Any]:
    return {
        "name": incident.name,
        "tier": incident.tier,
        "completed_step": incident.completed,
        "resumed_step": incident.resumed,
        "steps_lost": incident.lost,
        "recover_seconds": incident.seconds,
        "load_seconds": incident.load_seconds,
        "half_flush": None
        if incident.half is None
        else {"step": incident.half[1], "files": incident.half_files},
    }


def _as_text(story: Story, keep: Path | None) -> str:
    rows = [
        (
            x.name,
            x.completed,
            x.resumed,
            x.tier,
            x.lost,
            f"{x.seconds:.1f} s",
            f"{x.load_seconds * 1000:.0f} ms",
        )
        for x in story.incidents
    ]
    headers = ("incident", "at step", "resumed at", "from", "steps lost", "back after", "of it load")
    lines = [table(headers, rows, right=(1, 2, 4, 5, 6)), ""]
    lines += [f"{'ok ' if check.holds else 'BAD'}  {check.what}: {check.found}" for check in story.checks]
    again = story.comparisons[0].again if story.comparisons else 0
    lines.append("")
    if story.good and again:
        lines.append(f"{again} losses were computed twice, before a kill and after it, and agree.")
    verdict = "everything holds" if story.good else "NOT everything holds"
    lines.append(f"{verdict} ({story.plan.ranks} ranks, {story.plan.steps} steps, {story.seconds:.0f} s)")
    if keep is not None:
        lines.append(f"kept in {keep}; try: everstep ls {keep}/disturbed/run")
    return "\n".join(lines)
