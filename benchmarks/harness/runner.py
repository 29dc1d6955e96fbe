"""A whole run: every workload's systems in rounds, the floors around them, and the report of it all.

In a round each system has a worker of its own, one after the other; every other round goes backwards. The floors are
measured at both ends of a round. What fails is told by name, and the others go on.
"""

from __future__ import annotations

import compileall
import datetime
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from ..common import MIB, Step, machine, workspace
from . import results, systems
from .api import System
from .processes import Outcome, launch
from .results import ReportDict, SystemDict, WorkloadDict
from .worker import FLOOR
from .workloads import Workload

LIMIT_S = 900.0
"""For one worker."""
GLOO_RANKS = 2
"""Between which as many bytes as the state has are sent."""
PACKAGES = ("everstep", "torch", "numpy")


@dataclass(frozen=True)
class Options:
    """``systems``: name to ``module:Class``; ``named``: they were asked for by name. ``size_mib``, ``repeats`` (in a
    round) and ``rounds`` None: each workload's own."""

    workloads: Sequence[Workload]
    systems: Mapping[str, str]
    named: bool = False
    size_mib: int | None = None
    directory: Path | None = None
    repeats: int | None = None
    rounds: int | None = None
    limit_s: float = LIMIT_S

    def nbytes(self, workload: Workload) -> int:
        return (self.size_mib or workload.default_mib) * MIB

    def rounds_of(self, workload: Workload) -> int:
        return self.rounds or workload.rounds

    def repeats_of(self, workload: Workload) -> int:
        return self.repeats or workload.repeats


@dataclass
class _Taken:
    """What the rounds gave of one system."""

    works: dict[str, list[float]] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, int] | None = None
    wrong: str = ""


