"""The rules of retention on a run that lies there: metrics and times are those of its manifests."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from everstep.backends.files import LocalBackend
from everstep.format import names
from everstep.format.manifest import encode_decision
from everstep.plan.retention import Retention

from . import kit

LOSSES = [math.nan, 2.0, -math.inf, 1.0, math.inf, 1.0, 3.0, 4.0]
MINUTES = [0, 4, 10, 13, 25, 5, 26, 36]
"""By step, when it was committed; the clock of whoever committed the sixth is twenty minutes late."""


@pytest.mark.parametrize(
    ("retention", "stay"),
    [
        (Retention(1, keep_best=1, best="min:loss"), {6, 8}),
        (Retention(1, keep_best=2, best="min:loss"), {4, 6, 8}),
        (Retention(1, keep_best=3, best="min:loss"), {2, 4, 6, 8}),
        (Retention(1, keep_best=2, best="max:loss"), {7, 8}),
        (Retention(1, keep_best=9, best="max:loss"), {2, 4, 6, 7, 8}),
        (Retention(1, keep_best=2, best="min:other"), {8}),
        (Retention(1, keep_interval="10m"), {1, 3, 5, 6, 7, 8}),
        (Retention(1, keep_interval="1h"), {1, 8}),
        (Retention(2, keep_every=3), {3, 6, 7, 8}),
    ],
    ids=str,
)
def test_what_the_rules_keep(tmp_path: Path, retention: Retention, stay: set[int]) -> None:
    async def work(backend: LocalBackend) -> None:
        for step, (loss, minute) in enumerate(zip(LOSSES, MINUTES, strict=True), 1):
            manifest = await kit.save(backend, step)
            said = replace(manifest, metrics={"loss": loss}, created=f"2026-01-01T00:{minute:02d}:00Z")
            (tmp_path / names.decision(step, 1, 1)).write_bytes(encode_decision(said))
        report = await kit.prune(backend, retention)
        assert {step for _, step in await kit.check(backend)} == stay
        assert {step for _, step in report.removed} == set(range(1, 9)) - stay

    kit.with_run(tmp_path, work)
