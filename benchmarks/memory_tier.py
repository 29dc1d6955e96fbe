"""What the memory tier costs the training, how fast snapshots come into another node's memory, and how fast they come
back, against a copy, and against plain sockets, of the same bytes.

Two nodes are simulated on this machine (:mod:`.memory_ranks`): each has its own arenas and agent, and they talk over
loopback. Floors are measured in the same repeats, before or after in turn; what comes back is compared first.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .common import MIB, Mismatch, Samples, Step, best, machine, workspace
from .memory_ranks import NODES, Config, Result
from .stall import measure_eager, measure_overlap
from .state import BenchState

LAUNCH_TIMEOUT_S = 3600.0
SHARED_MEMORY = Path("/dev/shm")
DEATH_S = 10.0


def run_memory(size_mib: int, repeats: int, directory: Path | None, tell: Step) -> dict[str, Any]:
    """All measurements of ``bench memory``; times in seconds. Raises Mismatch where bytes come back changed."""
    with workspace(directory) as work, _shared_directory() as shared:
        config = Config("", str(work), str(shared), "", 0, size_mib * MIB, repeats)
        blocking = _blocking(size_mib * MIB, repeats, work, tell)
        tell("a training loop with and without snapshots")
        train = _launch(replace(config, mode="train"), 1)
        tell("replication between two nodes")
        sent = _launch(replace(config, mode="replicate"), len(NODES))
        tell("recovery")
        back = _launch(replace(config, mode="recover", expected=sent.hashes), len(NODES))
        return {
            "benchmark": "memory",
            **blocking.pop("ratios"),
            "step_slowdown": _slowdown(train),
            **_of_replication(sent),
            **_of_recovery(back),
            "repeats": repeats,
            **blocking,
            **_summaries(train, sent, back),
            "checked": "results of both loops equal; every snapshot that came back compared, bit for bit",
            "machine": machine(work),
        }


def replicate_and_recover(nbytes: int, repeats: int, directory: Path) -> tuple[Result, Result]:
    """Snapshots of ``nbytes`` into another node's memory, and back: what both launches found. Raises Mismatch."""
    with _shared_directory() as shared:
        config = Config("replicate", str(directory), str(shared), "", 0, nbytes, repeats)
        sent = _launch(config, len(NODES))
        return sent, _launch(replace(config, mode="recover", expected=sent.hashes), len(NODES))


def _blocking(nbytes: int, repeats: int, work: Path, tell: Step) -> dict[str, Any]:
    """Eager and overlapped snapshots in this process, without replicas."""
    state = BenchState(nbytes)
    eager, floor, floors = measure_eager(state, repeats, work / "eager", tell)
    overlap = measure_overlap(state, repeats, work / "overlap", eager.median, tell)
    calls, waits = overlap["call"], overlap["wait"]
    both = Samples([call + wait for call, wait in zip(calls.seconds, waits.seconds, strict=True)])
    return {
        "ratios": {
            "eager_blocking_vs_copy": eager.median / floor.median,
            "overlap_blocking_vs_copy": both.median / floor.median,
            "eager_blocking_s": eager.median,
            "overlap_blocking_s": both.median,
        },
        "size_bytes": state.nbytes,
        "tensors": len(state.tensors),
        "eager_blocking": eager.summary(state.nbytes),
        "overlap_blocking": both.summary(),
        "overlap_call": calls.summary(),
        "overlap_wait": waits.summary(),
        "copy_floors": {name: samples.summary(state.nbytes) for name, samples in floors.items()},
    }


def _slowdown(train: Result) -> float:
    """The median over the pairs of how much longer the loop with snapshots took."""
    pairs = zip(train.seconds["loop_with_snapshots"], train.seconds["loop_without"], strict=True)
    return Samples([with_them / without - 1 for with_them, without in pairs]).median


def _of_replication(sent: Result) -> dict[str, float]:
    replication = Samples(sent.seconds["replication"]).median
    return {
        "replication_vs_sockets": Samples(sent.seconds["sockets"]).median / replication,
        "replication_vs_gloo": Samples(sent.seconds["gloo"]).median / replication,
        **{name: value for name, value in sent.numbers.items() if name.endswith("cpu_s")},
    }


def _of_recovery(back: Result) -> dict[str, float]:
    copy = best(*(Samples(back.seconds[name]) for name in ("flat_copy", "fused_copy")))
    return {
        "own_arena_recovery_vs_copy": copy.median / Samples(back.seconds["own_arena"]).median,
        "peer_recovery_vs_receive": Samples(back.seconds["receive"]).median
        / Samples(back.seconds["peer"]).median,
    }


def _summaries(*results: Result) -> dict[str, Any]:
    """Every sample that the processes took."""
    found: dict[str, Any] = {}
    for result in results:
        for name, seconds in result.seconds.items():
            nbytes = result.nbytes if not name.startswith(("loop", "step")) else None
            found[name] = Samples(seconds).summary(nbytes)
        found |= {
            f"{result.mode}_{name}": value for name, value in result.numbers.items() if name[-2:] != "_s"
        }
    return found


@contextlib.contextmanager
def _shared_directory() -> Iterator[Path]:
    """Where the simulated nodes have their arenas; their agents are ended and all of it goes."""
    path = SHARED_MEMORY / f"everstep-bench-{secrets.token_hex(6)}"
    path.mkdir(mode=0o700)
    try:
        for node in NODES:
            (path / node).mkdir()
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _launch(config: Config, world: int) -> Result:
    """Run ``world`` ranks, each on a node of its own; what rank 0 found."""
    store = Path(config.directory) / f"store-{config.mode}"
    config = replace(config, store=str(store))
    processes = [_start(replace(config, rank=rank), world) for rank in range(world)]
    try:
        texts = [process.communicate(timeout=LAUNCH_TIMEOUT_S)[1] for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _end_agents(store, world)
    failed = [text for process, text in zip(processes, texts, strict=True) if process.returncode]
    if failed:
        kind = Mismatch if any("Mismatch" in text for text in failed) else RuntimeError
        raise kind(f"{config.mode} failed: {failed[0][-3000:]}")
    return Result(**json.loads(Path(f"{store}.json").read_text()))


def _start(config: Config, world: int) -> subprocess.Popen[str]:
    node = NODES[config.rank]
    runtime = Path(os.environ["EVERSTEP_RUNTIME_DIR"]) / node
    runtime.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "RANK": str(config.rank),
        "WORLD_SIZE": str(world),
        "EVERSTEP_NODE": node,
        "EVERSTEP_RUNTIME_DIR": str(runtime),
        "EVERSTEP_ADDRESS": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "everstep.benchmarks.memory_ranks", json.dumps(asdict(config))],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _end_agents(store: Path, world: int) -> None:
    """The ranks' agents, whose process ids they left: they would linger."""
    from everstep.memory.process import Process

    for rank in range(world):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            agent = Process.of(int(Path(f"{store}.agent-{rank}").read_text()))
            if agent is not None:
                os.kill(agent.pid, signal.SIGKILL)
                agent.wait_dead(DEATH_S)


__all__ = ["replicate_and_recover", "run_memory"]
