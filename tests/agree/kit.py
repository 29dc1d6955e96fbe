"""Jobs of some ranks, each a child of the test's process, with an agent of its own on a thread."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import everstep
import torch
from everstep.errors import EverstepError

from tests.facade.kit import Forked, opened

Forks = Callable[[Callable[..., object]], Forked]


class Rank:
    """One rank in its process: it trains nothing, saves, and notes what it hears."""

    def __init__(self, rank: int, root: Path, policy: dict[str, Any], memory: everstep.Memory | None) -> None:
        self.rank = rank
        self.ckpt = opened(root, policy=policy, memory=memory)
        self.heard: list[str] = []
        self.outcomes: list[str] = []

    def save(self, step: int, state: everstep.TrainState) -> str:
        """ "" or the error's class; all ranks come here, and leave together."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self.ckpt.save(step, state).wait()
                said = ""
            except EverstepError as error:
                said = f"{type(error).__name__}: {error}"
        self.heard += [str(one.message) for one in caught if str(one.message).startswith("everstep:")]
        self.outcomes.append(said)
        self.meet()
        return said

    def meet(self) -> None:
        ranks = self.ckpt._ranks
        assert ranks is not None
        ranks.agree("meeting", None, timeout_s=60)

    def end(self) -> dict[str, Any]:
        """Close without a flush; what is left to be told is told."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                session = self.ckpt._session
                if session is not None:
                    session.hear()
                said = ""
            except EverstepError as error:
                said = f"{type(error).__name__}: {error}"
        self.heard += [str(one.message) for one in caught if str(one.message).startswith("everstep:")]
        self.meet()
        self.ckpt.close(flush=False)
        return {"heard": self.heard, "outcomes": self.outcomes, "last": said}


def job(
    forked: Forks,
    root: Path,
    body: Callable[[Rank], object],
    *,
    world: int = 3,
    gloo: bool = False,
    policy: dict[str, Any] | None = None,
    memory: everstep.Memory | None = None,
) -> list[dict[str, Any]]:
    """Run ``body`` on all ranks; what each heard: its warnings, the outcomes of its saves, what body gave."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def of(rank: int) -> Callable[..., object]:
        def run(say: Callable[..., None]) -> None:
            os.environ |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            if gloo:
                torch.distributed.init_process_group("gloo")
            one = Rank(rank, root, dict(policy or {}), memory)
            given = body(one)
            say(json.dumps({**one.end(), "given": given}))

        return run

    children = [forked(of(rank)) for rank in range(world)]
    found = []
    for child in children:
        line = child.line()
        assert line, f"a rank ended: {child.end()}"
        found.append(json.loads(line))
    return found


def decisions(root: Path, step: int) -> list[dict[str, Any]]:
    """The bodies of all decisions on a step, in order."""
    paths = sorted(root.glob(f"checkpoints/{step:09d}/*/manifest-*.json"))
    return [json.loads(path.read_bytes()) for path in paths]


def facts(root: Path, step: int) -> dict[str, Any]:
    """The facts of the step's manifest."""
    (manifest,) = [one for one in decisions(root, step) if one["everstep"] == "manifest"]
    found: dict[str, Any] = manifest["facts"] if "facts" in manifest else manifest["body"]["facts"]
    return found
