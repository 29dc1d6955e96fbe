"""SIGKILL at named points, and at every point, of flush, commit and rotation.

After each: what can be loaded is the old set, or the old plus the new checkpoint, or (once rotation has
begun) that less the removed one; never a half. And doing it all again succeeds.
"""

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
from everstep.backends import points
from everstep.backends.files import LocalBackend
from everstep.errors import NotARun
from everstep.store.catalog import list_steps, read_decision
from everstep.store.findings import Kind, Severity
from everstep.store.fsck import check
from everstep.store.runs import open_run

from tests.store import store_kit as kit
from tests.store.crash_story import BOTH, NEW, OLD, before, run

STATES = (OLD, BOTH, NEW)

NAMED = [
    # point, part of the name it works on, what can be loaded afterwards
    ("flush.image.first", "rank-00000.model", OLD),
    ("flush.packed.before", "rank-00000.optimizer", OLD),
    ("rename.after", "rank-00000.model.packed", OLD),
    ("fsync.before", "rank-00001.optimizer", OLD),
    ("fsync.after", "rank-00001.optimizer", OLD),
    ("rename.after", "rank-00000.state", OLD),
    ("vote.before", "rank-00001", OLD),
    ("link.after", "rank-00001.vote", OLD),
    ("manifest.before", "", OLD),
    ("link.before", "000000003/0001/manifest-1", OLD),
    ("link.after", "000000003/0001/manifest-1", BOTH),
    ("manifest.after", "", BOTH),
    ("link.before", "000000001/0001/manifest-2", BOTH),
    ("link.after", "000000001/0001/manifest-2", NEW),
    ("rotate.tombstoned", "", NEW),
    ("rotate.looked", "", NEW),
    ("link.after", "000000001/0001/manifest-3", NEW),
    ("rotate.settled", "", NEW),
    ("unlink.after", "000000001/0001/a1/rank-00000.vote", NEW),
    ("rotate.deleted.votes", "", NEW),
    ("rotate.deleted.images", "", NEW),
    ("unlink.after", "000000001/0001/manifest-1", NEW),
    ("unlink.after", "000000001/0001/manifest-2", NEW),
    ("rotate.deleted.decisions", "", NEW),
    ("rotate.deleted.tombstone", "", NEW),
]
SHORT = {0, 1, 7, 9, 10, 14, 17, 19}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("start") / "run"

    async def make() -> None:
        backend = LocalBackend(root)
        await before(backend)
        await backend.close()

    asyncio.run(make())
    return root


async def state_of(root: Path) -> frozenset[tuple[int, int]]:
    """What can be loaded; everything that counts must load."""
    backend = LocalBackend(root)
    good, bad = await kit.loadable(backend)
    assert not bad, bad
    async for finding in check(backend, decision_wait_s=0):
        # Between the last vote and the manifest a crash looks like a lost manifest; nothing else is damage.
        assert finding.severity is not Severity.DAMAGE or finding.kind is Kind.UNDECIDED, finding
    await backend.close()
    return frozenset(good)


async def finish(root: Path) -> None:
    """The story again, after the crash: it ends as if nothing had happened."""
    await run(str(root))
    assert await state_of(root) == NEW
    backend = LocalBackend(root)
    findings = [finding async for finding in check(backend)]
    assert {finding.kind for finding in findings} <= {Kind.TEMPORARY}, findings
    assert [found.key for found in await list_steps(backend)] == sorted(NEW)
    await backend.close()


def killed_at(root: Path, text: str) -> None:
    environment = {**os.environ, "EVERSTEP_POINTS": f"kill:{text}"}
    command = [sys.executable, "-m", "tests.store.crash_story", str(root)]
    top = Path(__file__).parents[2]
    child = subprocess.run(command, cwd=top, env=environment, capture_output=True, timeout=60)
    assert child.returncode == -signal.SIGKILL, (text, child.returncode, child.stderr.decode()[-2000:])


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(i, marks=() if i in SHORT else (pytest.mark.long,), id=":".join(NAMED[i][:2]))
        for i in range(len(NAMED))
    ],
)
def test_a_kill_at_a_named_point_leaves_old_or_new(start: Path, tmp_path: Path, index: int) -> None:
    point, detail, expected = NAMED[index]
    root = tmp_path / "run"
    shutil.copytree(start, root)
    killed_at(root, f"{point}:{detail}")
    assert asyncio.run(state_of(root)) == expected
    asyncio.run(finish(root))


def count_points(start: Path, root: Path) -> int:
    """How many points the story reaches."""
    shutil.copytree(start, root)
    seen: list[str] = []
    points.hook = lambda name, detail: seen.append(name)
    try:
        asyncio.run(run(str(root)))
    finally:
        points.hook = None
    return len(seen)


def killed_at_number(root: Path, number: int, first_run: bool = False) -> bool:
    """Run the story in a forked child that kills itself at its ``number``-th point; False: it ended."""
    pid = os.fork()
    if pid == 0:
        left = number

        def hook(name: str, detail: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            points.hook = hook
            asyncio.run(_first(root) if first_run else run(str(root)))
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, status
    return False


async def _first(root: Path) -> None:
    backend = LocalBackend(root)
    await kit.start_run(backend)
    await kit.save(backend, 1)
    await backend.close()


def check_every(start: Path, tmp_path: Path, numbers: list[int]) -> None:
    seen = set()
    for number in numbers:
        root = tmp_path / str(number)
        shutil.copytree(start, root)
        killed_at_number(root, number)
        state = asyncio.run(state_of(root))
        assert state in STATES, (number, state)
        seen.add(state)
        asyncio.run(finish(root))
        shutil.rmtree(root)
    assert len(numbers) < 50 or seen == set(STATES)


def test_kills_at_some_points_leave_old_or_new(start: Path, tmp_path: Path) -> None:
    total = count_points(start, tmp_path / "count")
    seed = random.randrange(1 << 30)
    print("seed", seed)
    check_every(start, tmp_path, sorted(random.Random(seed).sample(range(1, total + 1), 10)))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kills_at_every_point_leave_old_or_new(start: Path, tmp_path: Path) -> None:
    total = count_points(start, tmp_path / "count")
    check_every(start, tmp_path, list(range(1, total + 1)))


@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.long)])
def test_a_kill_while_a_run_comes_into_being_leaves_nothing_or_the_run(tmp_path: Path, stride: int) -> None:
    number = 1
    while True:
        root = tmp_path / str(number)
        killed = killed_at_number(root, number, first_run=True)

        async def look(root: Path = root) -> None:
            backend = LocalBackend(root)
            try:
                await open_run(backend)
            except NotARun:
                pass
            else:
                good, bad = await kit.loadable(backend)
                assert not bad and good <= {(1, 1)}
            await _first(root)
            for found in await list_steps(backend):
                assert await read_decision(backend, found) is not None
            assert await kit.loadable(backend) == ({(1, 1)}, {})
            await backend.close()

        asyncio.run(look())
        shutil.rmtree(root)
        if not killed:
            break
        number += stride
