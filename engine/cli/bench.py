"""``everstep bench``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .frame import FAILED, answering, command, human_bytes, json_option, progress, table

EPILOG = """\
Exit codes:
  0  measured
  1  the bytes that came back were not those that were given, or something failed
  2  usage

Example:
  everstep bench {name} --size-mib 1024 --repeats 5
"""

Tell = Callable[[str], None]
Runner = Callable[[Tell], "dict[str, Any]"]
STAGES_PER_REPEAT = {"stall": 3, "save-load": 2}
STAGES = {"dcp": 8}
"""Of benchmarks whose number of stages does not grow with the repeats."""


@click.group("bench", context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure everstep against what this machine can do with the same bytes.

    Medians over repeats with least and greatest; the floors are measured in the same run, in turn with
    everstep.

    \b
    Example:
      everstep bench stall --json
    """


def _options(function: Callable[..., None]) -> Callable[..., None]:
    for option in (
        json_option,
        click.option(
            "--dir",
            "directory",
            type=click.Path(path_type=Path, file_okay=False, exists=True),
            help="Where to write; default: the current directory.",
        ),
        click.option("--repeats", type=click.IntRange(1, 1000), default=5, show_default=True),
        click.option(
            "--size-mib",
            type=click.IntRange(1, 1 << 20),
            default=1024,
            show_default=True,
            help="Size of the state.",
        ),
    ):
        function = option(function)
    return function


@command("stall", epilog=EPILOG.format(name="stall"))
@_options
def stall(size_mib: int, repeats: int, directory: Path | None, as_json: bool) -> None:
    """How long training stands still for a snapshot.

    blocking_vs_copy compares an eager snapshot with a plain multi-threaded copy of the same bytes into
    memory that is there already; overlap_blocking_vs_copy a snapshot that is copied while training goes on
    (the call, plus what the optimizer had to wait); small_tensors_s is a snapshot of 10,000 tensors of 256
    bytes.
    """

    def runner(tell: Tell) -> dict[str, Any]:
        from everstep.benchmarks.stall import run_stall

        return run_stall(size_mib, repeats, directory, tell)

    _run("stall", runner, repeats, as_json)


@command("save-load", epilog=EPILOG.format(name="save-load"))
@_options
def save_load(size_mib: int, repeats: int, directory: Path | None, as_json: bool) -> None:
    """How fast a snapshot becomes durable, and comes back.

    flush_vs_raw_write compares the time from snapshot to durable commit (hashes, fsync of files and
    directories) with a raw write and fsync of the same bytes; load_vs_raw_read a cold, verified load into
    existing tensors with a raw cold read; peak_extra_mib is the memory of trainer and agent beyond the state
    and the slots.
    """

    def runner(tell: Tell) -> dict[str, Any]:
        from everstep.benchmarks.save_load import run_save_load

        return run_save_load(size_mib, repeats, directory, tell)

    _run("save-load", runner, repeats, as_json)


@command("dcp", epilog=EPILOG.format(name="dcp"))
@_options
def dcp(size_mib: int, repeats: int, directory: Path | None, as_json: bool) -> None:
    """everstep under torch.distributed.checkpoint, against torch's own file system writer.

    Four ranks save sharded tensors, which 4, 2 and 8 ranks load: once a few large ones, once 10,000 small ones
    (small_...). "dcp" is everstep.dcp.Writer and Reader, "checkpointer" everstep.Checkpointer; each ratio is its time
    over that of torch's writer: of the call (blocking), until all is durable, and of a cold load.
    """

    def runner(tell: Tell) -> dict[str, Any]:
        from everstep.benchmarks.dcp import run_dcp

        return run_dcp(size_mib, repeats, directory, tell)

    _run("dcp", runner, repeats, as_json)


bench.add_command(stall)
bench.add_command(save_load)
bench.add_command(dcp)


def _run(name: str, runner: Runner, repeats: int, as_json: bool) -> None:
    with answering(as_json) as answer:
        from everstep.benchmarks.common import Mismatch

        total = STAGES.get(name) or STAGES_PER_REPEAT[name] * repeats + 1
        with progress(name, unit="stage", total=total) as bar:

            def tell(what: str) -> None:
                bar.set_description_str(f"{name}: {what}")
                bar.update(1)

            try:
                found = runner(tell)
            except Mismatch as error:
                click.echo(f"error: {error}", err=True)
                sys.exit(FAILED)
        answer.give(found, lambda: _as_text(found))


def _as_text(found: dict[str, Any]) -> str:
    headline = [(key, f"{value:.3f}") for key, value in found.items() if isinstance(value, float)]
    samples = list(_samples(found))
    m = found["machine"]
    return "\n\n".join(
        [
            f"{found['benchmark']}: {human_bytes(found['size_bytes'])} in {found['tensors']} tensors, "
            f"{found['repeats']} repeats",
            table(("result", "value"), headline, right=(1,)),
            table(("measured", "median", "least", "greatest", "rate"), samples, right=(1, 2, 3, 4)),
            f"{m['cores']} cores, {human_bytes(m['memory_bytes'])}, Python {m['python']}, "
            f"torch {m['torch']}, {m['file_system']}",
            *([f"cold by {found['cold_by']}"] if found.get("cold_by") else []),
            found["checked"],
        ]
    )


def _samples(found: dict[str, Any], prefix: str = "") -> Any:
    for key, value in found.items():
        if isinstance(value, dict) and "median_s" in value:
            rate = f"{human_bytes(int(value['bytes_per_s']))}/s" if "bytes_per_s" in value else ""
            seconds = [f"{value[name] * 1000:.1f} ms" for name in ("median_s", "min_s", "max_s")]
            yield (prefix + key, *seconds, rate)
        elif isinstance(value, dict) and key.endswith("floors"):
            yield from _samples(value, "floor: ")
