"""As for the facade: every test has a node of its own."""

from __future__ import annotations

from tests.facade.conftest import forked, node, root, script, storage

__all__ = ["forked", "node", "root", "script", "storage"]
