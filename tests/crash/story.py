"""The training run that is killed, and the process that runs it again and again.

The state is a function of the step, so whoever resumes knows whether the bytes are right. Every even step is saved
and waited for; the run keeps its last two checkpoints, so from step 6 on each save removes one.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import everstep
import torch

LAST = 8
KEEP = 2
ELEMENTS = 300_001
"""Enough that the image goes to the disk directly, not through the page cache."""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(ELEMENTS))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def become(self, step: int) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.arange(ELEMENTS) * 0.25 + step)
            self.seen.fill_(step)  # type: ignore[operator]

    def is_of(self, step: int) -> bool:
        other = Model()
        other.become(step)
        return all(
            torch.equal(a, b)
            for a, b in zip(self.state_dict().values(), other.state_dict().values(), strict=True)
        )


def say(*words: object) -> None:
    """One line on standard output, at once: what was said before a kill was said."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def train(root: Path, memory: Path, agent: Any) -> None:
    torch.set_num_threads(1)
    policy = everstep.Policy(
        snapshot_every=1,
        full_every=None,
        keep_last=KEEP,
        linger_s=0.3,
        slot_timeout_s=20.0,
        close_timeout_s=30.0,
        commit_timeout_s=20.0,
    )
    model, extra = Model(), {"step": 0, "name": ""}
    state = everstep.TrainState(model=model, extra=extra, rng=False)
    ckpt = everstep.Checkpointer(
        root, memory=everstep.Memory(path=memory, bytes=2 << 20), policy=policy, agent=agent, take_over=True
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = ckpt.load(state)
    for one in caught:
        say("warned", one.message)
    good = start is None or (model.is_of(start) and extra == {"step": start, "name": f"step {start}"})
    say("start", start, ckpt.recovery.tier if ckpt.recovery else None, "good" if good else "BAD")
    for step in range((start or 0) + 1, LAST + 1):
        model.become(step)
        extra.update(step=step, name=f"step {step}")
        ckpt.step(step, state)
        os.environ.pop("EVERSTEP_AGENT_POINTS", None)  # the next agent is to live
        say("step", step)
        if step % 2 == 0:
            ckpt.save(step, state).wait(timeout_s=30)
            say("durable", step)
            if start is None:
                see_rotation(root, step - 2 * KEEP)
    ckpt.close()
    say("closed")


def see_rotation(root: Path, step: int) -> None:
    """Wait until the checkpoint of ``step``, if there is one, was removed: then no kill in a rotation meets a later
    save."""
    until = time.monotonic() + 20.0
    while (root / f"checkpoints/{step:09}/0001/manifest-1.json").exists() and time.monotonic() < until:
        time.sleep(0.005)


def serve() -> None:
    """Runs :func:`train` in forked children, one for each line of standard input: importing torch takes longer than
    all else."""
    for line in sys.stdin:
        wish = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(wish)
        _, status = os.waitpid(pid, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


def _child(wish: dict[str, Any]) -> None:
    code = 1
    try:
        os.environ.update(wish["env"])
        out = os.open(wish["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        text = wish["env"].get("EVERSTEP_POINTS")
        if text:
            from everstep.backends import points as storage
            from everstep.memory import points as slots

            storage.hook = storage._hook_from(text)
            slots.hook = slots.hook_from(text)
        train(Path(wish["root"]), Path(wish["memory"]), wish["agent"])
        code = 0
    except BaseException:
        import traceback

        os.write(1, traceback.format_exc().encode())
    finally:
        os._exit(code)


if __name__ == "__main__":
    import everstep.checkpointer

    serve()
