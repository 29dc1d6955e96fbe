"""everstep's backend for torch.distributed.checkpoint, and its own Checkpointer, against torch's file system writer.

All three save the same sharded tensors from the same ranks, in turn, durably; what comes back is compared before
anything counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .common import MIB, Mismatch, Samples, Step, machine, workspace
from .dcp_ranks import WAYS, Config, shapes

SAVE_RANKS = 4
LOAD_RANKS = (4, 2, 8)
SMALL_TENSORS = 10_000
WORKLOADS = ("large", "small")
STAGES = len(WORKLOADS) * (1 + len(LOAD_RANKS))
LAUNCH_TIMEOUT_S = 3600.0


def run_dcp(
    size_mib: int,
    repeats: int,
    directory: Path | None,
    tell: Step,
    *,
    small_tensors: int = SMALL_TENSORS,
) -> dict[str, Any]:
    """All measurements of ``bench dcp``; times in seconds, of the slowest rank. Raises Mismatch where bytes come back
    changed."""
    with workspace(directory) as work:
        job = _Job(work, size_mib * MIB, small_tensors, repeats)
        found: dict[str, Any] = {}
        ratios: dict[str, float] = {}
        for workload in WORKLOADS:
            prefix = "" if workload == "large" else "small_"
            tell(f"{workload}: saving from {SAVE_RANKS} ranks")
            samples = job.launch("save", workload, SAVE_RANKS)
            for world in LOAD_RANKS:
                tell(f"{workload}: loading at {world} ranks")
                loads = job.launch("load", workload, world)
                samples |= {f"{name}_{world}": times for name, times in loads.items()}
            medians = {name: Samples(times).median for name, times in samples.items()}
            for name in ("blocking", "durable", *(f"load_{world}" for world in LOAD_RANKS)):
                for way in WAYS[1:]:
                    ratios[f"{prefix}{way}_{name}_vs_stock"] = (
                        medians[f"{way}_{name}"] / medians[f"stock_{name}"]
                    )
            size = sum(rows * columns * 4 for rows, columns in job.shapes(workload))
            found |= {f"{prefix}{name}": Samples(times).summary(size) for name, times in samples.items()}
        return {
            "benchmark": "dcp",
            **ratios,
            "size_bytes": sum(rows * columns * 4 for rows, columns in job.shapes("large")),
            "tensors": len(job.shapes("large")),
            "small_tensors": small_tensors,
            "save_ranks": SAVE_RANKS,
            "repeats": repeats,
            **found,
            "cold_by": "dropped before every load",
            "checked": "every load was compared; every tensor equal, bit for bit",
            "machine": machine(work),
        }


@dataclass(frozen=True)
class _Job:
    """What all launches share."""

    work: Path
    nbytes: int
    small_tensors: int
    repeats: int

    def shapes(self, workload: str) -> list[tuple[int, int]]:
        return shapes(workload, self.nbytes, self.small_tensors)

    def launch(self, mode: str, workload: str, world: int) -> dict[str, list[float]]:
        """Run ``world`` ranks; rank 0's samples."""
        store = str(self.work / f"{mode}-{workload}-{world}")
        processes = [self._start(mode, workload, store, rank, world) for rank in range(world)]
        try:
            texts = [process.communicate(timeout=LAUNCH_TIMEOUT_S)[1] for process in processes]
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        failed = [text for process, text in zip(processes, texts, strict=True) if process.returncode]
        if failed:
            kind = Mismatch if any("Mismatch" in text for text in failed) else RuntimeError
            raise kind(f"{mode} ({workload}, {world} ranks) failed: {failed[0][-2000:]}")
        samples: dict[str, list[float]] = json.loads(Path(f"{store}.json").read_text())
        return samples

    def _start(self, mode: str, workload: str, store: str, rank: int, world: int) -> subprocess.Popen[str]:
        config = Config(
            mode, workload, str(self.work), store, rank, world, self.nbytes, self.small_tensors, self.repeats
        )
        return subprocess.Popen(
            [sys.executable, "-m", "everstep.benchmarks.dcp_ranks", json.dumps(asdict(config))],
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(world)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


__all__ = ["run_dcp"]
