"""``everstep bench list``, ``run`` and ``compare``: checkpoint engines side by side."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .frame import FAILED, USAGE, answering, command, human_bytes, json_option, progress, table
from .options import mebibytes

if TYPE_CHECKING:
    from everstep.benchmarks.harness.compare import Comparison
    from everstep.benchmarks.harness.results import ReportDict, WorkloadDict

OURS = "everstep"
INTERRUPTED = 130
"""As shells tell it: 128 and the number of SIGINT."""

LIST_EPILOG = """\
Exit codes:
  0  listed

Example:
  everstep bench list
"""


@command("list", epilog=LIST_EPILOG)
@json_option
def list_(as_json: bool) -> None:
    """The workloads and systems that "everstep bench run" knows, and what of them can run here."""
    with answering(as_json) as answer:
        from everstep.benchmarks.harness import systems, workloads

        found = {name: systems.load(spec) for name, spec in systems.all_systems().items()}
        value: dict[str, dict[str, Any]] = {
            "workloads": {
                one.name: {
                    "meaning": one.meaning,
                    "ranks": one.ranks,
                    "size_mib": one.default_mib,
                    "missing": one.missing(),
                }
                for one in workloads.ALL
            },
            "systems": {
                name: {
                    "meaning": system.meaning,
                    "works": sorted(system.works),
                    "version": system.version(),
                    "missing": system.missing(),
                }
                for name, system in found.items()
            },
        }

        def text() -> str:
            rows = [(name, one["missing"] or one["meaning"]) for name, one in value["workloads"].items()]
            lines = [
                (name, one["missing"] or one["version"], one["meaning"])
                for name, one in value["systems"].items()
            ]
            return "\n\n".join(
                [table(("workload", "meaning"), rows), table(("system", "here", "meaning"), lines)]
            )

        answer.give(value, text)


RUN_EPILOG = """\
Exit codes:
  0  measured; what other systems failed at is told
  1  everstep failed, or brought other bytes back than were given
  2  usage, or nothing can be written to --dir, or where a report is to go
  130  interrupted

Example:
  everstep bench run gpt-fp32 small-10k --system everstep --system torch --size 512 --json report.json
