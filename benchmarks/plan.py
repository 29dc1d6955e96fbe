"""What planning and committing cost in a job of many ranks, by simulation.

Nothing is trained and no image is written; the layouts are those that such ranks make, votes and gathers lie in a
directory as agents leave them, and what reads, checks and commits them is the engine itself, in a process of its
own whose memory is measured.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from everstep.format import names

from .common import MIB, Mismatch, machine, workspace
from .simulated import REPLICATED, Job, Written, backend_of, check_simulation, owners_of, write_run

STEP = 100
COMMITS = 3
"""Commits with known layouts, of which the median counts."""
RANK_PLANS = 5
CHILD_TIMEOUT_S = 1800.0
GIB = 1 << 30

NOTES = (
    "simulated: one process makes the layouts and votes of all ranks; those of some ranks are checked to be "
    "byte-equal to what planning makes there",
    "planning_s: one rank's owners, layout and encoding, then the committing agent's reading of all ranks' layouts "
    "from files (warm cache), proof by hash, and check of coverage (coordinator: check_s; its processor time, which "
    "other load hardly touches, is check_cpu_s)",
    "steady_commit_s: a whole commit with known layouts: listing, gathered votes of 8 ranks each from files, "
    "agreement, manifest built, encoded and made durable; steady_in_memory_s: the same without storage",
    "not simulated: images, networks, object stores, agents that wait for each other",
)

Tell = Callable[[str], None]


def run_plan(worlds: Sequence[int], entries: int, directory: Path | None, tell: Tell) -> dict[str, Any]:
    """Measure every world of ``worlds`` (ascending); the headline is the largest one's."""
    growth = []
    with workspace(directory) as here:
        for world in worlds:
            tell(f"{world} ranks")
            growth.append(_measure(here / str(world), world, entries))
        where = machine(here)
    last = growth[-1]
    least = growth[0]
    return {
        "benchmark": "plan",
        "ranks": worlds[-1],
        "entries": entries + REPLICATED,
        "planning_s": last["planning_s"],
        "peak_rss_gib": last["coordinator"]["peak_rss_gib"],
        "steady_commit_s": last["steady_commit_s"],
        "steady_in_memory_s": last["steady_in_memory_s"],
        "manifest_mib": last["manifest_mib"],
        "coordinator": last["coordinator"],
        "rank": last["rank"],
        "growth": growth,
        "growth_in_ranks": worlds[-1] / worlds[0],
        "growth_in_check_s": last["coordinator"]["check_s"] / least["coordinator"]["check_s"],
        "machine": where,
        "notes": list(NOTES),
        "checked": "layouts of some ranks equal those of real planning; each commit was a manifest of all ranks",
    }


