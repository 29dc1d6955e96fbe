"""The report: its shape, medians and ratios, the summary and its aims. Pure: numbers in, numbers out.

What is measured of a system in a workload is a *work*; its seconds are set against the *floor* of the same run. Every
number of the summary is a *cell*; one whose parts were not measured is left out.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import msgspec

FORMAT = 1
OURS = "everstep"
OVERLAP = "everstep-overlap"
MAIN = "gpt-fp32"
"""The workload of the summary's cells of saves and loads."""
PHASES = ("snapshot", "replicate", "flush", "commit", "load", "reserve")
"""Of the time lines of a save (the first four) and of a recovery."""
MIB = 1 << 20
LEAST_MEMORY_BYTES = MIB
"""A rival that takes less is counted with so much: a ratio to nothing says nothing."""


class Work(NamedTuple):
    """One thing that is timed. ``floor``: what its times are set against, None if nothing."""

    meaning: str
    floor: str | None


WORKS: dict[str, Work] = {
    "open": Work("opening the engine, before the first save", None),
    "first_blocking": Work("how long the first save of a process stops the training", "copy"),
    "first_durable": Work("first save, from the call to written", "write"),
    "blocking": Work("how long a save stops the training (call, and what the optimizer waits)", "copy"),
    "blocking_alone": Work("the same with nothing computed that could hide a copy", "copy"),
    "durable": Work("from the call to written, as the system says", "write"),
    "durable_synced": Work("from the call to written and synced to disk", "write"),
    "cold_load": Work("load into existing tensors, page cache dropped", "read"),
    "first_memory_recovery": Work("the first load of a process from own memory", "copy"),
    "memory_recovery": Work("load from own memory after the death of the process", "copy"),
    "peer_recovery": Work("load from another node's memory", "gloo"),
    "replicate": Work("from the call's return to protected by another node's memory", "gloo"),
    "disk_recovery": Work("load from disk after the death of the process", "read"),
    "load_at_2": Work("cold load by 2 ranks", "read"),
    "load_at_8": Work("cold load by 8 ranks", "read"),
    "device_recovery": Work("back to the newest snapshot in the devices' memory", "device_copy"),
    "full_durable": Work("a full, from the call to written", "write"),
    "delta_durable": Work("a delta, from the call to written", "write"),
    "delta_load": Work("load of a delta and its base, page cache dropped", "read"),
    "first_s3_save": Work("first save into a store, from the call to written", "s3_put"),
    "s3_save": Work("save into a store, from the call to written", "s3_put"),
    "s3_load": Work("load from a store into existing tensors", "s3_get"),
    "loop": Work("a training loop with a snapshot every step", None),
    "loop_alone": Work("the same loop without", None),
}
"""Known works; a workload may have further ones (``load_at_3``)."""

FLOORS: dict[str, str] = {
    "copy": "a multi-threaded copy into memory that was touched before",
    "copy_fresh": "the same into fresh memory",
    "device_copy": "a copy within the devices' memory",
    "write": "a raw write and fsync",
    "read": "a raw cold read",
    "gloo": "a raw send over gloo",
    "s3_put": "raw puts into the object store",
    "s3_get": "raw gets from it",
}


class SamplesDict(TypedDict, total=False):
    """Seconds of one work or floor. ``way``: which of several ways was the best, of a floor."""

    median_s: float
    min_s: float
    max_s: float
    samples_s: list[float]
    bytes_per_s: float
    way: str


class PhaseDict(TypedDict):
    phase: str
    begin_s: float
    end_s: float


class MemoryDict(TypedDict):
    """``peak_extra_bytes``: of all of the system's processes beyond what the process had with its state alone.
    ``peak_beyond_copy_bytes``: the same without everstep's slots, or without the one copy of the state that others
    stage which go on writing when the call has returned. Whoever writes in the call has no use for a copy."""

    peak_extra_bytes: int
    peak_beyond_copy_bytes: int


class SystemDict(TypedDict):
    meaning: str
    version: str
    syncs: bool
    verifies: bool
    works: dict[str, SamplesDict]
    numbers: dict[str, float]
    """What is no time: ``delta_bytes_over_full``."""
    memory: MemoryDict | None
    checked: str
    """"equal, bit for bit", or what was wrong: then ``works`` is empty."""
    wrong: bool
    notes: list[str]
    timelines: dict[str, list[PhaseDict]]


