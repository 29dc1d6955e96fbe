"""As in tests/facade: every test has a node of its own."""

from __future__ import annotations

from tests.facade.conftest import node, root, script, storage

__all__ = ["node", "root", "script", "storage"]
