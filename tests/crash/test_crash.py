"""SIGKILL at every named point of a whole run: what is on disk at that instant, and that a new process goes on from
the right step with the right bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner
from everstep.backends.files import LocalBackend
from everstep.cli.main import main
from everstep.format.manifest import Manifest
from everstep.memory.arena import Arena
from everstep.store.blocking import run_blocking
from everstep.store.catalog import list_steps, read_decision

from tests.crash.points import ELSEWHERE, KILLS, Kill, points_of_the_code
from tests.crash.story import KEEP, LAST

SAMPLED = 4
DAMAGE_LEFT = 4
NO_RUN = 16
AGENT_POINTS = [
    "agent.accepted",
    "agent.begun",
    "flush.image.first",
    "fsync.after",
    "vote.before",
    "vote.after",
    "manifest.before",
    "link.after",
    "manifest.after",
    "agent.settled",
    "agent.rotate.before",
    "rotate.tombstoned",
    "rotate.deleted.votes",
]


class Server:
    """The process that forks the runs."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.story"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(self, wish: dict[str, object]) -> int:
        """The exit code of one run; negative where a signal ended it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(wish) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@dataclass
class Run:
    """One run in a directory of its own."""

    server: Server
    base: Path
    agent: str = "inline"
    lives: int = 0
    said: list[list[str]] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.base / "run"

    @property
    def memory(self) -> Path:
        path = self.base / "memory"
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def live(self, **env: str) -> int:
        self.lives += 1
        out = self.base / f"life-{self.lives}"
        wish = {
            "root": str(self.root),
            "memory": str(self.memory),
            "agent": self.agent,
            "out": str(out),
            "env": {"EVERSTEP_RUNTIME_DIR": str(self.base / "runtime"), "EVERSTEP_NODE": "n0", **env},
        }
        code = self.server.run(wish)
        self.said = [line.split() for line in out.read_text().splitlines()]
        return code

    def told(self, word: str) -> list[list[str]]:
        return [line[1:] for line in self.said if line and line[0] == word]

    def newest(self, word: str) -> int:
        return max([0, *(int(rest[0]) for rest in self.told(word))])

    def on_disk(self) -> tuple[int, ...]:
        """The steps with a manifest that counts."""
        backend = LocalBackend(self.root)

        async def look() -> list[int]:
            found = await list_steps(backend)
            return [
                names.step for names in found if isinstance(await read_decision(backend, names), Manifest)
            ]

        return tuple(sorted(run_blocking(look()))) if self.root.exists() else ()

    def undecided(self) -> list[int]:
        """Steps whose votes are in without any decision."""
        votes = self.root.rglob("*.vote")
        return [int(v.parts[-4]) for v in votes if not list(v.parents[1].glob("manifest-*"))]

    def is_begun(self) -> bool:
        return (self.root / "run.json").exists()

    def in_memory(self) -> int:
        """The newest step that is whole in an arena."""
        steps = [0]
        for path in self.memory.rglob("*.arena"):
            with Arena.attach(path) as arena:
                steps += [info.step for info in arena.snapshots()]
        return max(steps)

    def fsck(self) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["fsck", str(self.root), "--json"])
        return done.exit_code, done.output


def kill_and_go_on(run: Run, kill: Kill, *, wiped: bool) -> None:
    code = run.live(EVERSTEP_POINTS=f"kill:{kill}")
    assert code == -signal.SIGKILL, (str(kill), code, run.said)
    # The instant of the kill.
    stepped, acknowledged = run.newest("step"), run.newest("durable")
    durable, newest, undecided = run.on_disk(), run.in_memory(), run.undecided()
    if kill.durable is not None:
        assert durable == kill.durable, str(kill)
    assert acknowledged in (0, *durable), f"{kill}: step {acknowledged} was said to be durable"
    assert stepped <= newest <= stepped + 1, f"{kill}: a completed step is not in memory"
    code, said = run.fsck()
    # What a crash leaves is no damage, but for the instant between the last vote and the manifest.
    assert code == (NO_RUN if not run.is_begun() else DAMAGE_LEFT if undecided else 0), f"{kill}: {said}"
    if wiped:
        shutil.rmtree(run.memory)
    # All votes in: the writer that loads commits it, as the dead one would have.
    expected = max([0 if wiped else newest, *durable, *undecided])
    assert run.live() == 0, (str(kill), run.said)
    ((start, tier, verdict),) = run.told("start")
    assert verdict == "good", f"{kill}: other bytes than those of step {start}"
    assert start == (str(expected) if expected else "None"), f"{kill}: {run.said}"
    assert tier == ("None" if not expected else "disk" if wiped else "memory"), f"{kill}: {run.said}"
    assert run.told("closed"), str(kill)
    assert run.on_disk()[-KEEP:] == (LAST - 2, LAST), str(kill)
    code, said = run.fsck()
    assert code == 0, f"{kill}: {said}"


def sample() -> tuple[int, list[Kill]]:
    seed = int(os.environ.get("EVERSTEP_CRASH_SEED") or random.randrange(1 << 30))
    return seed, random.Random(seed).sample(KILLS, SAMPLED)


def test_some_kills(server: Server, tmp_path: Path) -> None:
    seed, kills = sample()
    print(f"EVERSTEP_CRASH_SEED={seed}")
    for number, kill in enumerate(kills):
        base = tmp_path / str(number)
        base.mkdir()
        kill_and_go_on(Run(server, base), kill, wiped=number % 2 == 1)


@pytest.mark.long
@pytest.mark.parametrize("wiped", [False, True], ids=["memory", "wiped"])
@pytest.mark.parametrize("kill", KILLS, ids=str)
def test_every_kill(server: Server, tmp_path: Path, kill: Kill, wiped: bool) -> None:
    kill_and_go_on(Run(server, tmp_path), kill, wiped=wiped)


@pytest.mark.parametrize(
    "point", [AGENT_POINTS[3], *(pytest.param(p, marks=pytest.mark.long) for p in AGENT_POINTS)]
)
def test_the_agent_killed_under_a_run(server: Server, tmp_path: Path, point: str) -> None:
    """The training goes on; what it waited for is durable all the same."""
    run = Run(server, tmp_path, agent="process")
    assert run.live(EVERSTEP_AGENT_POINTS=f"kill:{point}") == 0, run.said
    assert run.newest("durable") == LAST and run.told("closed") == [[]]
    assert run.on_disk()[-KEEP:] == (LAST - 2, LAST)
    assert run.fsck()[0] == 0
    shutil.rmtree(run.memory)
    assert run.live() == 0
    assert run.told("start") == [[str(LAST), "disk", "good"]]


def test_every_point_of_the_code_is_on_the_list() -> None:
    listed = {kill.point for kill in KILLS} | set(ELSEWHERE)
    assert points_of_the_code() == listed
    assert set(AGENT_POINTS) <= points_of_the_code()
