"""``everstep fsck``. Exit codes as fsck(8)."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .arenas import directory_of_run, memory_option
from .frame import Answer, answering, command, human_bytes, json_option, progress
from .options import duration, rate, share

if TYPE_CHECKING:
    from everstep.errors import EverstepError
    from everstep.store.findings import Finding
    from everstep.store.fsck_images import Extent
    from everstep.store.repair_run import Mended, Verdict

CANNOT_TELL = 8
WRONG_CALL = 16

INFOS_MAX = 3
"""Infos of a kind that are told one by one."""

STEPS_MAX = 20
"""Steps that are told one by one."""

EPILOG = """\
Exit codes, added up where several apply:
  0   clean
  1   something was repaired, or a pin of what is gone was removed
  4   damage left, or set aside by this or an earlier repair
  8   cannot tell: the storage did not answer, or a newer format
  16  usage; also where RUN is no run, or has no such step

Example:
  everstep fsck runs/gpt
  everstep fsck runs/gpt --step 12000 --json
  everstep fsck runs/gpt --tier s3://bucket/gpt --repair
  everstep fsck runs/gpt --sample 5% --max-duration 10m --rate 200MiB
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
@click.option(
    "--tier", "tiers", multiple=True, help="A further place of the run, checked too (may be given again)."
)
@click.option("--quick", is_flag=True, help="Do not read the images: check their sizes and everything else.")
@click.option("--sample", metavar="P%", callback=share, help="Read only so much of the images, by chance.")
@click.option("--seed", type=int, help="Of the sample; by default another one each time, which is told.")
@click.option("--max-duration", "seconds", metavar="T", callback=duration, help="Then stop reading images.")
@click.option("--rate", metavar="BYTES", callback=rate, help="Read no faster than so many bytes per second.")
@click.option(
    "--repair", "mend", is_flag=True, help="Mend what the other places, or the nodes' memory, have right."
)
@memory_option
@json_option
def fsck(
    run: str,
    step: int | None,
    tiers: tuple[str, ...],
    quick: bool,
    sample: float | None,
    seed: int | None,
    seconds: float | None,
    rate: float | None,
    mend: bool,
    memory: Path,
    as_json: bool,
) -> None:
    """Prove RUN, a directory or URL: every record, decision, vote, layout and chunk against the hashes that name it.

    Reads only, unless --repair is given, and may run beside a live run. Files of a writer that died, or that is at
    work, are told and are no damage. Where not all is read, the newest checkpoints are read first.

    --repair takes the good copy of each damaged object or chunk from the other places, this node's memory, or that of
    the run's other nodes (their agents are asked, with the run's secret), commits attempts whose votes are all there,
    and makes lost votes again where they can be proved. No checkpoint is deleted: one that nobody has right is set
    aside: it neither loads nor counts, until a later repair finds it right. Pins of what is gone for ever are removed.
    """
    import random

    from everstep.store.findings import exit_code
    from everstep.store.fsck_images import Extent

    with answering(as_json, exit_code=_code_of) as answer:
        number = random.SystemRandom().randrange(1 << 31) if seed is None else seed
        extent = Extent(quick, 1.0 if sample is None else sample, number, rate, seconds)
        found = _check([run, *tiers], step, extent, mend, memory)
        findings = [finding for one in found for finding in one.mended.after]
        code = exit_code(findings, repaired=any(one.mended.done for one in found))
        _answer(answer, found, extent, code)
        sys.exit(code)


def _code_of(error: EverstepError) -> int:
    """Of an error that ends the check as a whole."""
    from everstep.errors import Damaged, NoCheckpoint, NotARun, UsageError
    from everstep.store.findings import EXIT_DAMAGE

    if isinstance(error, (NotARun, NoCheckpoint, UsageError)):
        return WRONG_CALL
    return EXIT_DAMAGE if isinstance(error, Damaged) else CANNOT_TELL


@dataclass
class Checked:
    """One place, what was found and done there, and which of its steps load."""

    place: str
    mended: Mended
    verdict: Verdict


def _check(places: list[str], step: int | None, extent: Extent, mend: bool, memory: Path) -> list[Checked]:
    from everstep.store.blocking import run_blocking

    with progress("fsck", unit="B", scale=True) as bar:
        total = done = 0

        def show(now: int, all_of: int) -> None:
            nonlocal done
            bar.total = total + all_of
            bar.update(now - done)
            done = now

        async def all_of_them() -> list[Checked]:
            nonlocal total, done
            backends = [locate(place).open() for place in places]
            sources = RunMemory(locate(places[0]), backends, directory_of_run(memory, places[0]))
            found = []
            try:
                await require_one_run(backends)
                for at, backend in enumerate(backends):
                    others = [other for number, other in enumerate(backends) if number != at]
                    near = await is_node_tier(backend)
                    if near and at == 0:
                        raise _no_root(backend.url)
                    if mend:
                        mends = mend_near if near else check_and_mend
                        mended = await mends(
                            backend, others=others, memory=sources, step=step, extent=extent, progress=show
                        )
                    elif near:
                        mended = await look_near(
                            backend, others=others, step=step, extent=extent, progress=show
                        )
                    else:
                        mended = await check_only(backend, step=step, extent=extent, progress=show)
                    found.append(Checked(places[at], mended, verdict(mended)))
                    total, done = total + done, 0
                found[0].mended.after += sources.told()
                return found
            finally:
                await sources.close()
                for backend in backends:
                    await backend.close()

        from everstep.neighbours import RunMemory
        from everstep.places import locate
        from everstep.store.fsck_near import is_node_tier
        from everstep.store.repair_near import look_near, mend_near
        from everstep.store.repair_run import check_and_mend, check_only, verdict
        from everstep.store.runs import require_one_run

        return run_blocking(all_of_them())


