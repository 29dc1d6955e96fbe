"""As for the facade: every test has a node of its own."""

from __future__ import annotations

import pytest

from tests.facade.conftest import forked, node, root, script, storage


@pytest.fixture(autouse=True)
def quick_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier on the root's disk waits until a second has gone by without a flush; tests have no such second."""
    monkeypatch.setattr("everstep.agent.turnstile.AT_WORK_S", 0.02)


__all__ = ["forked", "node", "root", "script", "storage"]
