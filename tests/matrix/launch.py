"""Runs a function as every rank of a gloo job, or by itself, in processes forked off one that has torch imported
already."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch._dynamo",  # an optimizer's first step loads it
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "everstep.checkpointer",
    "tests.matrix.job",
]
TIMEOUT_S = 100.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}

_context = multiprocessing.get_context("forkserver")


class RankFailed(AssertionError):
    """What went wrong, by rank."""


class Job:
    """``act(rank, world, *args)`` on every rank of a new job, as long as nothing ends it. ``enter(rank)`` is called
    in each rank first, and returns the address of the host that rank 0 is on."""

    def __init__(
        self, world: int, act: Callable[..., Any], *args: Any, enter: Callable[[int], str] | None = None
    ) -> None:
        os.environ.update(ENVIRONMENT)
        _context.set_forkserver_preload(PRELOAD)
        port = free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            here, there = _context.Pipe()
            process = _context.Process(
                target=_rank, args=(rank, world, port, there, act, args, enter), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def end(self, grace_s: float = 1.0) -> None:
        """All ranks are gone after this; SIGKILL where they do not go by themselves."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(grace_s)
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()


def run(
    world: int, act: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S, dies: Collection[int] = ()
) -> list[Any]:
    """``act(rank, world, *args)`` on every rank of a new job; the results by rank. Ranks in ``dies`` may end without a
    word (their result is None). RankFailed with the tracebacks."""
    job = Job(world, act, *args)
    try:
        return _collect(job.pipes, timeout_s, dies)
    finally:
        job.end()


def start(act: Callable[..., Any], *args: Any, out: Path, env: Mapping[str, str]) -> BaseProcess:
    """``act(*args)`` in a process, and session, of its own. What it prints is in ``out``; exit code 1 where it raises.
    ``env`` goes beside this process's environment as it is now."""
    _context.set_forkserver_preload(PRELOAD)
    process = _context.Process(target=_alone, args=({**os.environ, **ENVIRONMENT, **env}, out, act, args))
    process.start()
    return process


def ended(processes: Sequence[BaseProcess], within_s: float) -> list[int | None]:
    """Exit codes, None where it still ran after ``within_s``. None of them is left, nor what they started."""
    until = time.monotonic() + within_s
    try:
        for process in processes:
            process.join(max(until - time.monotonic(), 0))
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()


def _alone(env: dict[str, str], out: Path, act: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    code = 1
    try:
        act(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # as a killed process ends: torch's own would be waited for


def _collect(pipes: list[Connection], timeout_s: float, dies: Collection[int]) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    failed: dict[int, str] = {}
    missing = set(range(len(pipes)))
    while missing and not failed:
        ready = wait([pipes[rank] for rank in missing], timeout_s)
        if not ready:
            raise RankFailed(f"no word from ranks {sorted(missing)} within {timeout_s} s")
        for rank in sorted(missing):
            if pipes[rank] not in ready:
                continue
            missing.discard(rank)
            try:
                good, value = pipes[rank].recv()
            except EOFError:
                good, value = rank in dies, None if rank in dies else "the process ended without a word"
            if good:
                results[rank] = value
            else:
                failed[rank] = value
    if failed:
        raise RankFailed("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items())))
    return results


def _rank(
    rank: int,
    world: int,
    port: int,
    pipe: Connection,
    act: Callable[..., Any],
    args: tuple[Any, ...],
    enter: Callable[[int], str] | None,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        address = f"tcp://{enter(rank) if enter else '127.0.0.1'}:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
        pipe.send((True, act(rank, world, *args)))
        pipe.recv()  # until all have ended: rank 0 hosts the store that the others talk through
    except EOFError:
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    # As a killed job ends: no clean-up, whatever lies in memory stays there.
    os._exit(0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
