"""The hand-made report that the tests look at."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

from everstep.benchmarks.harness.results import ReportDict, SamplesDict, samples

EXAMPLE = Path(__file__).with_name("example_report.json")


@functools.cache
def _read() -> ReportDict:
    report: ReportDict = json.loads(EXAMPLE.read_text())
    return report


def example() -> ReportDict:
    """A copy, to be changed at will."""
    return copy.deepcopy(_read())


def scaled(one: SamplesDict, factor: float) -> SamplesDict:
    """The same samples, all of them ``factor`` times as long."""
    return samples([factor * seconds for seconds in one["samples_s"]])
