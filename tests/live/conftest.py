"""Every test has a node of its own."""

from __future__ import annotations

from tests.facade.conftest import forked, node, root, script

__all__ = ["forked", "node", "root", "script"]