class WorkloadDict(TypedDict):
    meaning: str
    size_bytes: int
    tensors: int
    ranks: int
    scale: dict[str, Any] | None
    cold_by: str
    floors: dict[str, SamplesDict]
    systems: dict[str, SystemDict]
    left_out: dict[str, str]


class AimDict(TypedDict):
    cell: str
    aim: float
    strict: bool
    value: float
    met: bool


class ReportDict(TypedDict):
    format: int
    begun: str
    took_s: float
    machine: dict[str, Any]
    options: dict[str, Any]
    workloads: dict[str, WorkloadDict]
    summary: dict[str, float]
    aims: list[AimDict]


class NotAReport(ValueError):
    """A file that is not a report of this format."""


def samples(seconds: Sequence[float], nbytes: int | None = None, way: str | None = None) -> SamplesDict:
    """Median, least and greatest of ``seconds`` (not empty), and all of them; the median rate if ``nbytes``."""
    found: SamplesDict = {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "samples_s": list(seconds),
    }
    if nbytes is not None:
        found["bytes_per_s"] = nbytes / max(found["median_s"], 1e-9)
    if way is not None:
        found["way"] = way
    return found


def read(path: Path) -> ReportDict:
    """The report in ``path``. Raises NotAReport, also where something is missing or of another type; OSError."""
    try:
        report = json.loads(path.read_text())
    except ValueError as error:
        raise NotAReport(f"{path} is not JSON: {error}") from None
    if not isinstance(report, dict) or report.get("format") != FORMAT or "workloads" not in report:
        found = report.get("format") if isinstance(report, dict) else type(report).__name__
        raise NotAReport(f"{path} is no report of format {FORMAT} of `everstep bench run` (found: {found!r})")
    try:
        return msgspec.convert(report, ReportDict)
    except msgspec.ValidationError as error:
        raise NotAReport(f"{path} is no whole report of `everstep bench run`: {error}") from None


def is_rival(system: str) -> bool:
    """Whether ``system`` is not everstep in any mode."""
    return family(system) != OURS


def family(system: str) -> str:
    """The engine's name: "dcp" of "dcp-async-process"."""
    return system.partition("-")[0]


class Found:
    """Medians of a report's workloads, None where something was not measured."""

    def __init__(self, workloads: Mapping[str, WorkloadDict]) -> None:
        self._workloads = workloads

    def floor(self, workload: str, name: str) -> float | None:
        """Median seconds of a floor."""
        one = self._workloads.get(workload)
        return one["floors"][name]["median_s"] if one and name in one["floors"] else None

    def work(self, workload: str, system: str, work: str) -> float | None:
        """Median seconds of a system's work."""
        one = self._workloads.get(workload)
        if one is None or system not in one["systems"]:
            return None
        works = one["systems"][system]["works"]
        return works[work]["median_s"] if work in works else None

    def systems(self, workload: str, wanted: Callable[[str], bool]) -> list[str]:
        """The systems that were measured there and are ``wanted``."""
        one = self._workloads.get(workload)
        return [name for name in one["systems"] if wanted(name)] if one else []

    def best(self, workload: str, work: str, wanted: Callable[[str], bool] = is_rival) -> str | None:
        """The name of the ``wanted`` system with the least median."""
        times = [
            (seconds, name)
            for name in self.systems(workload, wanted)
            if (seconds := self.work(workload, name, work)) is not None
        ]
        return min(times)[1] if times else None

    def slowdown(self, system: str, workload: str = "training") -> float | None:
        """Median over the pairs of how much longer the loop with snapshots took (0.01: a hundredth)."""
        one = self._workloads.get(workload)
        if one is None or system not in one["systems"]:
            return None
        works = one["systems"][system]["works"]
        if "loop" not in works or "loop_alone" not in works:
            return None
        pairs = zip(works["loop"]["samples_s"], works["loop_alone"]["samples_s"], strict=True)
        return statistics.median(with_them / without - 1 for with_them, without in pairs)

    def memory(self, system: str, workload: str = MAIN) -> float | None:
        """``peak_beyond_copy_bytes``."""
        one = self._workloads.get(workload)
        if one is None or system not in one["systems"]:
            return None
        memory = one["systems"][system]["memory"]
        return float(memory["peak_beyond_copy_bytes"]) if memory else None

    def against_floor(self, workload: str, system: str, work: str) -> float | None:
        """A work's median over that of its floor."""
        floor = WORKS[work].floor if work in WORKS else None
        return (
            None if floor is None else ratio(self.work(workload, system, work), self.floor(workload, floor))
        )

    def against_best(
        self, workload: str, system: str, work: str, wanted: Callable[[str], bool] = is_rival
    ) -> float | None:
        """A work's median over the least of the ``wanted`` systems'."""
        best = self.best(workload, work, wanted)
        return (
            None
            if best is None
            else ratio(self.work(workload, system, work), self.work(workload, best, work))
        )


