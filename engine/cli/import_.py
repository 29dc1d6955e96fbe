"""``everstep import``."""

from __future__ import annotations

from pathlib import Path

import click

from .frame import answering, command, json_option

EPILOG = """\
Exit codes:
  0  imported: a committed checkpoint of the run
  1  the source cannot be read, holds what cannot be stored, or the run has newer steps
  2  usage

Example:
  everstep import checkpoint.pt runs/gpt --step 12000
  everstep import dcp/step-12000 runs/gpt --step 12000 --part model=app.model --part optimizer=app.optim
  everstep import hub/ runs/gpt
"""


@command("import", epilog=EPILOG)
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.argument("run")
@click.option(
    "--step", type=click.IntRange(min=0), default=0, show_default=True, help="Step of the checkpoint."
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    metavar="NAME[=PATH]",
    help="Take what lies at the dotted PATH of the source as part NAME. By default the top-level items are parts.",
)
@json_option
def import_(source: Path, run: str, step: int, parts: tuple[str, ...], as_json: bool) -> None:
    """Make SOURCE a checkpoint of RUN: a file of torch.save, a directory of torch.distributed.checkpoint, or
    safetensors (a file, or a directory with or without an index).

    Nothing in SOURCE is executed: it may hold tensors and plain values only. A state dict by itself becomes part
    "model".
    """
    with answering(as_json) as answer:
        chosen = dict(_pair(text) for text in parts)
        found = _import(source, run, step, chosen)
        value = {"run": run, "step": step, "parts": found}
        answer.give(value, lambda: f"{run}: step {step} with {', '.join(found)}")


def _pair(text: str) -> tuple[str, str]:
    name, found, path = text.partition("=")
    if not name:
        raise click.UsageError(f"--part {text!r} has no name")
    return name, path if found else name


def _import(source: Path, run: str, step: int, parts: dict[str, str]) -> list[str]:
    if source.is_dir() and (source / ".metadata").exists():
        from everstep.port.dcp_dirs import import_dcp

        return import_dcp(source, run, step=step, parts=parts)
    if source.is_dir() or source.suffix == ".safetensors":
        from everstep.port.safetensors_files import import_safetensors

        if len(parts) > 1:
            raise click.UsageError("safetensors make one part; give --part once")
        return import_safetensors(source, run, step=step, part=next(iter(parts), "model"))
    from everstep.port.torch_files import import_torch

    return import_torch(source, run, step=step, parts=parts)
