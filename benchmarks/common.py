"""What the benchmarks share: samples, the machine, cold caches."""

from __future__ import annotations

import os
import platform
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.memory.directory import arena_dir, clean
from everstep.memory.process import Process
from everstep.places import locate

MIB = 1 << 20
AGENT_DEATH_S = 10.0

Step = Callable[[str], None]
"""Told what is being measured next (a progress bar's business)."""


@dataclass
class Samples:
    """Seconds of one thing, measured several times."""

    seconds: list[float] = field(default_factory=list)

    def time(self, work: Callable[..., Any], *args: Any) -> None:
        """Run ``work(*args)`` once more and keep how long it took."""
        begun = time.perf_counter()
        work(*args)
        self.seconds.append(time.perf_counter() - begun)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def summary(self, nbytes: int | None = None) -> dict[str, float]:
        """Median, least and greatest, in seconds; with ``nbytes`` also the median rate in bytes per
        second."""
        found = {"median_s": self.median, "min_s": min(self.seconds), "max_s": max(self.seconds)}
        if nbytes is not None:
            found["bytes_per_s"] = nbytes / self.median
        return found


def in_turn(turn: int, measured: Sequence[Callable[[], Any]]) -> None:
    """Call all of ``measured``, in every other turn backwards: none always comes first."""
    for measure in measured if turn % 2 == 0 else reversed(measured):
        measure()


def best(*floors: Samples) -> Samples:
    """The floor with the least median."""
    return min(floors, key=lambda samples: samples.median)


class Mismatch(AssertionError):
    """What came back is not what was given: the measurement does not count."""


def machine(directory: Path) -> dict[str, Any]:
    """The machine that the numbers belong to."""
    import torch

    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "kernel": platform.release(),
        "file_system": file_system(directory),
        "directory": str(directory),
    }


def file_system(directory: Path) -> str:
    """Type and device of the file system that holds ``directory``."""
    path = directory.resolve()
    best_mount, found = Path(), "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, mount_text, kind = line.split()[:3]
        mount = Path(mount_text.encode().decode("unicode_escape"))
        if path.is_relative_to(mount) and len(mount.parts) >= len(best_mount.parts):
            best_mount, found = mount, f"{kind} on {device}"
    return found


def drop_caches(files: Iterable[Path]) -> str:
    """Make reads of ``files`` cold: what was done, for the report."""
    for path in files:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    try:
        with open("/proc/sys/vm/drop_caches", "w") as control:
            control.write("1\n")
    except OSError as error:
        why = f"/proc/sys/vm/drop_caches could not be written: {error.strerror}"
        return f"posix_fadvise(DONTNEED) on each file only; {why}"
    return "posix_fadvise(DONTNEED) on each file, and /proc/sys/vm/drop_caches"


def end_agent(pid: int | None) -> None:
    """End a run's agent, which would linger."""
    agent = Process.of(pid) if pid is not None else None
    if agent is not None and agent != Process.current():
        with suppress(ProcessLookupError):
            os.kill(agent.pid, signal.SIGKILL)
        agent.wait_dead(AGENT_DEATH_S)


def end_run(root: Path | str, agent_pid: int | None) -> None:
    """End the agent of a run that is over and give the run's memory back."""
    end_agent(agent_pid)
    free_memory(locate(root).run_key)


def free_memory(run_key: str) -> None:
    """Remove the arenas of a run whose processes are gone."""
    arenas = arena_dir(Path("/dev/shm"), run_key)
    clean(arenas, keep=lambda info: False)
    with suppress(OSError):
        arenas.rmdir()


@contextmanager
def workspace(directory: Path | None) -> Iterator[Path]:
    """A fresh directory below ``directory`` (the current one, if None), removed afterwards; the agents' own
    directory is a temporary one meanwhile."""
    with (
        tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=directory or Path.cwd()) as name,
        tempfile.TemporaryDirectory(prefix="everstep-bench-", dir="/var/tmp") as runtime,
        environment({"EVERSTEP_RUNTIME_DIR": runtime}),
    ):
        yield Path(name)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """These variables while the block runs, then what was there before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
