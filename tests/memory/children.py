"""Child processes that do one thing to an arena and are killed at a named point, or wait."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

PRELUDE = """
import os, sys, time, signal
sys.path.insert(0, {here!r})
from pathlib import Path
from contents import *
from everstep.memory.arena import Arena
from everstep.memory.process import Process
path = Path(sys.argv[1])
def ready():
    print("ready", flush=True)
    sys.stdin.readline()
"""


def start(path: Path, body: str, points: str = "") -> subprocess.Popen[str]:
    """Run ``body`` (``path`` and :func:`ready` are defined) in a child whose points are set to ``points``."""
    here = str(Path(__file__).parent)
    env = {**os.environ, "EVERSTEP_POINTS": points}
    if not points:
        del env["EVERSTEP_POINTS"]
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE.format(here=here) + body, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )


def wait_ready(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n", f"the child ended with {child.wait()}"


def kill(child: subprocess.Popen[str]) -> None:
    child.kill()
    end(child)


def end(child: subprocess.Popen[str]) -> int:
    """Let it go on, and wait for it; its exit code."""
    for stream in (child.stdin, child.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.close()
    return child.wait(timeout=30)
