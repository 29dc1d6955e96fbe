"""As for the facade: every test has a node of its own, and files are read without threads."""

from __future__ import annotations

from tests.facade.conftest import forked, node, root
from tests.threadless import threadless

__all__ = ["forked", "node", "root", "threadless"]
