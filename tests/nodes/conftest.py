"""Every test has nodes of its own, which go with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .cluster import Cluster

Make = Callable[..., Cluster]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Make]:
    """``cluster(count, domains)`` makes nodes; what goes on there is printed, and ended with the test."""
    made: list[Cluster] = []

    def make(count: int, domains: tuple[str, ...] = ()) -> Cluster:
        base = tmp_path / f"nodes-{len(made)}"
        base.mkdir()
        made.append(Cluster(base, count, domains))
        return made[-1]

    yield make
    for one in made:
        print(one.told())
        one.close()
