"""A child process is killed at each named point of a publication: the name is absent (or old) or whole, never
anything between; the half is a leftover, which can be removed; and the retry succeeds."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from everstep.backends.conformance import content, names_of
from everstep.backends.errors import NotFound
from everstep.backends.files import LocalBackend

DATA = content((2 << 20) + 777, seed=9)
OLD = b"old"

# A process that forks a child for each line of its input, {how, root, point}, and answers with how it ended.
# (One that imports once and has no threads, so that each child is as good as a fresh process.)
SERVER = """
import asyncio, json, os, sys
from everstep.backends import points
from everstep.backends.aligned import aligned_buffer
from everstep.backends.conformance import content, put
from everstep.backends.files import LocalBackend

nbytes = int(sys.argv[1])
data = aligned_buffer(nbytes)[:nbytes]
data[:] = content(nbytes, seed=9)

def work(how, root, point):
    if point:
        points.hook = points._hook_from("kill:" + point)
    backend = LocalBackend(root)
    if how == "create":
        asyncio.run(backend.create("run/new/x", bytes(data)))
    else:
        asyncio.run(put(backend, "run/new/x" if how == "stream" else "run/old/x", data, 1 << 20))

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            work(**json.loads(line))
            os._exit(0)
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

STREAMER = """
import asyncio, sys
from everstep.backends.conformance import content, put
from everstep.backends.files import LocalBackend

asyncio.run(put(LocalBackend(sys.argv[1]), "run/new/x", content(int(sys.argv[2]), seed=9)))
print("finished")
"""

Run = Callable[[Path, str, str], int]


@pytest.fixture(scope="module")
def run_child() -> Iterator[Run]:
    """Runs a child that publishes in some way and dies at a point ("": nowhere); its exit code."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(len(DATA))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    orders, answers = server.stdin, server.stdout
    assert orders is not None and answers is not None

    def run(root: Path, how: str, point: str) -> int:
        orders.write(json.dumps({"how": how, "root": str(root), "point": point}) + "\n")
        orders.flush()
        return int(answers.readline())

    yield run
    orders.close()
    answers.close()
    assert server.wait(30) == 0


# The points that each way of publishing reaches, with a part of the name at which it is to die and, where
# there are several, the how-manieth time.
CREATE = ("open", "mkdir", "write", "fsync", "link", "unlink", "fsyncdir")
STREAM = ("open", "mkdir", "fallocate", "write", "fsync", "rename", "fsyncdir")
REPLACE = ("write", "fsync", "rename", "fsyncdir")
FURTHER = {("stream", "write"): ("run/new:2", "run/new:3"), ("replace", "fsyncdir"): ("run/old",)}
FURTHER |= {(how, "fsyncdir"): ("run/new",) for how in ("create", "stream")}
POINTS = [
    (how, f"{op}.{when}:{detail}")
    for how, ops in (("create", CREATE), ("stream", STREAM), ("replace", REPLACE))
    for op in ops
    for when in ("before", "after")
    for detail in ("run", *FURTHER.get((how, op), ()))
    if not (op == "mkdir" and when == "before")
]
PUBLISHED = ("link.after", "rename.after", "unlink", "fsyncdir.before:run/", "fsyncdir.after:run/")


def after_the_kill(root: Path, name: str, old: bytes | None, done: bool) -> None:
    """Asserts the state on the disk, before anything is repaired."""

    async def main() -> None:
        backend = LocalBackend(root)
        try:
            found: bytes | None = await backend.read(name)
        except NotFound:
            found = None
        assert found == DATA if done else found in (old, DATA)
        assert (name in await names_of(backend, "run")) == (found is not None)
        left = await backend.leftovers()
        assert len(left) <= 1 and all(".tmp-" in item.name for item in left)
        await backend.discard_leftovers(left)
        assert list(root.rglob(".tmp-*")) == []
        await backend.close()

    asyncio.run(main())


@pytest.mark.parametrize(("how", "point"), POINTS, ids=[f"{how}-{point}" for how, point in POINTS])
def test_kill_at_each_point(how: str, point: str, tmp_path: Path, run_child: Run) -> None:
    old = OLD if how == "replace" else None
    name = "run/old/x" if how == "replace" else "run/new/x"
    (tmp_path / "run" / "old").mkdir(parents=True)
    (tmp_path / "run" / "old" / "x").write_bytes(OLD)
    assert run_child(tmp_path, how, point) == -signal.SIGKILL
    after_the_kill(tmp_path, name, old, done=point.startswith(PUBLISHED))
    assert run_child(tmp_path, how, "") == 0
    after_the_kill(tmp_path, name, old, done=True)


def test_a_live_writer_stopped_half_way_shows_nothing(tmp_path: Path) -> None:
    """Stopped, not killed: others see a leftover that grows no object."""
    child = subprocess.Popen(
        [sys.executable, "-c", STREAMER, str(tmp_path), str(len(DATA))],
        env={**os.environ, "EVERSTEP_POINTS": "stall:write.after:run"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])

        async def look() -> tuple[set[str], int]:
            backend = LocalBackend(tmp_path)
            seen = await names_of(backend), len(await backend.leftovers("run"))
            await backend.close()
            return seen

        assert asyncio.run(look()) == (set(), 1)
        child.send_signal(signal.SIGCONT)
        assert child.communicate(timeout=60)[0].strip() == "finished"
        after_the_kill(tmp_path, "run/new/x", None, done=True)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