def _no_root(url: str) -> EverstepError:
    """What lies there decides nothing, and must not be decided there."""
    from everstep.errors import NotARun

    return NotARun(
        f"{url} is no run's root",
        found="shares of checkpoints, but no decision and no incarnation's record: a node's own tier",
        expected="the run's root",
        hint="Name the root as RUN, and this with --tier. If this was the root, copy what another place has",
    )


def _answer(answer: Answer, found: list[Checked], extent: Extent, code: int) -> None:
    value: dict[str, Any] = {
        "run": found[0].place,
        "clean": code == 0,
        "quick": extent.quick,
        "exit_code": code,
        "findings": [_as_json(finding, one.place) for one in found for finding in one.mended.after],
        "repaired": [
            {**dataclasses.asdict(repair), "place": one.place} for one in found for repair in one.mended.done
        ],
        "not_repaired": [
            {"name": name, "place": one.place, "reason": why}
            for one in found
            for name, why in one.mended.failed.items()
        ],
        "places": [
            {
                "place": one.place,
                "loadable": [_key(key) for key in one.verdict.loadable],
                "lost": [_key(key) for key in one.verdict.lost],
                "proved_bytes": one.mended.seen.proved_bytes,
                "unread_bytes": one.mended.seen.unread_bytes,
            }
            for one in found
        ],
    }
    if extent.sample < 1:
        value["sample"] = {"share": extent.sample, "seed": extent.seed}
    answer.give(value, lambda: _as_text(found, extent, code))


def _key(key: tuple[int, int]) -> dict[str, int]:
    return {"step": key[1], "incarnation": key[0]}


def _as_json(finding: Finding, place: str) -> dict[str, Any]:
    return {
        "place": place,
        "severity": finding.severity.value,
        "kind": finding.kind.value,
        "name": finding.name,
        "step": finding.step,
        "incarnation": finding.incarnation,
        "message": finding.message,
        "hurts": finding.hurts,
    }


def _as_text(found: list[Checked], extent: Extent, code: int) -> str:
    lines: list[str] = []
    for one in found:
        where = f"{one.place}: " if len(found) > 1 else ""
        for finding in told_first(one.mended.after):
            lines += _lines(where, finding)
        for kind, more in left_out(one.mended.after).items():
            lines.append(f"info: {where}{more} more of the kind {kind} (--json tells all)")
        lines += [f"repaired: {where}{repair.name}: {repair.how}" for repair in one.mended.done]
        lines += [f"not repaired: {where}{name}: {why}" for name, why in one.mended.failed.items()]
        if one.verdict.lost:
            lines.append(f"{where}cannot be loaded: {_steps(one.verdict.lost)}")
            lines.append(f"{where}can be loaded: {_steps(one.verdict.loadable) or 'nothing'}")
    verdict = {0: "clean", 1: "clean, after repairs"}.get(code & 13)
    if verdict is None:
        told = ["DAMAGED"] if code & 4 else []
        told += ["and more that cannot be told" if told else "cannot tell"] if code & CANNOT_TELL else []
        verdict = ", ".join(told) + (" (some of it was repaired)" if code & 1 else "")
    unread = sum(one.mended.seen.unread_bytes for one in found)
    if extent.quick:
        verdict += " (images' bytes not read)"
    elif unread:
        seed = f", seed {extent.seed}" if extent.sample < 1 else ""
        verdict += f" ({human_bytes(unread)} of images not read{seed})"
    lines.append(f"{', '.join(one.place for one in found)}: {verdict}")
    return "\n".join(lines)


def _lines(where: str, finding: Finding) -> list[str]:
    said = finding.message if finding.name in finding.message else f"{finding.name}: {finding.message}"
    first = f"{finding.severity.value}: {where}{said}"
    return [first, f"    {finding.hurts}"] if finding.hurts else [first]


def told_first(findings: Sequence[Finding]) -> list[Finding]:
    """All findings but infos beyond the first few of a kind."""
    seen: Counter[str] = Counter()
    told = []
    for finding in findings:
        if finding.severity.value == "info":
            seen[finding.kind.value] += 1
            if seen[finding.kind.value] > INFOS_MAX:
                continue
        told.append(finding)
    return told


def left_out(findings: Sequence[Finding]) -> dict[str, int]:
    """How many infos of a kind are not told."""
    seen = Counter(finding.kind.value for finding in findings if finding.severity.value == "info")
    return {kind: count - INFOS_MAX for kind, count in seen.items() if count > INFOS_MAX}


def _steps(keys: Sequence[tuple[int, int]]) -> str:
    some = [f"{step} (incarnation {incarnation})" for incarnation, step in keys[-STEPS_MAX:]]
    more = f", and {len(keys) - STEPS_MAX} older ones" if len(keys) > STEPS_MAX else ""
    return ", ".join(some) + more
