"""Snapshots go from one node's agent to another's: held, proved, sealed, and the former one stays till then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from everstep.errors import Superseded

from .kit import Holder, Owner, contents, held, send

Make = Callable[..., Holder]
Own = Callable[..., Owner]


def test_a_snapshot_is_kept_as_it_was_sent(holder: Make, owner: Own, directory: Path) -> None:
    there, rank = holder(), owner(2)
    snapshot = rank.write(7)
    with there.link() as link:
        assert link.peer == "holder"
        send(link, snapshot)
        found = held(directory, 2)
        assert list(found) == [(1, 7)]
        records = found[1, 7].pop("records")
        assert found[1, 7] == contents(1, 7) and records
        send(link, snapshot)  # once more: it is there
        assert list(held(directory, 2)) == [(1, 7)]
        send(link, rank.write(8))
        send(link, rank.write(9))
    assert list(held(directory, 2)) == [(1, 8), (1, 9)]
    [arena] = there.keeper.arenas().values()
    assert arena.info.slots == 2 and arena.info.rank == 2


def test_an_older_incarnation_is_refused(holder: Make, owner: Own) -> None:
    there, rank = holder(), owner()
    former = rank.write(5)
    with there.link() as link:
        send(link, former)
        send(link, rank.write(3, incarnation=2))
        with pytest.raises(Superseded, match="older incarnation"):
            send(link, former)
        send(link, rank.write(4, incarnation=2))
    assert list(held(there.directory)) == [(2, 3), (2, 4)]
