"""``everstep spare``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .arenas import memory_option
from .frame import answering, command

if TYPE_CHECKING:
    from everstep.agent.main import StandBy
    from everstep.agent.values import AgentSettings
    from everstep.backends.api import Backend

LOOK_S = 0.5

EPILOG = """\
Exit codes:
  0  told to end (SIGTERM, SIGINT); what is kept stays in memory
  1  the run did not come in time, another agent serves it here, the port is taken
  2  usage

Example:
  export EVERSTEP_SECRET=...        # the trainers' own
  everstep spare runs/gpt --listen 10.0.0.9:7070
  # in the trainers: Memory(replicas=1, spares=["10.0.0.9:7070"])
"""


@command("spare", epilog=EPILOG)
@click.argument("run")
@click.option(
    "--listen", metavar="HOST:PORT", default="", help="Default: this host's address, any free port."
)
@memory_option
@click.option("--node", default=None, help="This node's name (default: EVERSTEP_NODE, else the host's).")
@click.option("--wait", "patience", default="10m", show_default=True, help="How long to wait for the run.")
def spare(run: str, listen: str, memory: Path, node: str | None, patience: str) -> None:
    """Keep copies of a run's snapshots in this node's memory, on which no rank runs.

    The job's nodes send theirs here first (Memory(replicas=..., spares=[...])). When one of them is lost, start its
    ranks here: they find the snapshots in this node's memory. Runs until it is told to end, and leaves what it keeps
    where it is. EVERSTEP_SECRET (or EVERSTEP_SECRET_FILE) must be that of the trainers.
    """
    with answering(False):
        from everstep.agent.main import run as serve

        settings, stand_by = _prepare(run, listen, memory, node, patience)
        code = serve(settings, stand_by=stand_by)
    raise SystemExit(code)


def _prepare(
    run: str, listen: str, memory: Path, node: str | None, patience: str
) -> tuple[AgentSettings, StandBy]:
    from everstep.agent.main import StandBy
    from everstep.agent.values import AgentSettings
    from everstep.errors import BadOption
    from everstep.memory.directory import arena_dir
    from everstep.peers.address import own_address
    from everstep.peers.secret import SECRET, SECRET_FILE, run_secret
    from everstep.places import locate

    secret = run_secret()
    if secret is None:
        raise BadOption(
            "a spare node needs the secret of the run's agents",
            found="none",
            expected=f"{SECRET} or {SECRET_FILE}, the same as the trainers'",
        )
    host, port = _address(listen) if listen else (own_address(), 0)
    place = locate(run, node=node)
    if not memory.is_dir():
        raise BadOption("--memory must be a directory", found=str(memory))
    run_id, chunk_bytes = _await_run(place.open(), _seconds(patience))
    settings = AgentSettings(
        root=place.url,
        run_key=place.run_key,
        node=place.node,
        runtime_dir=place.agent_dir(run_id),
        chunk_bytes=chunk_bytes,
    )
    return settings, StandBy(run_id, secret, host, port, arena_dir(memory, place.run_key), _say)


def _say(host: str, port: int) -> None:
    click.echo(f"listening at {host}:{port}")


def _address(text: str) -> tuple[str, int]:
    from everstep.peers.address import split_address

    try:
        return split_address(text)
    except ValueError:
        raise click.UsageError(f"--listen takes HOST:PORT, not {text!r}") from None


def _seconds(text: str) -> float:
    from everstep.errors import BadOption
    from everstep.plan.schedule import parse_every

    every = parse_every(text, "--wait")
    if every is None or every.seconds is None:
        raise BadOption("--wait takes a duration", found=text, expected="for instance 90s, 10m")
    return every.seconds


def _await_run(backend: Backend, patience_s: float) -> tuple[str, int]:
    """The run's id and chunk size, once somebody has made it. NotARun after ``patience_s``."""
    from everstep.errors import CannotTell, NotARun
    from everstep.store.blocking import run_blocking
    from everstep.store.runs import open_run

    deadline = time.monotonic() + patience_s
    try:
        while True:
            try:
                record = run_blocking(open_run(backend))
                return record.run_id, record.chunk_bytes
            except (NotARun, CannotTell):
                if time.monotonic() >= deadline:
                    raise
                time.sleep(min(LOOK_S, patience_s))
    finally:
        run_blocking(backend.close())
