"""Two reports side by side: which ratios moved by more than the noise. Pure.

What is compared are ratios to the floor of the same run, so that a faster disk is not taken for a faster engine; works
without a floor are compared as shares of the loop alone, or in seconds. The noise of a ratio follows from the spread of
its samples in both runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .results import WORKS, Found, ReportDict, SamplesDict, SystemDict, WorkloadDict

NOISE_LEAST = 0.05
"""Less than so much is never told: medians of few samples are no better."""
MEMORY_NOISE = 0.15
SLOWDOWN_NOISE_LEAST = 0.01
"""In shares of the loop alone, not relative: a slow-down may be nothing at all."""


@dataclass(frozen=True)
class Move:
    """One ratio of both reports. ``change``: relative (0.2: a fifth more, worse), of the slow-down absolute; ``noise``:
    what it has to exceed."""

    workload: str
    system: str
    work: str
    before: float
    after: float
    change: float
    noise: float

    @property
    def verdict(self) -> str:
        """ "worse", "better" or "same"."""
        if abs(self.change) <= self.noise:
            return "same"
        return "worse" if self.change > 0 else "better"


@dataclass(frozen=True)
class Comparison:
    """``moves``: all that both reports have; ``gone``: what only the first has, or what is wrong or failed in the
    second; ``new``: what only the second has."""

    moves: list[Move]
    gone: list[str]
    new: list[str]

    @property
    def worse(self) -> list[Move]:
        return [move for move in self.moves if move.verdict == "worse"]


def compare(before: ReportDict, after: ReportDict) -> Comparison:
    """What moved from one report to the other."""
    moves: list[Move] = []
    gone: list[str] = []
    new: list[str] = []
    for name, old in before["workloads"].items():
        now = after["workloads"].get(name)
        if now is None:
            gone += [f"{name}, {system}: not in the second report" for system in old["systems"]]
            continue
        for system, was in old["systems"].items():
            if system not in now["systems"]:
                why = now["left_out"].get(system, "not in the second report")
                gone.append(f"{name}, {system}: {why}")
            elif now["systems"][system]["wrong"] and not was["wrong"]:
                gone.append(f"{name}, {system}: {now['systems'][system]['checked']}")
            else:
                moves += _of_system(name, system, old, now)
        new += [f"{name}, {system}" for system in now["systems"] if system not in old["systems"]]
    new += [name for name in after["workloads"] if name not in before["workloads"]]
    return Comparison(moves, gone, new)


def _of_system(workload: str, system: str, old: WorkloadDict, now: WorkloadDict) -> Iterator[Move]:
    was, became = old["systems"][system], now["systems"][system]
    for work in was["works"]:
        if work in became["works"] and not work.startswith("loop"):
            yield _move(workload, system, work, old, now)
    slow = [Found({"training": one}).slowdown(system) for one in (old, now)]
    if slow[0] is not None and slow[1] is not None:
        noise = math.hypot(_pair_spread(was), _pair_spread(became))
        change = slow[1] - slow[0]
        yield Move(workload, system, "slowdown", slow[0], slow[1], change, max(noise, SLOWDOWN_NOISE_LEAST))
    if was["memory"] and became["memory"]:
        a, b = (max(one["peak_beyond_copy_bytes"], 1 << 20) for one in (was["memory"], became["memory"]))
        yield Move(workload, system, "peak_memory", float(a), float(b), b / a - 1, MEMORY_NOISE)


def _move(workload: str, system: str, work: str, old: WorkloadDict, now: WorkloadDict) -> Move:
    ratios, spreads = [], []
    floor = WORKS[work].floor if work in WORKS else None
    both = floor is not None and floor in old["floors"] and floor in now["floors"]
    for one in (old, now):
        samples = one["systems"][system]["works"][work]
        ratio = samples["median_s"]
        spreads.append(spread(samples))
        if both and floor is not None:
            ratio /= max(one["floors"][floor]["median_s"], 1e-9)
            spreads.append(spread(one["floors"][floor]))
        ratios.append(ratio)
    change = ratios[1] / max(ratios[0], 1e-9) - 1
    noise = max(NOISE_LEAST, math.hypot(*spreads))
    return Move(workload, system, work, ratios[0], ratios[1], change, noise)


def spread(samples: SamplesDict) -> float:
    """How far a median of these samples may be off, relative: half the range of the middle half; of all where
    there are fewer than four."""
    seconds = sorted(samples["samples_s"])
    if len(seconds) < 4:
        low, high = seconds[0], seconds[-1]
    else:
        quarter = len(seconds) // 4
        low, high = seconds[quarter], seconds[-1 - quarter]
    return (high - low) / 2 / max(samples["median_s"], 1e-9)


def _pair_spread(system: SystemDict) -> float:
    """The same of the slow-downs of the pairs, absolute."""
    works = system["works"]
    pairs = sorted(
        a / b for a, b in zip(works["loop"]["samples_s"], works["loop_alone"]["samples_s"], strict=True)
    )
    quarter = len(pairs) // 4 if len(pairs) >= 4 else 0
    return (pairs[-1 - quarter] - pairs[quarter]) / 2


__all__ = ["Comparison", "Move", "compare", "spread"]
