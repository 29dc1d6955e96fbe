"""The command ``everstep``: finds its subcommands by name and imports only the one that runs.

Nothing here, nor in the subcommands' modules at import, may import torch or numpy: ``ls``, ``show`` and
``fsck`` run where torch is not installed, and help is there at once.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

import click


class _Entry(NamedTuple):
    module: str
    attribute: str
    help: str


COMMANDS = {
    "ls": _Entry("ls", "ls", "List the checkpoints of a run, on disk and in this node's memory."),
    "show": _Entry("show", "show", "Show a run, or one of its checkpoints, in detail."),
    "status": _Entry("status", "status", "Show who is alive in a run, and the newest step in each tier."),
    "plan-memory": _Entry(
        "plan_memory", "plan_memory", "Say what the memory tier takes, and what survives what."
    ),
    "fsck": _Entry("fsck", "fsck", "Check every byte of a run against its hashes."),
    "copy": _Entry("copy", "copy", "Copy a run, or some of its checkpoints, to another place."),
    "prune": _Entry("prune", "prune", "Remove the checkpoints that no rule keeps."),
    "pin": _Entry("pin", "pin", "Keep a checkpoint from being removed."),
    "unpin": _Entry("pin", "unpin", "Remove pins."),
    "gc": _Entry("gc", "gc", "Remove what crashed writers left in a run."),
    "export": _Entry("export", "export", "Write a checkpoint as safetensors, torch.save or DCP."),
    "import": _Entry("import_", "import_", "Make a torch.save, DCP or safetensors checkpoint one of a run."),
    "clean-memory": _Entry("clean", "clean_memory", "Remove snapshots in memory that no process uses."),
    "spare": _Entry("spare", "spare", "Keep a run's snapshots in the memory of a node without ranks."),
    "demo": _Entry("demo", "demo", "Train, kill three ways, resume, compare bit for bit."),
    "bench": _Entry(
        "bench", "bench", "Measure snapshots, flushes and loads against what the machine can do."
    ),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called. Their one-line help stands in the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module = importlib.import_module(f"{__package__}.{entry.module}")
        command = getattr(module, entry.attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="everstep", prog_name="everstep")
def main() -> None:
    """Tiered checkpoints for PyTorch training.

    Every command has --json and documented exit codes; see "everstep COMMAND --help".
    """
