"""A node as a process of its own, to be killed: ``python -m tests.peers.node keep DIRECTORY`` keeps what is sent, until
its standard input ends; ``... send DIRECTORY PORT STEP...`` sends steps of rank 0. Each says on its standard output how
far it is."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from everstep.peers.link import connect

from .kit import RUN, SECRET, SOON_S, Holder, Owner, send

TOP = Path(__file__).parents[2]


def keep(directory: Path) -> None:
    there = Holder(directory)
    print(there.listener.port, flush=True)
    sys.stdin.read()
    there.close()


def send_steps(directory: Path, port: int, steps: list[int]) -> None:
    rank = Owner(directory)
    with connect("127.0.0.1", port, SECRET, RUN, me="owner", timeout_s=SOON_S) as link:
        for step in steps:
            send(link, rank.write(step))
            print(step, flush=True)
    rank.arena.close()


class Process:
    """One of these in a process whose points are set to ``points``. As a context manager it is killed at the end."""

    def __init__(self, *args: object, points: str = "") -> None:
        env = {**os.environ, "EVERSTEP_POINTS": points, "PYTHONPATH": str(TOP)}
        if not points:
            del env["EVERSTEP_POINTS"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.peers.node", *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=TOP,
        )

    def line(self) -> int:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        assert text, f"the process ended with {self._process.wait()}"
        return int(text)

    def wait(self) -> int:
        """Its exit code."""
        return self._process.wait(timeout=30)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *args: object) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        keep(Path(sys.argv[2]))
    else:
        send_steps(Path(sys.argv[2]), int(sys.argv[3]), [int(text) for text in sys.argv[4:]])
