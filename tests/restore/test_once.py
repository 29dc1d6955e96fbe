"""What the ranks of a node load is read from the root once, whoever wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exchange.conftest import job, nodes, root
from tests.exchange.kit import Job

from .counted import Make, load, read_by, replicated, save, sharded, stored

__all__ = ["job", "nodes", "root"]


@pytest.mark.parametrize("make", [replicated, sharded])
@pytest.mark.parametrize(("wrote", "loads"), [(2, 2), (3, 3), (2, 3), (3, 2), (2, 1)])
def test_a_node_reads_every_byte_once(
    job: Job, root: Path, nodes: list[str], make: Make, wrote: int, loads: int
) -> None:
    save(job, nodes[0], make, wrote)
    loaded = load(root, [nodes[0]] * loads, make)
    assert read_by(loaded) == stored(root, 1)
    assert all(not one.recovery.fallbacks for one in loaded)


@pytest.mark.parametrize("wrote", [4, 3])
def test_so_does_each_of_several_nodes(job: Job, root: Path, nodes: list[str], wrote: int) -> None:
    save(job, nodes[0], replicated, wrote)
    loaded = load(root, [nodes[0], nodes[0], nodes[1], nodes[1]], replicated)
    assert read_by(loaded[:2]) == read_by(loaded[2:]) == stored(root, 1)
