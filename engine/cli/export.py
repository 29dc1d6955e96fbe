"""``everstep export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .frame import answering, command, json_option

EPILOG = """\
Exit codes:
  0  written, whole
  1  no such checkpoint, or it cannot be written in this format; nothing was left behind
  2  usage

Example:
  everstep export runs/gpt model.safetensors
  everstep export runs/gpt hub/ --max-shard-size 2000000000
  everstep export runs/gpt state.pt --step 12000
  everstep export runs/gpt dcp/ --to dcp --part model --part optimizer
"""

FORMATS = ("safetensors", "torch", "dcp")


@command("export", epilog=EPILOG)
@click.argument("run")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "form",
    type=click.Choice(FORMATS),
    help="Format; by default torch for names in .pt, .pth and .bin, else safetensors.",
)
@click.option("--step", type=click.IntRange(min=0), help="The checkpoint; by default the newest.")
@click.option("--part", "parts", multiple=True, help="Part to export (safetensors: one, by default model).")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Whose own values.")
@click.option(
    "--max-shard-size",
    type=click.IntRange(min=1),
    default=5_000_000_000,
    show_default=True,
    help="Bytes of a safetensors file in a directory, at most.",
)
@json_option
def export(
    run: str,
    out: Path,
    form: str | None,
    step: int | None,
    parts: tuple[str, ...],
    rank: int,
    max_shard_size: int,
    as_json: bool,
) -> None:
    """Write a checkpoint of RUN as OUT, in a format that needs no everstep: sharded tensors become whole.

    OUT must not exist. A directory of safetensors is what from_pretrained reads, beside the model's own
    configuration.
    """
    chosen = form or ("torch" if out.suffix in (".pt", ".pth", ".bin") else "safetensors")
    if chosen == "safetensors" and len(parts) > 1:
        raise click.UsageError("safetensors holds one part; give --part once")
    with answering(as_json) as answer:
        files = _export(run, out, chosen, step, parts, rank, max_shard_size)
        value: dict[str, Any] = {"out": str(out), "format": chosen, "files": files}
        answer.give(value, lambda: f"{out}: {chosen}, {len(files)} file{'s' if len(files) != 1 else ''}")


def _export(
    run: str, out: Path, form: str, step: int | None, parts: tuple[str, ...], rank: int, shard_bytes: int
) -> list[str]:
    if form == "safetensors":
        from everstep.port.safetensors_files import export_safetensors

        part = parts[0] if parts else "model"
        return export_safetensors(run, out, step=step, part=part, shard_bytes=shard_bytes, rank=rank)
    if form == "torch":
        from everstep.port.torch_files import export_torch

        export_torch(run, out, step=step, parts=parts or None, rank=rank)
        return [out.name]
    from everstep.port.dcp_dirs import export_dcp

    export_dcp(run, out, step=step, parts=parts or None, rank=rank)
    return sorted(path.name for path in out.iterdir())
