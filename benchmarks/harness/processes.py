"""Workers in processes of their own: started, bounded in time, and all that they leave behind ended.

Whatever a worker starts inherits a mark in its environment: so agents and daemons are found that have left its process
group, and nobody else's processes are touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

MARK = "EVERSTEP_BENCH_WORKER"
POLL_S = 0.02
OTHERS_S = 20.0
"""How long the other ranks may go on when one has failed."""
TAIL_CHARS = 600
ENDING_TRIES = 3


@dataclass
class Outcome:
    """``result``: what rank 0 gave back. ``problem``: why there is none, or what went wrong all the same."""

    result: dict[str, Any] | None
    problem: str = ""


def new_token() -> str:
    return secrets.token_hex(8)


def own_processes(token: str) -> list[int]:
    """All living processes that have the mark ``token``, the caller too if it has."""
    wanted = f"{MARK}={token}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found


def end_processes(token: str) -> None:
    """Kill all that have the mark; several times, for one may start another meanwhile."""
    for _ in range(ENDING_TRIES):
        left = own_processes(token)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(POLL_S)


def launch(job: dict[str, Any], ranks: int, limit_s: float) -> Outcome:
    """Run ``job`` (see :mod:`.worker`) on ``ranks`` processes for at most ``limit_s``; none of them, nor what they
    started, is left."""
    token = new_token()
    with (
        tempfile.TemporaryDirectory(prefix="everstep-bench-", dir="/var/tmp") as runtime,
        contextlib.ExitStack() as files,
    ):
        results = [files.enter_context(tempfile.TemporaryFile()) for _ in range(ranks)]
        logs = [files.enter_context(tempfile.TemporaryFile()) for _ in range(ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                task = {**job, "rank": rank, "world": ranks, "token": token, "store": f"{runtime}/store"}
                processes.append(_start(task, runtime, results[rank], logs[rank]))
            late = _await(processes, limit_s)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            end_processes(token)
        return _outcome(processes, results, logs, late, limit_s)


def _start(task: dict[str, Any], runtime: str, result: IO[bytes], log: IO[bytes]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, MARK: task["token"], "EVERSTEP_RUNTIME_DIR": runtime}
    if task["world"] > 1:
        numbers = {"RANK": task["rank"], "LOCAL_RANK": task["rank"]}
        numbers |= {"WORLD_SIZE": task["world"], "LOCAL_WORLD_SIZE": task["world"]}
        environment |= {name: str(number) for name, number in numbers.items()}
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [sys.executable, "-m", "everstep.benchmarks.harness.worker"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        pass_fds=[result.fileno()],
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # it may die at once: its log says why
        pipe.write(json.dumps({**task, "result_fd": result.fileno()}).encode())
    return process


def _await(processes: list[subprocess.Popen[bytes]], limit_s: float) -> bool:
    """Wait until all have ended; whether they took too long. When one fails the others have a little while."""
    until = time.monotonic() + limit_s
    failed = False
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if now >= until:
            return not failed
        if not failed and any(process.poll() for process in processes):
            failed, until = True, min(until, now + OTHERS_S)
        time.sleep(POLL_S)
    return False


def _outcome(
    processes: list[subprocess.Popen[bytes]],
    results: Sequence[IO[bytes]],
    logs: Sequence[IO[bytes]],
    late: bool,
    limit_s: float,
) -> Outcome:
    found: list[dict[str, Any] | None] = []
    for file in results:
        file.seek(0)
        text = file.read()
        try:
            found.append(json.loads(text) if text else None)
        except ValueError:
            found.append(None)  # it was killed while it wrote
    if late:
        return Outcome(None, f"not done after {limit_s:g} s, and ended; its last words: {_tail(logs[0])}")
    for rank, (process, result) in enumerate(zip(processes, found, strict=True)):
        if result is not None and "error" in result:
            return Outcome(None, f"failed: {result['error']}")
        if process.returncode or result is None:
            code = process.returncode
            how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
            return Outcome(None, f"rank {rank}: {how}; its last words: {_tail(logs[rank])}")
    return Outcome(found[0])


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    text = log.read().decode(errors="replace").strip()
    return f"...{text[-TAIL_CHARS:]}" if len(text) > TAIL_CHARS else text or "(none)"


__all__ = ["MARK", "Outcome", "end_processes", "launch", "own_processes"]