def _measure(root: Path, world: int, entries: int) -> dict[str, Any]:
    job = Job(world, entries)
    check_simulation(job, sorted({0, 1, world // 2, world - 1}))
    root.mkdir()
    written = write_run(root, job, STEP)
    del job
    rank = _child("rank", root, world, entries)
    found = _child("coordinator", root, world, entries)
    return _figures(world, written, rank, found)


def _figures(world: int, written: Written, rank: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    return {
        "ranks": world,
        "planning_s": rank["plan_s"] + found["check_s"],
        "steady_commit_s": found["steady_commit_s"],
        "steady_in_memory_s": found["steady_in_memory_s"],
        "manifest_mib": found["manifest_bytes"] / MIB,
        "coordinator": {
            "check_s": found["check_s"],
            "check_cpu_s": found["check_cpu_s"],
            "first_commit_s": found["first_commit_s"],
            "steady_commit_cpu_s": found["steady_commit_cpu_s"],
            "read_bytes": written.layouts_bytes,
            "peak_rss_gib": found["peak_rss_bytes"] / GIB,
            "rss_before_gib": found["rss_before_bytes"] / GIB,
        },
        "rank": {
            "plan_s": rank["plan_s"],
            "layout_bytes": written.canonical_bytes,
            "stored_layout_bytes": written.layouts_bytes // world,
            "vote_bytes": written.votes_bytes // world,
            "extra_mib": rank["extra_bytes"] / MIB,
        },
    }


def _child(what: str, root: Path, world: int, entries: int) -> dict[str, Any]:
    """Measure in a fresh process, whose peak of memory is that of what is measured."""
    command = [sys.executable, "-m", "everstep.benchmarks.plan", what, str(root), str(world), str(entries)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S)
    if said.returncode:
        raise Mismatch(f"the measuring process failed: {said.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(said.stdout)
    return found


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def measure_rank(world: int, entries: int) -> dict[str, Any]:
    """What one rank does when its structure is new: owners of what is replicated, places, canonical bytes."""
    import tracemalloc

    from everstep.format.layout import build_layout, compress, encode, layout_hash

    job = Job(world, entries)
    specs = job.specs(world // 2)

    def plan() -> None:
        owners_of(job.tensors, world)
        encoded = encode(build_layout(specs))
        layout_hash(encoded)
        compress(encoded)

    seconds = []
    for _ in range(RANK_PLANS):
        begun = time.perf_counter()
        plan()
        seconds.append(time.perf_counter() - begun)
    tracemalloc.start()
    plan()
    return {"plan_s": statistics.median(seconds), "extra_bytes": tracemalloc.get_traced_memory()[1]}


async def measure_coordinator(root: Path, world: int) -> dict[str, Any]:
    """What the agent does that commits: first with layouts that it has not met, then with known ones."""
    from everstep.format.manifest import Manifest
    from everstep.store.catalog import voted
    from everstep.store.commit import try_commit
    from everstep.store.votes import check_layouts, read_headers

    backend = backend_of(root)
    place = STEP, 1, 1
    before = _peak()
    headers = await read_headers(backend, *place, *await voted(backend, *place))
    begun, cpu = time.perf_counter(), time.process_time()
    await check_layouts(backend, [header.layout_hash for header in headers])
    check_s, check_cpu_s = time.perf_counter() - begun, time.process_time() - cpu
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    decision = root / names.decision(*place)
    nbytes = 0
    for _ in range(1 + COMMITS):
        begun, cpu = time.perf_counter(), time.process_time()
        committed = await try_commit(backend, *place, world)
        seconds.append(time.perf_counter() - begun)
        cpu_seconds.append(time.process_time() - cpu)
        if not isinstance(committed, Manifest) or len(committed.ranks) != world:
            raise Mismatch(f"no manifest of {world} ranks: {committed}"[:500])
        nbytes = decision.stat().st_size
        decision.unlink()
    in_memory = [await _in_memory(root, world) for _ in range(COMMITS)]
    return {
        "check_s": check_s,
        "check_cpu_s": check_cpu_s,
        "first_commit_s": seconds[0],
        "steady_commit_s": statistics.median(seconds[1:]),
        "steady_commit_cpu_s": statistics.median(cpu_seconds[1:]),
        "steady_in_memory_s": statistics.median(in_memory),
        "manifest_bytes": nbytes,
        "rss_before_bytes": before,
        "peak_rss_bytes": _peak(),
    }


async def _in_memory(root: Path, world: int) -> float:
    """Seconds from all votes' headers, as bytes in memory, to the manifest's bytes."""
    from everstep.format.manifest import encode_decision
    from everstep.format.vote import HEADER_BYTES, decode_header, decode_vote
    from everstep.store.commit import make_manifest, objection_to

    told = [names.vote(STEP, 1, 1, rank) for rank in range(world)]
    data = [_beginning(root / name, HEADER_BYTES) for name in told]
    whole = (root / told[0]).read_bytes()
    backend = backend_of(root)
    begun = time.perf_counter()
    headers = [decode_header(one, name) for one, name in zip(data, told, strict=True)]
    if await objection_to(backend, headers, world) is not None:
        raise Mismatch("the votes do not agree")
    encode_decision(make_manifest(decode_vote(whole, told[0]), headers, "shared"))
    return time.perf_counter() - begun


def _beginning(path: Path, nbytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(nbytes)


def main(what: str, root: str, world: str, entries: str) -> None:
    if what == "rank":
        found = measure_rank(int(world), int(entries))
    else:
        found = asyncio.run(measure_coordinator(Path(root), int(world)))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