"""


@command("run", epilog=RUN_EPILOG)
@click.argument("names", nargs=-1)
@click.option(
    "--system",
    "named",
    multiple=True,
    help="Only these; also package.module:Class, an adapter of your own. Default: all that are installed.",
)
@click.option(
    "--size",
    metavar="MIB",
    callback=mebibytes,
    help='Size of each state, in MiB or as "2GiB". Default: the workload\'s own.',
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where to write; default: the current directory.",
)
@click.option("--repeats", type=click.IntRange(1, 1000), help="In each round. Default: the workload's own.")
@click.option("--rounds", type=click.IntRange(1, 1000), help="Default: the workload's own.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Report as JSON.")
@click.option(
    "--html",
    "html_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Report as one page, with charts.",
)
@click.option(
    "--png",
    "png_directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Charts as files, into it.",
)
def run(
    names: tuple[str, ...],
    named: tuple[str, ...],
    size: int | None,
    directory: Path | None,
    repeats: int | None,
    rounds: int | None,
    json_file: Path | None,
    html_file: Path | None,
    png_directory: Path | None,
) -> None:
    """Measure checkpoint engines in the workloads NAMES (default: all; see "everstep bench list").

    Every system is measured in a process of its own, in rounds (A B C, then C B A); what the machine can do at best
    with the same bytes is measured at both ends of each round. Loads are compared bit for bit before anything of a
    system counts. Times are medians, and stand beside multiples of the floor.
    """
    with answering(False) as answer:
        from everstep.benchmarks.harness import charts, systems, workloads
        from everstep.benchmarks.harness.report import write_html, write_pngs
        from everstep.benchmarks.harness.runner import FloorFailed, Options, Run

        try:
            wanted, chosen = workloads.chosen(names), systems.chosen(named)
        except systems.UnknownName as error:
            _usage(error)
        # What would be found out only after all was measured:
        if html_file is not None or png_directory is not None:
            charts.require()
        page = png_directory / "aims.png" if png_directory is not None else None
        scratch = (directory or Path.cwd()) / ".everstep-bench"
        _require_writable(*(path for path in (scratch, json_file, html_file, page) if path is not None))
        options = Options(wanted, chosen, bool(named), size, directory, repeats, rounds)
        job = Run(options)
        signal.signal(signal.SIGTERM, _stop)
        with progress("bench", unit="worker", total=job.workers) as bar:

            def tell(what: str) -> None:
                bar.set_description_str(what)
                bar.update(1)

            try:
                report = job.run(tell)
            except FloorFailed as error:
                click.echo(f"error: {error}", err=True)
                sys.exit(FAILED)
            except KeyboardInterrupt:
                click.echo("interrupted: nothing is reported", err=True)
                sys.exit(INTERRUPTED)
        answer.give({}, lambda: as_text(report))  # first: a disk may be full by now
        if json_file is not None:
            json_file.write_text(json.dumps(report, indent=1) + "\n")
        if html_file is not None:
            write_html(report, html_file)
        if png_directory is not None:
            write_pngs(report, png_directory)
        problems = ours_failed(report, job.failed)
        for problem in problems:
            click.echo(f"error: {problem}", err=True)
        sys.exit(FAILED if problems else 0)


def _stop(number: int, frame: object) -> None:
    """Leave as after Ctrl-C: the worker that runs is ended, and what it wrote is removed."""
    raise KeyboardInterrupt


def _require_writable(*paths: Path) -> None:
    """End with a message where a file could not be written; what is there stays as it is."""
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            there = path.exists()
            with path.open("ab"):
                pass
            if not there:
                path.unlink()
        except OSError as error:
            _usage(OSError(f"{path} cannot be written: {error.strerror or error}; name another place"))


def _usage(error: Exception) -> Any:
    click.echo(f"error: {error}", err=True)
    sys.exit(USAGE)


def ours_failed(report: ReportDict, failed: Iterable[tuple[str, str]]) -> list[str]:
    """Where everstep was wrong or failed, one line each, of all workloads and systems that did."""
    found = []
    for name, system in failed:
        workload = report["workloads"][name]
        if system.partition("-")[0] == OURS:
            one = workload["systems"].get(system)
            found.append(f"{name}, {system}: {one['checked'] if one else workload['left_out'][system]}")
    return found


COMPARE_EPILOG = """\
Exit codes:
  0  nothing of everstep is worse by more than the noise
  1  something is, or is missing
  2  usage, or a file is no report

Example:
  everstep bench compare before.json after.json