class Run:
    """One run of the harness."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._systems = {name: systems.load(spec) for name, spec in options.systems.items()}
        self._missing = {name: system.missing() for name, system in self._systems.items()}
        self.failed: list[tuple[str, str]] = []
        """Workload and system where a worker crashed, hung or raised, or other bytes came back."""
        self._taking = {workload.name: dict(self._select(workload)) for workload in options.workloads}

    @property
    def workers(self) -> int:
        """How many are started, if none fails."""
        return sum(
            self.options.rounds_of(workload) * (2 + sum(why is None for why in taking.values()))
            for workload in self.options.workloads
            if None in (taking := self._taking[workload.name]).values()
        )

    def _select(self, workload: Workload) -> Iterator[tuple[str, str | None]]:
        """Each system, and why it does not take part (None: it does)."""
        for name, system in self._systems.items():
            why = workload.missing() or self._missing[name] or workload.why_not(system.works)
            if why is None and not (self.options.named or self._by_default(workload, system)):
                why = f"only by --system {name}: it takes long, or others outdo it"
            yield name, why

    @staticmethod
    def _by_default(workload: Workload, system: System) -> bool:
        return system.by_default if workload.by_default is None else system.name in workload.by_default

    def run(self, tell: Step) -> ReportDict:
        """Measure. ``tell`` is called before each worker."""
        load = os.getloadavg()[0]
        begun, started = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
        options = self.options
        compile_everstep()
        with workspace(options.directory) as work:
            found = {}
            for workload in options.workloads:
                directory = work / workload.name
                directory.mkdir()
                found[workload.name] = _Rounds(self, workload, directory, tell).run()
            summary = results.summary(found)
            return {
                "format": results.FORMAT,
                "begun": begun.isoformat(timespec="seconds"),
                "took_s": time.monotonic() - started,
                "machine": {
                    **machine(work),
                    **hardware(work),
                    "load_before": load,
                    "versions": self._versions(),
                },
                "options": {
                    "size_mib": options.size_mib,
                    "repeats": options.repeats,
                    "rounds": options.rounds,
                    "systems": list(self._systems),
                },
                "workloads": found,
                "summary": summary,
                "aims": results.aims(summary),
            }

    def taking(self, workload: Workload) -> dict[str, str | None]:
        return self._taking[workload.name]

    def system(self, name: str) -> System:
        return self._systems[name]

    def _versions(self) -> dict[str, str]:
        packages = {*PACKAGES, *(system.package for system in self._systems.values())} - {""}
        found = {}
        for package in sorted(packages):
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        return found


class _Rounds:
    """All rounds of one workload."""

    def __init__(self, run: Run, workload: Workload, directory: Path, tell: Step) -> None:
        self._run, self._workload, self._directory, self._tell = run, workload, directory, tell
        self._taken: dict[str, _Taken] = {}
        self._floors: dict[str, list[float]] = {}
        self._left_out = {name: why for name, why in run.taking(workload).items() if why is not None}

    def run(self) -> WorkloadDict:
        order = [name for name, why in self._run.taking(self._workload).items() if why is None]
        for turn in range(self._run.options.rounds_of(self._workload) if order else 0):
            self._floor(turn)
            for name in order if turn % 2 == 0 else reversed(order):
                if name not in self._left_out and not (name in self._taken and self._taken[name].wrong):
                    self._system(name, turn)
            self._floor(turn)
        return self._report()

    def _floor(self, turn: int) -> None:
        floors = set(self._workload.floors)
        for ranks in [1] * bool(floors - {"gloo"}) + [GLOO_RANKS] * ("gloo" in floors):
            outcome = self._launch("floor", FLOOR, turn, ranks=ranks)
            if outcome.result is None:
                raise FloorFailed(f"{self._workload.name}: the floors cannot be measured: {outcome.problem}")
            self._add_floors(outcome.result["floors"])

    def _add_floors(self, floors: Mapping[str, list[float]]) -> None:
        for name, seconds in floors.items():
            self._floors.setdefault(name, []).extend(seconds)

    def _system(self, name: str, turn: int) -> None:
        outcome = self._launch(name, self._run.options.systems[name], turn, ranks=self._workload.ranks)
        result = outcome.result
        if result is None:
            self._run.failed.append((self._workload.name, name))
            self._left_out[name] = outcome.problem
            self._taken.pop(name, None)
            return
        taken = self._taken.setdefault(name, _Taken())
        taken.last = result
        taken.memory = result["memory"] or taken.memory
        taken.wrong = result.get("wrong", "")
        if taken.wrong:
            self._run.failed.append((self._workload.name, name))
            return
        for work, seconds in result["works"].items():
            taken.works.setdefault(work, []).extend(seconds)
        self._add_floors(result["floors"])

    def _launch(self, name: str, spec: str, turn: int, *, ranks: int) -> Outcome:
        options, workload = self._run.options, self._workload
        self._tell(f"{workload.name}, round {turn + 1}: {name}")
        directory = self._directory / f"{name}-{turn}"
        directory.mkdir()
        job = {
            "system": spec,
            "workload": workload.name,
            "nbytes": options.nbytes(workload),
            "repeats": options.repeats_of(workload),
            "turn": turn,
            "memory": False,
            "directory": str(directory),
        }
        try:
            outcome = launch(job, ranks, options.limit_s)
            if spec != FLOOR and turn == 0 and workload.memory:
                outcome = self._with_memory(outcome, job, ranks)
            for loaders in workload.loaders if spec != FLOOR else ():
                if outcome.result is None or "wrong" in outcome.result:
                    break
                loaded = launch({**job, "memory": False, "loads_only": True}, loaders, options.limit_s)
                outcome = joined(outcome.result, loaded, loaders)
            return outcome
        finally:
            if spec != FLOOR:
                self._run.system(name).clean(directory)
            remove(directory)

    def _with_memory(self, outcome: Outcome, job: dict[str, Any], ranks: int) -> Outcome:
        """``outcome``, and the memory of another worker, which has nothing left from what was timed."""
        if outcome.result is None or "wrong" in outcome.result:
            return outcome
        looked = launch({**job, "memory": True}, ranks, self._run.options.limit_s)
        if looked.result is None:
            return Outcome(None, f"failed while memory was looked at: {looked.problem}")
        wrong = {"wrong": looked.result["wrong"]} if "wrong" in looked.result else {}
        return Outcome({**outcome.result, **wrong, "memory": looked.result["memory"]})

    def _report(self) -> WorkloadDict:
        lasts = [taken.last for taken in self._taken.values()]
        size = next((last["size_bytes"] for last in lasts), 0)
        return {
            "meaning": self._workload.meaning,
            "size_bytes": size,
            "tensors": next((last["tensors"] for last in lasts), 0),
            "ranks": self._workload.ranks,
            "scale": next((last["scale"] for last in lasts), None),
            "cold_by": next((last["cold_by"] for last in lasts if last["cold_by"]), ""),
            "floors": best_floors(self._floors, size),
            "systems": {name: self._of_system(name, taken, size) for name, taken in self._taken.items()},
            "left_out": self._left_out,
        }

    def _of_system(self, name: str, taken: _Taken, size: int) -> SystemDict:
        system, last = self._run.system(name), taken.last
        works = {} if taken.wrong else taken.works
        return {
            "meaning": system.meaning,
            "version": last["version"],
            "syncs": system.syncs,
            "verifies": system.verifies,
            "works": {
                work: results.samples(seconds, size if moves(work) else None)
                for work, seconds in works.items()
            },
            "numbers": {} if taken.wrong else last["numbers"],
            "memory": None if taken.wrong else taken.memory,  # type: ignore[typeddict-item]
            "checked": taken.wrong or last["checked"],
            "wrong": bool(taken.wrong),
            "notes": list(dict.fromkeys(last["notes"])),
            "timelines": {} if taken.wrong else last["timelines"],
        }


def joined(saved: Mapping[str, Any], loaded: Outcome, ranks: int) -> Outcome:
    """What a worker found, and one of ``ranks`` processes that loaded what it had saved. Size and version are the
    first one's."""
    if loaded.result is None:
        return Outcome(None, f"failed: at {ranks} ranks: {loaded.problem}")
    late = loaded.result
    parts: dict[str, Any] = {name: late[name] for name in ("wrong", "checked", "cold_by") if name in late}
    return Outcome({**saved, **parts, "works": {**saved["works"], **late["works"]}})


