"""A real run, made once: two incarnations, the second of which went back before the end of the first."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_kit import ADOPTED_STEP, LATER_STEP, MADE_STEPS


@pytest.fixture(scope="session")
def made_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Steps 1 to 4, then from step 2 on step 5; never to be changed (see ``run``)."""
    import everstep
    import torch

    base = tmp_path_factory.mktemp("made")
    runtime, before = base / "runtime", os.environ.get("EVERSTEP_RUNTIME_DIR")
    os.environ["EVERSTEP_RUNTIME_DIR"] = str(runtime)
    policy = everstep.Policy(snapshot_every=None, full_every=None, keep_last=100, linger_s=0.5)
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.Adam(model.parameters())
    state = everstep.TrainState(
        model=model, optimizer=optimizer, extra={"note": "hello", "odd": float("nan")}
    )

    def go_on(load: int | None, steps: tuple[int, ...]) -> None:
        with everstep.Checkpointer(base / "run", policy=policy, agent="inline") as ckpt:
            ckpt.load(state, step=load)
            for step in steps:
                model(torch.ones(2, 64)).sum().backward()
                optimizer.step()
                ckpt.save(step, state, metrics={"loss": 1 / step, "worst": float("nan")}).wait(timeout_s=30)

    try:
        go_on(None, MADE_STEPS)
        go_on(ADOPTED_STEP, (LATER_STEP,))
        yield base / "run"
    finally:
        if before is None:
            del os.environ["EVERSTEP_RUNTIME_DIR"]
        else:
            os.environ["EVERSTEP_RUNTIME_DIR"] = before


@pytest.fixture
def run(made_run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed at will."""
    return Path(shutil.copytree(made_run, tmp_path / "run"))
