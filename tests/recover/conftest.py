"""Simulated nodes as in the tests of the exchange."""

from tests.exchange.conftest import job, nodes, nothing_left, root

__all__ = ["job", "nodes", "nothing_left", "root"]