def ratio(above: float | None, below: float | None) -> float | None:
    """``above / below``; None if one is missing or there is nothing to divide by."""
    return None if above is None or below is None or below <= 0 else above / below


def is_dcp(system: str) -> bool:
    return family(system) == "dcp"


def is_dcp_async(system: str) -> bool:
    return system == "dcp-async" or system.startswith("dcp-async-")


@dataclass(frozen=True)
class Cell:
    """One number of the summary. ``aim``: at most (``strict``: less than) that, None if there is no aim."""

    name: str
    meaning: str
    aim: float | None
    of: Callable[[Found], float | None]
    strict: bool = False

    def met(self, value: float) -> bool:
        return self.aim is None or (value < self.aim if self.strict else value <= self.aim)


def _first_vs_dcp(found: Found) -> float | None:
    best = found.best(MAIN, "blocking_alone", is_dcp_async)
    if best is None:
        return None
    return ratio(found.work(MAIN, OURS, "first_blocking"), found.work(MAIN, best, "first_blocking"))


def _slowdown(found: Found) -> float | None:
    ours = found.systems("training", lambda name: not is_rival(name))
    return least(found.slowdown(name) for name in ours)


def _slowdown_vs_dcp(found: Found) -> float | None:
    ours, theirs = (
        _slowdown(found),
        least(found.slowdown(name) for name in found.systems("training", is_dcp_async)),
    )
    return ratio(None if ours is None else max(ours, 0.0), theirs)


def _memory_mib(found: Found) -> float | None:
    ours = found.memory(OURS)
    return None if ours is None else ours / MIB


def _memory_vs_best_rival(found: Found) -> float | None:
    theirs = least(found.memory(name) for name in found.systems(MAIN, is_rival))
    return ratio(found.memory(OURS), None if theirs is None else max(theirs, LEAST_MEMORY_BYTES))


def _larger(first: Callable[[Found], float | None], second: Callable[[Found], float | None]) -> Any:
    def larger(found: Found) -> float | None:
        both = first(found), second(found)
        return None if None in both else max(x for x in both if x is not None)

    return larger


def least(values: Iterable[float | None]) -> float | None:
    """The least of what is not None."""
    return min((value for value in values if value is not None), default=None)


def _vs_floor(work: str, system: str = OURS, workload: str = MAIN) -> Callable[[Found], float | None]:
    return lambda found: found.against_floor(workload, system, work)


def _vs_best(
    work: str, system: str = OURS, workload: str = MAIN, wanted: Callable[[str], bool] = is_rival
) -> Callable[[Found], float | None]:
    return lambda found: found.against_best(workload, system, work, wanted)


def _small(prefix: str, workload: str) -> list[Cell]:
    def is_save(name: str) -> bool:
        return is_dcp(name) and not is_dcp_async(name)

    save = _vs_best("blocking_alone", OURS, workload, is_save)
    load = _vs_best("cold_load", OURS, workload, is_dcp)
    return [
        Cell(f"{prefix}_save_vs_dcp", f"the call of a save over DCP save's ({workload})", 0.2, save),
        Cell(f"{prefix}_load_vs_dcp", f"a cold load over DCP's ({workload})", 0.2, load),
        Cell(f"{prefix}_vs_dcp", f"the larger of these two ({workload})", 0.2, _larger(save, load)),
        Cell(
            f"{prefix}_save_vs_dcp_async",
            f"the call of a save over that of DCP async's best mode ({workload})",
            None,
            _vs_best("blocking_alone", OURS, workload, is_dcp_async),
        ),
    ]


