"""Simulated nodes as in the tests of the exchange."""

from tests.exchange.conftest import job, nodes, root

__all__ = ["job", "nodes", "root"]
