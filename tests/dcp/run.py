"""Small jobs of several ranks: each case is a function of :mod:`tests.dcp.jobs`, run by name."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.dcp.jobs import main
from tests.matrix import launch

JOB_TIMEOUT_S = 90.0


def run_job(
    world: int,
    cases: str,
    where: Path,
    *,
    env: dict[str, str] | None = None,
    killed: dict[int, str] | None = None,
) -> None:
    """Run the comma-separated ``cases`` one after the other in ``world`` processes. All must end well; but where ranks
    are ``killed`` at a point, these must be, and the others are ended."""
    name = f"{cases[:40].replace(',', '-')}-{world}"
    outs = [where / f"{name}.{rank}.txt" for rank in range(world)]
    processes = []
    for rank, out in enumerate(outs):
        own = {**(env or {}), "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        own |= {"MASTER_PORT": "29400"} | ({"KILL_AT": killed[rank]} if rank in (killed or {}) else {})
        processes.append(launch.start(main, cases, where, where / f"store-{name}", out=out, env=own))
    if killed:
        for rank in killed:
            processes[rank].join(JOB_TIMEOUT_S)
    codes = launch.ended(processes, 0.0 if killed else JOB_TIMEOUT_S)
    wanted = dict.fromkeys(killed, -signal.SIGKILL) if killed else dict.fromkeys(range(world), 0)
    said = "\n----\n".join(out.read_text() for out in outs if out.exists())
    assert {rank: codes[rank] for rank in wanted} == wanted, said
