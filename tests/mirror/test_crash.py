"""A copy that ends anywhere, by an error of storage, a kill or a loss of power: never half a checkpoint, and it goes
on."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from everstep.backends.errors import NoSpace, Permanent
from everstep.backends.faults import Fault, Faulty
from everstep.backends.files import LocalBackend
from everstep.errors import EverstepError, NotARun
from everstep.store.copying import copy_run
from everstep.store.findings import Kind, Severity
from everstep.store.runs import open_run

from tests.disk.simdisk import SimDisk
from tests.mirror import kit
from tests.mirror.story import KEYS, STATES, before, run
from tests.store import store_kit


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("crash") / "source"

    async def make() -> None:
        backend = LocalBackend(root)
        await before(backend)
        await backend.close()

    asyncio.run(make())
    return root


def counted(root: Path) -> dict[str, bytes]:
    """The objects that a copy takes over: all but what a given-up attempt left."""
    return {name: data for name, data in kit.objects(root).items() if "000000002/0002/a1/" not in name}


async def state_of(target: Path) -> frozenset[tuple[int, int]]:
    """What can be loaded at the target; everything that counts must load, and nothing must look damaged, but that the
    last manifest is still to come."""
    backend = LocalBackend(target)
    try:
        try:
            await open_run(backend)
        except NotARun:
            return frozenset()
        good, bad = await store_kit.loadable(backend)
        assert not bad, bad
        for finding in await kit.findings(backend):
            assert finding.severity is not Severity.DAMAGE or finding.kind is Kind.UNDECIDED, finding
        return frozenset(good)
    finally:
        await backend.close()


def finish(source: Path, target: Path) -> None:
    """Copying again ends as if nothing had happened."""
    report = asyncio.run(run(str(source), str(target)))
    assert not report.failed and {*report.copied, *report.present} == KEYS
    assert counted(target) == counted(source)
    again = asyncio.run(run(str(source), str(target)))
    assert set(again.present) == KEYS and not again.copied and not again.sent_bytes


def calls_of(source: Path, target: Path) -> list[tuple[str, str]]:
    async def go() -> list[tuple[str, str]]:
        here, there = LocalBackend(source), LocalBackend(target)
        seen = Faulty(there)
        await copy_run(here, seen)
        await here.close()
        await there.close()
        return seen.calls

    return asyncio.run(go())


def broken_at(source: Path, target: Path, nth: int, *, after: bool, error: type[Permanent]) -> None:
    """Storage at the target fails for good from its ``nth`` operation on: as it looks to whoever comes after a kill."""

    async def go() -> None:
        here, there = LocalBackend(source), LocalBackend(target)
        # When the process is dead nothing tidies up.
        script = [
            Fault("", "", nth, 1, lambda name: error(name, "scripted"), after=after),
            Fault("", "", nth + 1, 1 << 30, lambda name: error(name, "dead")),
        ]
        try:
            with pytest.raises(EverstepError):
                await copy_run(here, Faulty(there, script))
        finally:
            await here.close()
            await there.close()

    asyncio.run(go())


def try_break(source: Path, target: Path, nth: int, *, after: bool, error: type[Permanent]) -> None:
    broken_at(source, target, nth, after=after, error=error)
    assert asyncio.run(state_of(target)) in STATES, (nth, after)
    finish(source, target)
    shutil.rmtree(target)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_storage_that_fails_at_some_operations(source: Path, tmp_path: Path, after: bool) -> None:
    calls = calls_of(source, tmp_path / "whole")
    seed = random.randrange(1 << 30)
    print("seed", seed)
    writes = [n for n, (op, _) in enumerate(calls, 1) if op in ("create", "writer.commit")]
    numbers = random.Random(seed)
    for nth in sorted({*numbers.sample(range(1, len(calls)), 6), *numbers.sample(writes[:-1], 6)}):
        try_break(source, tmp_path / "target", nth, after=after, error=Permanent)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("error", [Permanent, NoSpace])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_storage_that_fails_at_every_operation(
    source: Path, tmp_path: Path, after: bool, error: type[Permanent]
) -> None:
    count = len(calls_of(source, tmp_path / "whole"))
    for nth in range(1, count):
        try_break(source, tmp_path / "target", nth, after=after, error=error)


POINTS = [
    ("mirror.image.piece", "000000001/0001/a1/rank-00000.model", 0),
    ("rename.after", "000000001/0001/a1/rank-00001.optimizer", 0),
    ("mirror.vote.before", "000000001/0001/a1/rank-00001", 0),
    ("mirror.manifest.before", "000000001", 0),
    ("link.after", "000000001/0001/manifest-1", 1),
    ("link.after", "000000002/0002/manifest-1", 1),
    ("mirror.manifest.before", "000000002", 1),
    ("link.after", "000000002/0002/manifest-2", 2),
]


@pytest.mark.parametrize("index", range(0, len(POINTS), 3))
def test_a_kill_at_a_named_point(source: Path, tmp_path: Path, index: int) -> None:
    killed(source, tmp_path / "target", *POINTS[index])


@pytest.mark.long
@pytest.mark.parametrize("index", range(len(POINTS)))
def test_a_kill_at_every_named_point(source: Path, tmp_path: Path, index: int) -> None:
    killed(source, tmp_path / "target", *POINTS[index])


def killed(source: Path, target: Path, point: str, detail: str, state: int) -> None:
    environment = {**os.environ, "EVERSTEP_POINTS": f"kill:{point}:{detail}"}
    command = [sys.executable, "-m", "tests.mirror.story", str(source), str(target)]
    top = Path(__file__).parents[2]
    child = subprocess.run(command, cwd=top, env=environment, capture_output=True, timeout=60)
    assert child.returncode == -signal.SIGKILL, (point, child.returncode, child.stderr.decode()[-2000:])
    assert asyncio.run(state_of(target)) == STATES[state]
    finish(source, target)


def on_simulated_disk(source: Path, root: Path) -> SimDisk:
    root.mkdir()
    sim = SimDisk(root)

    async def go() -> None:
        here, there = LocalBackend(source), LocalBackend(root, door=sim.door)
        report = await copy_run(here, there)
        assert set(report.copied) == KEYS
        await here.close()
        await there.close()

    asyncio.run(go())
    return sim


def check_power_loss(sim: SimDisk, source: Path, target: Path, index: int, seed: int | None) -> None:
    sim.crash(target, seed, op_index=index)
    assert asyncio.run(state_of(target)) in STATES, (index, seed)
    finish(source, target)
    shutil.rmtree(target)


def test_power_loss_at_some_operations(source: Path, tmp_path: Path) -> None:
    sim = on_simulated_disk(source, tmp_path / "sim")
    seed = random.randrange(1 << 30)
    print("seed", seed)
    numbers = random.Random(seed)
    for index in sorted(numbers.sample(range(len(sim.ops) + 1), 8)):
        check_power_loss(sim, source, tmp_path / "target", index, numbers.choice((None, seed + index)))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [None, 1])
def test_power_loss_at_every_operation(source: Path, tmp_path: Path, seed: int | None) -> None:
    sim = on_simulated_disk(source, tmp_path / "sim")
    for index in range(len(sim.ops) + 1):
        check_power_loss(sim, source, tmp_path / "target", index, seed)


def test_what_was_told_to_be_there_survives_a_power_loss(source: Path, tmp_path: Path) -> None:
    sim = on_simulated_disk(source, tmp_path / "sim")
    sim.crash(tmp_path / "target")
    assert asyncio.run(state_of(tmp_path / "target")) == KEYS
    assert counted(tmp_path / "target") == counted(source)
