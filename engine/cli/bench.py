"""``everstep bench``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from . import harness
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
STAGES_PER_REPEAT = {"stall": 3, "save-load": 2, "memory": 2, "delta": 2}
STAGES = {"dcp": 8}
"""Of benchmarks whose number of stages does not grow with the repeats."""
STAGES_MORE = {"memory": 4, "pace": 2, "s3": 3, "delta": 17}


@click.group("bench", context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure everstep against what this machine can do with the same bytes.

    Medians over repeats with least and greatest; the floors are measured in the same run, in turn with
    everstep. "run" measures any checkpoint engine side by side with it.

    \b
    Example:
      everstep bench run gpt-fp32 --html report.html
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


@command("memory", epilog=EPILOG.format(name="memory"))
@_options
def memory(size_mib: int, repeats: int, directory: Path | None, as_json: bool) -> None:
    """What a snapshot every step costs the training, and how fast it is on another node, and back.

    Times are multiples of the floor's time: eager_blocking_vs_copy and overlap_blocking_vs_copy compare the call and
    what the optimizer waited with a plain multi-threaded copy of the same bytes. step_slowdown is how much longer a
    training loop on one core takes with a snapshot every step, the engine on another core. Speeds are shares of the
    floor's speed: replication to another node's memory (over loopback) against plain sockets and against gloo
    (replication_vs_...), own_arena_recovery_vs_copy and peer_recovery_vs_receive the way back, verified, against a
    plain copy and a plain receive. Needs some nine times the size in memory.
    """

    def runner(tell: Tell) -> dict[str, Any]:
        from everstep.benchmarks.memory_tier import run_memory

        return run_memory(size_mib, repeats, directory, tell)

    _run("memory", runner, repeats, as_json)


PLAN_EPILOG = """\
Exit codes:
  0  measured
  1  the simulation is not what planning makes, or something failed
  2  usage

Example:
  everstep bench plan --json
"""


@command("plan", epilog=PLAN_EPILOG)
@click.option(
    "--ranks",
    type=click.IntRange(2, 1 << 17),
    default=16384,
    show_default=True,
    help="Ranks of the largest job; smaller ones are a quarter each, down to 256.",
)
@click.option("--entries", type=click.IntRange(3, 1 << 17), default=1000, show_default=True)
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where to write; default: the current directory.",
)
@json_option
def plan(ranks: int, entries: int, directory: Path | None, as_json: bool) -> None:
    """What planning and committing cost in a job of many ranks, by simulation.

    planning_s is one rank's plan, and the reading and checking of all ranks' layouts by the agent that commits;
    peak_rss_gib that agent's memory; steady_commit_s a commit with known layouts; manifest_mib its manifest. The
    notes say what is simulated. Needs some 300 MB of disk.
    """
    worlds = worlds_up_to(ranks)

    def runner(tell: Tell) -> dict[str, Any]:
        from everstep.benchmarks.plan import run_plan

        return run_plan(worlds, entries, directory, tell)

    _run("plan", runner, len(worlds), as_json, _plan_text)


def worlds_up_to(ranks: int) -> list[int]:
    """The jobs to simulate: ``ranks``, and a quarter of each while that is 256 at least."""
    worlds = [ranks]
    while worlds[0] >= 1024:
        worlds.insert(0, worlds[0] // 4)
    return worlds


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


@command("s3", epilog=EPILOG.format(name="s3").replace("--size-mib 1024", "--gib 1"))
@click.option(
    "--gib", type=click.FloatRange(0.001, 1024), default=1.0, show_default=True, help="Size of the images."
)
@click.option("--repeats", type=click.IntRange(1, 1000), default=5, show_default=True)
@click.option(
    "--url",
    help="s3://bucket/prefix, endpoint and keys by AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; "
    "default: a SeaweedFS on this machine, started for it.",
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where that has its data; default: the current directory.",
)
@json_option
def s3(gib: float, repeats: int, url: str | None, directory: Path | None, as_json: bool) -> None:
    """How fast images get into an object store and back, against other clients of the same server.

    Four images go the way of a flush (hashed, each part with a checksum that the server checks, verified, with vote
    and manifest) and back as a verified load; in turn with s3fs (files, and memory), boto3 with its threads,
    and s3torchconnector, which prove nothing of that. put_vs_best_rival and get_vs_best_rival are our speed over that
    of the fastest of them; peak_extra_mib the memory that each takes beyond the images, ours within memory_bound;
    rate_limit_error the greatest difference between a limit and what a relay saw pass in any 5 s, relative
    (rate_limit_get_error: of a get). Needs some four times the size in memory, and on disk five times that, and
    as much more with each repeat.
    """

    def runner(tell: Tell) -> dict[str, Any]:
        from everstep.benchmarks.object_store import run_s3

        return run_s3(gib, repeats, directory, tell, url=url)

    _run("s3", runner, repeats, as_json, _s3_text)


@command("pace", epilog=EPILOG.format(name="pace").replace("1024", "256"))
@json_option
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where to write; default: the current directory.",
)
@click.option("--repeats", type=click.IntRange(1, 1000), default=5, show_default=True)
@click.option(
    "--size-mib",
    type=click.IntRange(1, 1 << 20),
    default=256,
    show_default=True,
    help="Size of the state.",
)
def pace(size_mib: int, repeats: int, directory: Path | None, as_json: bool) -> None:
    """How much flushing slows down a training that reads from the same disk.

    slowdown_no_limit, slowdown_fixed and slowdown_adaptive are how much longer a step takes (0.1: a tenth) than in
    training alone, measured in turn, while one flush follows the other: without a limit, with a fixed one, and as fast
    as training is not slowed down. Each mode takes 12 s a repeat. Needs some twelve times the size in memory.
    """

    def runner(tell: Tell) -> dict[str, Any]:
        from everstep.benchmarks.pace import run_pace

        return run_pace(size_mib, repeats, directory, tell)

    _run("pace", runner, repeats, as_json, _pace_text)


DELTA_EPILOG = """\
Exit codes:
  0  measured
  1  the bytes that came back were not those that were given, or something failed
  2  usage

