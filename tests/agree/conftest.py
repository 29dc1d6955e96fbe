"""Nodes and processes as in the tests of the facade."""

from tests.facade.conftest import forked, node, root

__all__ = ["forked", "node", "root"]
