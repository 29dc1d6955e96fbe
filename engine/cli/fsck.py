"""``everstep fsck``. Exit codes as fsck(8)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from .frame import Answer, answering, command, json_option, progress

if TYPE_CHECKING:
    from everstep.errors import EverstepError
    from everstep.store.findings import Finding

CANNOT_TELL = 8
WRONG_CALL = 16

EPILOG = """\
Exit codes, added up where several apply:
  0   clean
  4   damage left
  8   cannot tell: the storage did not answer, or a newer format
  16  usage; also where RUN is no run, or has no such step

Example:
  everstep fsck runs/gpt
  everstep fsck runs/gpt --step 12000 --json
"""


class FsckCommand(click.Command):
    """A command whose usage errors exit with fsck(8)'s code, not with click's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.show()
            raise click.exceptions.Exit(WRONG_CALL) from error


@command("fsck", epilog=EPILOG, cls=FsckCommand)
@click.argument("run")
@click.option("--step", type=click.IntRange(min=0), help="Check the checkpoints of this step only.")
@click.option("--quick", is_flag=True, help="Do not read the images: check their sizes and everything else.")
@json_option
def fsck(run: str, step: int | None, quick: bool, as_json: bool) -> None:
    """Prove RUN, a directory or URL: every record, decision, vote, layout and chunk against the hashes that name it.

    Reads only, and may run beside a live run. Files of a writer that died, or that is at work, are told and
    are no damage.
    """
    with answering(as_json, exit_code=_code_of) as answer:
        from everstep.store.findings import exit_code

        findings = _check(run, step, quick)
        code = exit_code(finding.severity for finding in findings)
        _answer(answer, run, quick, findings, code)
        sys.exit(code)


def _code_of(error: EverstepError) -> int:
    """Of an error that ends the check as a whole."""
    from everstep.errors import Damaged, NoCheckpoint, NotARun, UsageError
    from everstep.store.findings import EXIT_DAMAGE

    if isinstance(error, (NotARun, NoCheckpoint, UsageError)):
        return WRONG_CALL
    return EXIT_DAMAGE if isinstance(error, Damaged) else CANNOT_TELL


def _check(run: str, step: int | None, quick: bool) -> list[Finding]:
    from everstep.places import locate
    from everstep.store.blocking import run_blocking
    from everstep.store.fsck import check

    async def gather() -> list[Finding]:
        with progress("fsck", unit="B", scale=True) as bar:
            done = 0

            def show(now: int, total: int) -> None:
                nonlocal done
                bar.total = total
                bar.update(now - done)
                done = now

            backend = locate(run).open()
            try:
                return [finding async for finding in check(backend, step=step, quick=quick, progress=show)]
            finally:
                await backend.close()

    return run_blocking(gather())


def _answer(answer: Answer, run: str, quick: bool, findings: list[Finding], code: int) -> None:
    value: dict[str, Any] = {
        "run": run,
        "clean": code == 0,
        "quick": quick,
        "exit_code": code,
        "findings": [_as_json(finding) for finding in findings],
    }
    answer.give(value, lambda: _as_text(run, quick, findings, code))


def _as_json(finding: Finding) -> dict[str, Any]:
    return {
        "severity": finding.severity.value,
        "kind": finding.kind.value,
        "name": finding.name,
        "step": finding.step,
        "incarnation": finding.incarnation,
        "message": finding.message,
        "hurts": finding.hurts,
    }


def _as_text(run: str, quick: bool, findings: list[Finding], code: int) -> str:
    lines = []
    for finding in findings:
        said = finding.message if finding.name in finding.message else f"{finding.name}: {finding.message}"
        lines.append(f"{finding.severity.value}: {said}")
        if finding.hurts:
            lines.append(f"    {finding.hurts}")
    verdict = {0: "clean", 4: "DAMAGED", CANNOT_TELL: "cannot tell"}.get(
        code, "DAMAGED, and more that cannot be told"
    )
    lines.append(f"{run}: {verdict}" + (" (images' bytes not read)" if quick else ""))
    return "\n".join(lines)