class FloorFailed(RuntimeError):
    """What everything is set against could not be measured."""


def compile_everstep() -> None:
    """Everstep's modules as bytecode, as an installer leaves every package: else a process from a source tree, where
    none may be kept (PYTHONDONTWRITEBYTECODE), compiles them anew, and first saves and loads are charged with it."""
    compileall.compile_dir(Path(__file__).absolute().parents[2], quiet=2)


def moves(work: str) -> bool:
    """Whether a work moves the state, so that it has a rate."""
    return work not in results.WORKS or results.WORKS[work].floor is not None


def best_floors(floors: Mapping[str, Sequence[float]], nbytes: int) -> dict[str, results.SamplesDict]:
    """Of the ways of each floor ("write:direct") the one with the least median."""
    found: dict[str, results.SamplesDict] = {}
    for name, seconds in floors.items():
        floor, _, way = name.partition(":")
        one = results.samples(seconds, nbytes, way or None)
        if floor not in found or one["median_s"] < found[floor]["median_s"]:
            found[floor] = one
    return found


def remove(directory: Path) -> None:
    """A worker's directory; with all of its files, whatever their modes."""
    import shutil

    shutil.rmtree(directory, ignore_errors=True)


def hardware(directory: Path) -> dict[str, Any]:
    """Processor and disk, as far as Linux tells."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            cpu = value.strip()
            break
    return {"cpu": cpu, "disk": disk(directory)}


def disk(directory: Path) -> str:
    """Name, kind and size of the block device that ``directory`` lies on; "unknown" where there is none."""
    number = os.stat(directory).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    try:
        sectors = int((device / "size").read_text())
        name = device.resolve().name
        queue = device / "queue" if (device / "queue").exists() else device.resolve().parent / "queue"
        kind = "rotating" if (queue / "rotational").read_text().strip() == "1" else "solid state or virtual"
    except (OSError, ValueError):
        return "unknown"
    return f"{name}, {sectors * 512 / (1 << 30):.0f} GiB, {kind}"


__all__ = ["FloorFailed", "LIMIT_S", "Options", "Run", "best_floors", "compile_everstep", "hardware"]