Example:
  everstep bench delta --json
"""


@command("delta", epilog=DELTA_EPILOG)
@json_option
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where to write; default: the current directory.",
)
@click.option("--repeats", type=click.IntRange(1, 1000), default=5, show_default=True)
def delta(repeats: int, directory: Path | None, as_json: bool) -> None:
    """How small the deltas of real trainings are, how fast they are coded, and what they cost.

    Four short trainings on the text of Python's standard library: a GPT with AdamW in mixed precision, and in fp32,
    LoRA, and a recommender. ..._at_10 are a delta's bytes over those of a full, ten steps apart; encode_gb_per_s and
    decode_gb_per_s are of one core; ..._vs_changed a delta's bytes over those of the numbers that changed, and
    never_above the largest delta over its full. restore_vs_full compares a cold load of a delta and its base with one
    of a full; step_slowdown is how much longer a training loop on one core takes when the agent on the other makes a
    delta of each snapshot. Takes some five minutes.
    """

    def runner(tell: Tell) -> dict[str, Any]:
        from everstep.benchmarks.delta import run_delta

        return run_delta(repeats, directory, tell)

    _run("delta", runner, repeats, as_json, _delta_text)


bench.add_command(harness.list_)
bench.add_command(harness.run)
bench.add_command(harness.compare)
bench.add_command(stall)
bench.add_command(save_load)
bench.add_command(plan)
bench.add_command(dcp)
bench.add_command(memory)
bench.add_command(pace)
bench.add_command(s3)
bench.add_command(delta)


def _run(
    name: str,
    runner: Runner,
    stages: int,
    as_json: bool,
    text: Callable[[dict[str, Any]], str] | None = None,
) -> None:
    with answering(as_json) as answer:
        from everstep.benchmarks.common import Mismatch

        total = STAGES.get(name) or STAGES_PER_REPEAT.get(name, 1) * stages + STAGES_MORE.get(name, 1)
        with progress(name, unit="stage", total=total) as bar:

            def tell(what: str) -> None:
                bar.set_description_str(f"{name}: {what}")
                bar.update(1)

            try:
                found = runner(tell)
            except Mismatch as error:
                click.echo(f"error: {error}", err=True)
                sys.exit(FAILED)
        answer.give(found, lambda: (text or _as_text)(found))


def _plan_text(found: dict[str, Any]) -> str:
    headers = ("ranks", "planning", "steady commit", "in memory", "manifest", "layouts", "memory")
    rows = [
        (
            one["ranks"],
            f"{one['planning_s']:.2f} s",
            f"{one['steady_commit_s']:.2f} s",
            f"{one['steady_in_memory_s']:.2f} s",
            f"{one['manifest_mib']:.2f} MiB",
            human_bytes(one["coordinator"]["read_bytes"]),
            f"{one['coordinator']['peak_rss_gib']:.2f} GiB",
        )
        for one in found["growth"]
    ]
    rank = found["rank"]
    return "\n\n".join(
        [
            f"plan: {found['entries']} entries on each rank",
            table(headers, rows, right=tuple(range(7))),
            f"one rank of {found['ranks']}: {rank['plan_s'] * 1000:.1f} ms, {rank['extra_mib']:.1f} MiB of memory, "
            f"a layout of {human_bytes(rank['layout_bytes'])}, stored {human_bytes(rank['stored_layout_bytes'])}",
            "\n".join(found["notes"]),
            found["checked"],
        ]
    )


def _s3_text(found: dict[str, Any]) -> str:
    rows = [
        (
            order,
            way,
            *(f"{one[name]:.2f} s" for name in ("median_s", "min_s", "max_s", "cpu_s")),
            f"{human_bytes(int(one['bytes_per_s']))}/s",
            f"{one['peak_extra_mib']:.0f} MiB",
        )
        for order in ("put", "get")
        for way, one in found[order].items()
    ]
    headers = ("", "way", "median", "least", "greatest", "processor", "rate", "memory")
    bound, rate, m = found["memory_bound"], found["rate"], found["machine"]
    return "\n\n".join(
        [
            f"s3: {human_bytes(found['size_bytes'])} in {found['images']} images, {found['repeats']} repeats; "
            f"{found['server']}",
            table(headers, rows, right=tuple(range(2, 8))),
            f"speed over the fastest rival's: put {found['put_vs_best_rival']:.2f}, "
            f"get {found['get_vs_best_rival']:.2f}",
            f"everstep may take {bound['put_mib']:.0f} MiB for parts, {bound['get_mib']:.0f} MiB for pieces",
            f"limit of {human_bytes(int(rate['limit']))}/s, in any {rate['window_s']:g} s: "
            + ", ".join(
                f"{order} {human_bytes(int(rate[order]['least']))}/s to {human_bytes(int(rate[order]['greatest']))}/s"
                for order in ("put", "get")
            ),
            *(f"left out: {way}: {why}" for way, why in found["left_out"].items()),
            f"{m['cores']} cores, load {found['load_before']:.1f} before, Python {m['python']}, {m['file_system']}",
            found["checked"],
        ]
    )


def _pace_text(found: dict[str, Any]) -> str:
    headers = ("flushes", "slower by", "least", "greatest", "flushed")
    rows = [
        (
            one["name"],
            *(f"{one[key]:.1%}" for key in ("slowdown", "slowdown_min", "slowdown_max")),
            f"{human_bytes(int(one['flushed_bytes_per_s']))}/s",
        )
        for one in found["modes"]
    ]
    return "\n\n".join(
        [
            f"pace: {human_bytes(found['size_bytes'])}, a step of {found['step_alone_s'] * 1000:.0f} ms that reads "
            f"{human_bytes(found['step_reads_bytes'])}, {found['repeats']} repeats",
            table(headers, rows, right=(1, 2, 3, 4)),
        ]
    )


def _delta_text(found: dict[str, Any]) -> str:
    headline = [(key, f"{value:.3f}") for key, value in found.items() if isinstance(value, float)]
    headers = ("training", "part", "full", "steps", "delta", "planes", "xor", "difference", "zstd", "zipnn")
    rows = [
        (name, part, human_bytes(one["bytes"]), distance, *_ratios(one, distance))
        for name, training in found["trainings"].items()
        for part, one in training["parts"].items()
        for distance in training["delta"]
    ]
    m = found["machine"]
    return "\n\n".join(
        [
            f"delta: bytes over those of a full image; {found['repeats']} repeats",
            table(headers, rows, right=tuple(range(2, 10))),
            table(("result", "value"), headline, right=(1,)),
            table(
                ("measured", "median", "least", "greatest", "rate"), list(_samples(found)), right=(1, 2, 3, 4)
            ),
            f"learning rate: {found['schedule']}; highest {found['peak_learning_rate']['gpt']:g} for the GPTs, "
            f"{found['peak_learning_rate']['others']:g} for the others",
            *(f"left out: {way}: {why}" for way, why in found["left_out"].items()),
            f"{m['cores']} cores, load {found['load_average'][0]:.1f} before, Python {m['python']}, "
            f"torch {m['torch']}, {m['file_system']}",
            found["checked"],
        ]
    )


def _ratios(part: dict[str, Any], distance: str) -> list[str]:
    """Of a part at a distance: the delta, the other ways against the base, and those of the image alone."""
    ways = {name: one["ratio"] for name, one in part[distance].items() if isinstance(one, dict)}
    ways |= {name.split()[0]: one["ratio"] for name, one in part["alone"].items()}
    shown = [
        part[distance]["delta"],
        *(ways.get(way) for way in ("planes", "xor", "difference", "zstd", "zipnn")),
    ]
    return ["" if ratio is None else f"{ratio:.3f}" for ratio in shown]


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
