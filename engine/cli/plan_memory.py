"""``everstep plan-memory``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .frame import DONE, FAILED, answering, command, human_bytes, json_option, table

if TYPE_CHECKING:
    from everstep.sizing import MemoryPlan

TOO_SMALL = 4

EPILOG = """\
Exit codes:
  0  it fits on this node, the moment of recovery included
  1  the run could not be read
  2  usage
  4  it does not fit

Example:
  everstep plan-memory runs/gpt --replicas 1
  everstep plan-memory --parameters 7e9 --dtype bfloat16 --nodes 16 --ranks 8 --parity 4,2
"""


class _Parity(click.ParamType[tuple[int, int]]):
    name = "k,m"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        numbers = str(value).split(",")
        if len(numbers) != 2 or not all(one.strip().isdigit() for one in numbers):
            self.fail(f"{value!r} is not two numbers such as 4,2", param, ctx)
        return int(numbers[0]), int(numbers[1])


class _Whole(click.ParamType[int]):
    """A whole number, 7e9 too."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(value) if str(value).isdigit() else int(float(value))
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no number", param, ctx)


@command("plan-memory", epilog=EPILOG)
@click.argument("run", required=False)
@click.option("--bytes", "state_bytes", type=_Whole(), help="Bytes of tensors that each rank stores.")
@click.option("--parameters", type=_Whole(), help="Number of parameters of the model, over all ranks.")
@click.option(
    "--dtype", default="float32", show_default=True, help="Of the parameters and their optimizer state."
)
@click.option(
    "--optimizer", default="adam", show_default=True, help="adam, adamw, muon, momentum, sgd, none, ..."
)
@click.option(
    "--replicated", is_flag=True, help="All ranks hold the same (DDP); without: sharded over all ranks."
)
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes with ranks.")
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks on each node.")
@click.option("--slots", type=int, default=3, show_default=True)
@click.option("--replicas", type=int, default=0, show_default=True)
@click.option("--parity", type=_Parity(), help="k,m: groups of k + m nodes survive the loss of any m.")
@click.option(
    "--spares", type=click.IntRange(min=0), default=0, show_default=True, help="Nodes without ranks."
)
@click.option("--device-slots", type=int, default=0, show_default=True)
@click.option(
    "--growth", type=float, default=1.0, show_default=True, help="How many times as large the state becomes."
)
@click.option(
    "--memory", type=click.Path(path_type=Path, file_okay=False), help="Where arenas lie (default: /dev/shm)."
)
@json_option
def plan_memory(
    run: str | None,
    state_bytes: int | None,
    parameters: int | None,
    dtype: str,
    optimizer: str,
    replicated: bool,
    nodes: int | None,
    ranks: int | None,
    memory: Path | None,
    growth: float,
    as_json: bool,
    **wishes: Any,
) -> None:
    """Say what the memory tier takes on each node, whether that fits on this one, and what survives what.

    The size of the state is that of RUN, a directory or URL (its slots on this node, else its newest checkpoint), or
    --bytes per rank, or follows from --parameters. Reserves nothing.
    """
    if sum(one is not None for one in (run, state_bytes, parameters)) != 1:
        raise click.UsageError("name a RUN, or say --bytes or --parameters")
    with answering(as_json, exit_code=_code_of) as answer:
        import everstep.sizing as sizing
        from everstep.policy import Memory

        spares = tuple(f"spare:{port + 1}" for port in range(wishes.pop("spares")))
        found = sizing.plan_memory(
            run,
            memory=Memory(spares=spares, path=memory, **wishes),
            nodes=nodes,
            ranks_per_node=ranks,
            state_bytes=state_bytes,
            parameters=parameters,
            dtype=dtype,
            optimizer=optimizer,
            replicated=replicated,
            growth=growth,
        )
        answer.give(found.to_dict(), lambda: _as_text(found))
        sys.exit(DONE if found.fits else TOO_SMALL)


def _code_of(error: Exception) -> int:
    from everstep.errors import BadOption

    return 2 if isinstance(error, BadOption) else FAILED


def _as_text(found: MemoryPlan) -> str:
    job, room = found.job, found.room
    told = [f"{job.nodes} node(s) with {job.ranks_per_node} rank(s); the state: {found.source}"]
    rows = [
        ("rank: its own slots", f"{job.slots} of {human_bytes(job.slot_bytes)}", room.rank_own),
        ("rank: beside its tensors", f"{job.device_slots} device slot(s)", room.rank_device),
        ("node: its ranks' own slots", "", room.node_own),
        ("node: other nodes' snapshots", "two each", room.node_held),
        ("node: its share of parity", "two" if room.node_parity else "", room.node_parity),
        ("node: the agent", "", room.node_agent),
        ("node, in training", "", room.node),
        ("  beside it when it grows", f"x {job.growth:g}", room.grown),
        ("  beside it while it loads", "", room.loading),
        ("  former arenas beside new ones", "ranks moved, or in another number", room.moved),
        ("node, at the moment of recovery", "", room.recovery),
        ("spare node", "", room.spare),
    ]
    sized = [
        (name, what, human_bytes(nbytes))
        for name, what, nbytes in rows
        if nbytes or name == "node, in training"
    ]
    blocks = [told[0], table(("", "", "bytes"), sized, right=(2,))]
    verdicts = [
        (
            one.where,
            human_bytes(max(one.free, 0)),
            human_bytes(one.needed),
            human_bytes(one.most),
            "yes" if one.fits_recovery else "in training only" if one.fits else "no",
        )
        for one in found.verdicts
    ]
    blocks.append(
        table(("on this node", "free", "in training", "at most", "fits"), verdicts, right=(1, 2, 3))
    )
    if found.advice:
        blocks.append("\n".join(("it does not fit:", *(f"- {line}" for line in found.advice))))
    blocks.append(
        f"{job.survives} node(s) may be lost at once without going back to the disk. Where the run goes on from:"
    )
    for launcher in ("torchrun", "slurm", "kubernetes"):
        lines = [(one.what, one.goes_on[launcher]) for one in found.survival]
        blocks.append(table((f"{launcher}: lost is", ""), lines))
    return "\n\n".join(blocks)