"""


@command("compare", epilog=COMPARE_EPILOG)
@click.argument("first", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.argument("second", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@json_option
def compare(first: Path, second: Path, as_json: bool) -> None:
    """Tell which ratios moved from one report to another by more than the noise.

    Compared are ratios to the floor of the same run. A ratio's noise follows from the spread of its samples and of the
    floor's in both reports. Other systems that moved are told, but decide nothing.
    """
    with answering(as_json) as answer:
        from everstep.benchmarks.harness import compare as comparing
        from everstep.benchmarks.harness.results import NotAReport, read

        try:
            found = comparing.compare(read(first), read(second))
        except NotAReport as error:
            _usage(error)
        moved = [move for move in found.moves if move.verdict != "same"]
        worse = [move for move in found.worse if move.system.startswith(OURS)]
        gone = [text for text in found.gone if f", {OURS}" in text]
        answer.give(
            {
                "worse": len(worse),
                "moved": [{**vars(move), "verdict": move.verdict} for move in moved],
                "same": len(found.moves) - len(moved),
                "gone": found.gone,
                "new": found.new,
            },
            lambda: _comparison(found),
        )
        sys.exit(FAILED if worse or gone else 0)


def _comparison(found: Comparison) -> str:
    moved = sorted(
        (move for move in found.moves if move.verdict != "same"), key=lambda move: -abs(move.change)
    )
    rows = [
        (
            move.verdict,
            move.workload,
            move.system,
            move.work,
            f"{move.before:.3g}",
            f"{move.after:.3g}",
            f"{move.change:+.1%}",
            f"{move.noise:.1%}",
        )
        for move in moved
    ]
    headers = ("", "workload", "system", "work", "before", "after", "change", "noise")
    return "\n\n".join(
        [
            *([table(headers, rows, right=(4, 5, 6, 7))] if rows else []),
            *(f"gone: {text}" for text in found.gone),
            *(f"new: {text}" for text in found.new),
            f"{len(found.moves) - len(moved)} of {len(found.moves)} ratios are the same within the noise",
        ]
    )


def as_text(report: ReportDict) -> str:
    """The report for people: a table for each workload, then the aims."""
    m = report["machine"]
    aims = [
        (
            one["cell"],
            f"{one['value']:.3f}",
            f"{'<' if one['strict'] else '<='} {one['aim']:.3g}",
            "met" if one["met"] else "missed",
        )
        for one in report["aims"]
    ]
    return "\n\n".join(
        [
            *(_workload_text(name, workload) for name, workload in report["workloads"].items()),
            *([table(("cell", "value", "aim", ""), aims, right=(1, 2))] if aims else []),
            f"{m['cores']} cores ({m['cpu']}), {human_bytes(m['memory_bytes'])}, Python {m['python']}, torch "
            f"{m['torch']}, {m['file_system']} ({m['disk']}), load {m.get('load_before', 0):.1f} before; "
            f"{report['took_s']:.0f} s",
        ]
    )


def _workload_text(name: str, workload: WorkloadDict) -> str:
    from everstep.benchmarks.harness.results import WORKS, ratio

    rows = [
        (f"floor: {floor}", "", *_times(one), "", one.get("way", ""))
        for floor, one in workload["floors"].items()
    ]
    for system, one in workload["systems"].items():
        for work, samples in one["works"].items():
            floor = WORKS[work].floor if work in WORKS else None
            below = workload["floors"].get(floor or "")
            times = ratio(samples["median_s"], below["median_s"]) if below else None
            rows.append((system, work, *_times(samples), f"{times:.2f}" if times else "", floor or ""))
        for number, value in one.get("numbers", {}).items():
            rows.append((system, number, "", "", "", f"{value:.3f}", ""))
        if one["memory"]:
            rows.append((system, "memory", *_memory(one["memory"]), "", "beyond one copy; raw"))
    headers = ("system", "work", "median", "least", "greatest", "times", "of")
    scale = workload["scale"]
    divided = f", the shapes of {scale['of']} divided by {scale['factor']:g}" if scale else ""
    wrong = [
        f"WRONG: {system}: {one['checked']}" for system, one in workload["systems"].items() if one["wrong"]
    ]
    return "\n".join(
        [
            f"{name}: {workload['meaning']}; {human_bytes(workload['size_bytes'])} in "
            f"{workload['tensors']} tensors{divided}",
            table(headers, rows, right=(2, 3, 4, 5)),
            *wrong,
            *(f"left out: {system}: {why}" for system, why in workload["left_out"].items()),
        ]
    )


def _times(samples: Any) -> tuple[str, str, str]:
    median, least, greatest = (f"{samples[key] * 1000:.1f} ms" for key in ("median_s", "min_s", "max_s"))
    return median, least, greatest


def _memory(memory: Any) -> tuple[str, str, str]:
    beyond, raw = (
        f"{memory[key] / (1 << 20):.0f} MiB" for key in ("peak_beyond_copy_bytes", "peak_extra_bytes")
    )
    return beyond, "", raw
