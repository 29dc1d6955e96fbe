"""``everstep copy``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from .frame import DONE, FAILED, Answer, answering, command, human_bytes, json_option, progress

if TYPE_CHECKING:
    from everstep.places import Place
    from everstep.store.copying import CopyReport, Key

SKIPPED = 3

EPILOG = """\
Exit codes:
  0  all that was asked for is at DST: what was sent is proved, what was there has its sizes
  1  not everything could be copied; call again to go on
  2  usage
  3  as 0, but for checkpoints that were removed at SRC meanwhile, or given up or removed at DST

Example:
  everstep copy runs/gpt /backup/gpt
  everstep copy runs/gpt s3://bucket/gpt --newest 1
  everstep copy runs/gpt /backup/gpt --steps 1000,2000 --json
"""


@command("copy", epilog=EPILOG)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--steps", metavar="N,N,...", help="Copy these steps only.")
@click.option("--newest", type=click.IntRange(min=1), help="Copy so many of the newest checkpoints only.")
@json_option
def copy(source: str, target: str, steps: str | None, newest: int | None, as_json: bool) -> None:
    """Copy the run SRC, or some of its checkpoints, to DST: places of any kind.

    DST becomes the same run, which loads, and may be gone on with. By default all checkpoints of the lineage are
    copied. Every chunk is compared with its hash on the way, and a checkpoint counts at DST once all of it is there.
    Called again, what is there is not sent again. Of that, records, layouts and the sizes of all else are checked, and
    what is missing or cut is sent again; bytes that changed at DST are found by "everstep fsck DST". SRC may be a live
    run.
    """
    if steps is not None and newest is not None:
        raise click.UsageError("--steps and --newest exclude each other")
    chosen = _steps(steps)
    with answering(as_json) as answer:
        from everstep.places import locate

        here, there = locate(source), locate(target)
        _refuse_nested(here.url, there.url)
        report = _copy(here, there, chosen, newest)
        code = FAILED if report.failed else SKIPPED if report.pruned or report.refused else DONE
        _answer(answer, source, target, report)
        for key, error in report.failed:
            click.echo(f"error: {_name(key)}: {error}", err=True)
        sys.exit(code)


def _steps(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise click.UsageError(f"--steps {text!r}: numbers with commas between them are expected")
    return [int(part) for part in parts]


def _refuse_nested(source: str, target: str) -> None:
    """One run must not come to lie in another, nor on itself. The URLs are canonical; what stands behind the question
    mark says which service."""
    from everstep.errors import BadOption

    (here, _, service), (there, _, other) = source.partition("?"), target.partition("?")
    if service != other:
        return
    if here == there:
        relation = "is SRC itself"
    elif there.startswith(f"{here}/"):
        relation = "lies in SRC"
    elif here.startswith(f"{there}/"):
        relation = "contains SRC"
    else:
        return
    raise BadOption(f"DST {relation}", found=target, expected=f"a place beside {source}")


def _copy(source: Place, target: Place, steps: list[int] | None, newest: int | None) -> CopyReport:
    from everstep.store.blocking import run_blocking
    from everstep.store.copying import copy_run

    async def go() -> CopyReport:
        with progress("copy", unit="B", scale=True) as bar:
            shown = 0

            def show(done: int, total: int) -> None:
                nonlocal shown
                bar.total = total
                bar.update(done - shown)
                shown = done

            here = source.open()
            try:
                there = target.open()
                try:
                    return await copy_run(here, there, steps=steps, newest=newest, progress=show)
                finally:
                    await there.close()
            finally:
                await here.close()

    return run_blocking(go())


def _name(key: Key) -> str:
    return f"step {key[1]} of incarnation {key[0]}"


def _answer(answer: Answer, source: str, target: str, report: CopyReport) -> None:
    def place(key: Key) -> dict[str, Any]:
        return {"step": key[1], "incarnation": key[0]}

    value = {
        "source": source,
        "target": target,
        "run_id": report.run_id,
        "copied": [place(key) for key in report.copied],
        "present": [place(key) for key in report.present],
        "resent": [place(key) for key in report.resent],
        "pruned": [place(key) for key in report.pruned],
        "refused": [{**place(key), "reason": reason} for key, reason in report.refused],
        "failed": [{**place(key), "error": error.to_wire()} for key, error in report.failed],
        "sent_bytes": report.sent_bytes,
    }
    answer.give(value, lambda: _as_text(target, report))


def _as_text(target: str, report: CopyReport) -> str:
    lines = [f"copied {_name(key)}" for key in report.copied]
    lines += [f"sent again what was missing or cut of {_name(key)}" for key in report.resent]
    lines += [f"skipped {_name(key)}: it was removed at SRC meanwhile" for key in report.pruned]
    lines += [f"skipped {_name(key)}: at DST {reason}" for key, reason in report.refused]
    were = f", {len(report.present)} were there" if report.present else ""
    failed = f", {len(report.failed)} NOT COPIED" if report.failed else ""
    count = len(report.copied)
    lines.append(
        f"{target}: {count} checkpoint{'' if count == 1 else 's'} copied, {human_bytes(report.sent_bytes)}"
        f"{were}{failed}"
    )
    return "\n".join(lines)
