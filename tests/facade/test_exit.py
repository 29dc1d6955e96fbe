"""However a script ends, its newest step is durable or still in memory, and nothing hangs."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import everstep
import pytest

from .kit import Script, in_memory, opened, steps_on_disk, until

SCRIPT = """
def main(how, agent):
    ckpt = opened(root / f"{how}-{agent}", agent=agent, policy={"linger_s": 0.5})
    state = {"n": 0}
    ckpt.load(state)
    for step in range(1, 6):
        state["n"] = step
        ckpt.step(step, state)
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise ValueError("the original")
    if how == "with":
        with ckpt:
            raise ValueError("the original")
    if how == "sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    # else: the function simply ends, and forgets the checkpointer

# Each in a child that ends as an interpreter does: an import of torch per script would take minutes.
for how, agent in [word.split("-") for word in sys.argv[2:]]:
    child = os.fork()
    if child == 0:
        errors = os.open(root / f"{how}-{agent}.err", os.O_CREAT | os.O_WRONLY)
        os.dup2(errors, 2)
        main(how, agent)
        sys.exit(0)
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

ENDS = {"end": 0, "exit": 3, "raise": 1, "with": 1, "sigterm": -signal.SIGTERM}


@pytest.mark.timeout(300)
def test_the_newest_step_is_durable_however_the_script_ends(
    root: Path, script: Callable[..., Script]
) -> None:
    root.mkdir()
    cases = [f"{how}-{agent}" for how in ENDS for agent in ("inline", "process")]
    cases.remove("sigterm-inline")  # an agent within the process dies with it
    code, out, err = script(SCRIPT, root, *cases).end()
    assert code == 0, err
    assert [int(line) for line in out.splitlines()] == [ENDS[case.split("-")[0]] for case in cases]
    for case in cases:
        how, run, told = case.split("-")[0], root / case, (root / f"{case}.err").read_text()
        until(lambda run=run: steps_on_disk(run)[-1:] == [5], f"{case}: the newest step on disk")
        if how in ("raise", "with"):
            assert told.strip().endswith("ValueError: the original"), told
        else:
            assert told == "", told
        if how in ("raise", "with", "sigterm"):
            assert 5 in in_memory(run), f"{case}: who dies is likely to be started again"
        else:
            assert in_memory(run) == [], f"{case}: nothing is left behind"
    state = {"n": 0}
    with opened(root / "sigterm-process") as ckpt:
        assert ckpt.load(state) == 5 and ckpt.recovery is not None and ckpt.recovery.tier == "memory"
    assert everstep.load(root / "end-inline")["n"] == 5


@pytest.mark.parametrize("agent", ["inline", "process"])
def test_closing_leaves_nothing_behind(root: Path, agent: str) -> None:
    with opened(root, agent=agent) as ckpt:
        ckpt.load({"n": 0})
        ckpt.step(1, {"n": 1})
        assert in_memory(root) == [1]
    assert in_memory(root) == []


def test_opening_and_closing_again_and_again_keeps_no_descriptors_and_threads(root: Path) -> None:
    def once(step: int) -> tuple[int, int]:
        with opened(root) as ckpt:
            ckpt.load({"n": 0})
            ckpt.save(step, {"n": step}).wait()
        everstep.load(root)
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    once(1)
    before = once(2)
    after = [once(step) for step in range(3, 9)][-1]
    assert after[0] <= before[0] + 3 and after[1] <= before[1] + 1, (before, after)
