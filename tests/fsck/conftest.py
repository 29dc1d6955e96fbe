"""What all tests of fsck begin with."""

from __future__ import annotations

from pathlib import Path

import pytest
from everstep.store import fsck

from tests.fsck.run import make_run
from tests.threadless import threadless

__all__ = ["threadless"]


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is at work who might decide an attempt meanwhile."""
    monkeypatch.setattr(fsck, "DECISION_WAIT_S", 0.0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run; copied, never changed."""
    root = tmp_path_factory.mktemp("whole") / "run"
    make_run(root)
    return root