CELLS: tuple[Cell, ...] = (
    Cell("eager_blocking_vs_floor", "a save's call over a copy", 1.05, _vs_floor("blocking_alone")),
    Cell(
        "eager_blocking_vs_best_rival",
        "a save's call over the best rival's, nothing computed meanwhile",
        1.0,
        _vs_best("blocking_alone"),
    ),
    Cell(
        "eager_blocking_vs_dcp",
        "a save's call over that of DCP async's best mode",
        0.65,
        _vs_best("blocking_alone", wanted=is_dcp_async),
    ),
    Cell(
        "eager_first_vs_dcp", "the first save's call over that of DCP async's best mode", 0.1, _first_vs_dcp
    ),
    Cell(
        "overlap_blocking_vs_floor",
        "call and hook wait of an overlapped save over a copy",
        0.05,
        _vs_floor("blocking", OVERLAP),
    ),
    Cell(
        "overlap_blocking_vs_best_rival",
        "call and hook wait of an overlapped save over the best rival's",
        0.1,
        _vs_best("blocking", OVERLAP),
    ),
    Cell("durable_vs_floor", "from the call to durable over a raw write", 1.05, _vs_floor("durable_synced")),
    Cell(
        "durable_vs_best_rival",
        "from the call to durable over the best rival's, sync added",
        1.0,
        _vs_best("durable_synced"),
        strict=True,
    ),
    Cell("cold_load_vs_floor", "a cold, verified load over a raw cold read", 1.10, _vs_floor("cold_load")),
    Cell(
        "cold_load_vs_best_rival",
        "a cold, verified load over the best rival's",
        1.0,
        _vs_best("cold_load"),
        strict=True,
    ),
    Cell(
        "memory_recovery_vs_floor",
        "a verified load from own memory over a copy (recovery)",
        1.25,
        _vs_floor("memory_recovery", workload="recovery"),
    ),
    *_small("small_tensors", "small-10k"),
    *_small("small_tensors_100k", "small-100k"),
    Cell("training_slowdown", "how much longer a training step takes with a snapshot each", 0.03, _slowdown),
    Cell(
        "training_slowdown_vs_dcp",
        "slow-down of training over that by DCP async's best mode",
        1 / 3,
        _slowdown_vs_dcp,
    ),
    Cell("peak_memory_mib", "MiB beyond state and slots", 128.0, _memory_mib),
    Cell(
        "peak_memory_vs_best_rival",
        "memory beyond state and slots over the least of a rival's",
        1.0,
        _memory_vs_best_rival,
        strict=True,
    ),
    Cell(
        "first_save_vs_later",
        "the first save's call over a later one's",
        1.5,
        lambda found: ratio(
            found.work(MAIN, OURS, "first_blocking"), found.work(MAIN, OURS, "blocking_alone")
        ),
    ),
)


def summary(workloads: Mapping[str, WorkloadDict]) -> dict[str, float]:
    """All cells whose parts were measured, by name."""
    found = Found(workloads)
    values = ((cell.name, cell.of(found)) for cell in CELLS)
    return {name: value for name, value in values if value is not None}


def aims(cells: Mapping[str, float]) -> list[AimDict]:
    """What was aimed at and reached, of the cells that are there."""
    return [
        {
            "cell": cell.name,
            "aim": cell.aim,
            "strict": cell.strict,
            "value": cells[cell.name],
            "met": cell.met(cells[cell.name]),
        }
        for cell in CELLS
        if cell.aim is not None and cell.name in cells
    ]


__all__ = [
    "CELLS",
    "FLOORS",
    "FORMAT",
    "PHASES",
    "WORKS",
    "Cell",
    "Found",
    "NotAReport",
    "ReportDict",
    "SamplesDict",
    "SystemDict",
    "Work",
    "WorkloadDict",
    "aims",
    "family",
    "is_rival",
    "ratio",
    "read",
    "samples",
    "summary",
]
