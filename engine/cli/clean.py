"""``everstep clean-memory``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click

from .arenas import arena_directories, directory_of_run, memory_option
from .frame import answering, command, human_bytes, json_option

EPILOG = """\
Exit codes:
  0  done, also where there was nothing to remove
  1  something could not be removed
  2  usage

Example:
  everstep clean-memory runs/gpt
  everstep clean-memory --all      # of all runs of this user on this node
"""


@command("clean-memory", epilog=EPILOG)
@click.argument("run", required=False)
@click.option("--all", "every_run", is_flag=True, help="Of all runs of this user on this node.")
@memory_option
@json_option
def clean_memory(run: str | None, every_run: bool, memory: Path, as_json: bool) -> None:
    """Remove snapshots in shared memory that no living process uses.

    A killed run leaves its newest snapshots in memory so that it can go on from them; this gives the memory
    back, and the run then goes on from disk. What this node held for others, and parity, goes likewise; an agent
    that still lives owns those. What a living process owns or reads is never touched.
    """
    if every_run == (run is not None):
        raise click.UsageError("name a RUN, or say --all")
    with answering(as_json) as answer:
        from everstep.memory.directory import clean, find_arenas

        removed: list[dict[str, Any]] = []
        in_use: list[str] = []
        for directory in [directory_of_run(memory, run)] if run else arena_directories(memory):
            known = {str(info.path): (info.nbytes, info.kind.name.lower()) for info in find_arenas(directory)}
            for path in clean(directory, keep=lambda info: False):
                nbytes, kind = known.get(str(path), (0, "unknown"))
                removed.append({"path": str(path), "nbytes": nbytes, "kind": kind})
            in_use += [str(info.path) for info in find_arenas(directory)]
            with contextlib.suppress(OSError):
                directory.rmdir()
        answer.give({"removed": removed, "in_use": in_use}, lambda: _as_text(removed, in_use))


def _as_text(removed: list[dict[str, Any]], in_use: list[str]) -> str:
    lines = [f"removed {item['path']} ({item['kind']}, {human_bytes(item['nbytes'])})" for item in removed]
    lines += [f"in use, kept: {path}" for path in in_use]
    return "\n".join(lines) or "nothing to remove"
