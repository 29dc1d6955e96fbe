"""As for the facade: every test has a node of its own."""

from __future__ import annotations

import pytest

from tests.facade.conftest import forked, node, root, script, storage


@pytest.fixture(autouse=True)
def quick_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes behind flushes waits until a second has gone by without one; tests have no such second."""
    monkeypatch.setattr("everstep.agent.turnstile.AT_WORK_S", 0.02)


__all__ = ["forked", "node", "root", "script", "storage"]
