"""Own, held and other nodes' snapshots of one step: who serves, and who does when bytes are damaged."""

from __future__ import annotations

from pathlib import Path

import everstep
import everstep.nodes
import pytest
from everstep.errors import Damaged
from everstep.exchange.client import PeerSource
from everstep.memory.header import Kind

from tests.exchange.kit import Job, digests_in_slots, erase, load_on, manifests

from .kit import BIG, IMAGE, damage, hold, load, save


@pytest.fixture
def held(root: Path, nodes: list[str], job: Job) -> list[str]:
    """Steps 1 and 2 of rank 0 on node a and rank 1 on node b; each node holds the other's. Nothing is on disk."""
    a, b = nodes[:2]
    save(job, [a, b], [1, 2])
    hold(root, a, b)
    hold(root, b, a)
    return nodes


def test_own_arenas_serve_and_nothing_is_transferred(root: Path, held: list[str]) -> None:
    a, b = held[:2]
    loads = load(root, [a, b]).check(2)
    assert loads.kinds() == [{"own"}] * 2
    assert loads.fallbacks(0) == loads.fallbacks(1) == ()


def test_ranks_that_moved_to_their_holders_transfer_nothing(root: Path, held: list[str]) -> None:
    a, b = held[:2]
    assert load(root, [b, a]).check(2).kinds() == [{"held"}] * 2
    assert manifests(root) == []


@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_lost_node_costs_nothing(root: Path, held: list[str], lost: str) -> None:
    a, b, fresh = held[:3]
    gone, left = (a, b) if lost == "a" else (b, a)
    erase(root, gone)
    places = [fresh if node == gone else left for node in (a, b)]
    loads = load(root, places).check(2)
    assert loads.kinds()[places.index(fresh)] == {"peer"}, "the new node's memory was empty"
    assert loads.kinds()[places.index(left)] == {"own"}
    assert manifests(root) == []


def test_a_spare_that_holds_it_takes_over_without_a_transfer(root: Path, nodes: list[str], job: Job) -> None:
    a, b, spare = nodes[:3]
    save(job, [a, b], [1, 2])
    hold(root, a, spare)
    hold(root, b, spare)
    erase(root, a)
    loads = load(root, [spare, b]).check(2)
    assert loads.kinds() == [{"held"}, {"own"}]
    assert loads.sources(0)["held"] > 3000 * 4


def test_a_smaller_and_a_larger_world_read_every_byte(root: Path, held: list[str]) -> None:
    a, b, fresh = held[:3]
    expected = digests_in_slots(root, [a, b], (1, 2))
    erase(root, a)
    for places in ([b], [fresh, b, b], [b, fresh]):
        for result in load_on(root, places):
            assert result.error is None
            assert result.values == expected


@pytest.mark.parametrize("region", [IMAGE, "layout", "meta", "state"])
def test_a_damaged_own_slot_is_made_good_by_its_holder(root: Path, held: list[str], region: str) -> None:
    a, b = held[:2]
    damage(root, a, Kind.OWN, 0, 2, region)
    loads = load(root, [a, b]).check(2)
    assert "rank 0" in loads.warned and region.removeprefix("image:") in loads.warned
    if region == IMAGE:
        assert loads.kinds()[0] == {"own", "peer"}, "the other image is right here"
        assert "slot of rank 0, image:own" in loads.fallbacks(0)[0]
        assert f"came from memory of node {b}" in loads.fallbacks(0)[0]


@pytest.mark.parametrize("region", [IMAGE, "layout", "meta", "state", "records"])
def test_damage_of_what_is_held_is_made_good_by_the_owners_node(
    root: Path, held: list[str], region: str
) -> None:
    """The ranks have changed places, so what is held is nearest; the owner's node has it too."""
    a, b = held[:2]
    damage(root, b, Kind.HELD, 0, 2, region)
    loads = load(root, [b, a]).check(2)
    assert "rank 0" in loads.warned
    assert loads.kinds()[1] == {"held"}
    if region == IMAGE:
        assert loads.kinds()[0] == {"held", "peer"}
    if region == "records":
        assert loads.kinds()[0] == {"peer"}, "nothing of it can be proved"


def test_damage_of_what_nobody_reads_changes_nothing(root: Path, held: list[str]) -> None:
    a, b = held[:2]
    damage(root, b, Kind.HELD, 0, 2)
    loads = load(root, [a, b]).check(2)
    assert loads.kinds() == [{"own"}] * 2 and loads.fallbacks(0) == ()


@pytest.mark.parametrize("region", [IMAGE, "state"])
def test_where_all_holders_are_damaged_the_next_older_step_is_next(
    root: Path, held: list[str], region: str
) -> None:
    a, b = held[:2]
    damage(root, a, Kind.OWN, 0, 2, region)
    damage(root, b, Kind.HELD, 0, 2, region)
    loads = load(root, [a, b]).check(1)
    assert "step 2" in loads.skipped(0) and "step 2" in loads.skipped(1)
    assert "passed over step 2" in loads.warned


def test_where_all_holders_are_damaged_the_disk_serves_those_chunks(
    root: Path, nodes: list[str], job: Job
) -> None:
    a, b = nodes[:2]
    save(job, [a, b], [1, 2], durable=[2], size=BIG)
    hold(root, a, b)
    at = (1 << 20) + 5
    damage(root, a, Kind.OWN, 0, 2, at=at)
    damage(root, b, Kind.HELD, 0, 2, at=at)
    loads = load(root, [a, b], size=BIG).check(2)
    chunk = 1 << 20
    assert loads.sources(0)["disk"] == chunk, "the one chunk that no memory has right"
    assert loads.sources(0).keys() == {"own", "disk"}
    assert len(loads.fallbacks(0)) == 2, "both who failed are named"


def test_each_chunk_comes_from_whoever_has_it_right(root: Path, nodes: list[str], job: Job) -> None:
    a, b = nodes[:2]
    save(job, [a, b], [1], size=BIG)
    hold(root, a, b)
    damage(root, a, Kind.OWN, 0, 1, at=5000)
    damage(root, b, Kind.HELD, 0, 1, at=(1 << 20) + 5000)
    loads = load(root, [a, b], size=BIG).check(1)
    assert loads.sources(0)["peer"] == 1 << 20
    loads = load(root, [b, a], size=BIG).check(1)
    assert loads.sources(0)["peer"] == 1 << 20, (
        "from the held one, and from the owner's node what is damaged there"
    )


def test_a_held_snapshot_of_a_former_placement_serves_where_the_newer_is_damaged(
    root: Path, held: list[str]
) -> None:
    """Two held ones of one rank on one node, of which the first that is found is damaged."""
    a, b = held[:2]
    damage(root, b, Kind.HELD, 0, 2)
    hold(root, a, b)
    erase(root, a)
    loads = load(root, [b, b]).check(2)
    assert loads.kinds() == [{"held"}, {"own"}]


def test_images_that_several_nodes_hold_in_part_make_one_snapshot(
    root: Path, nodes: list[str], job: Job
) -> None:
    """Neither node has the whole."""
    a, b, c = nodes[:3]
    save(job, [a, b], [1, 2])
    hold(root, a, b, without=["own"])
    hold(root, a, c, without=["more"])
    erase(root, a)
    assert load(root, [b, c], size=3000).check(2).kinds()[0] == {"held", "peer"}
    assert load(root, [c, b]).check(2).kinds() == [{"held", "peer"}, {"own"}]


def test_readers_share_out_the_holders_among_themselves(root: Path, nodes: list[str], job: Job) -> None:
    """Four ranks of two lost nodes, held by two others each: not all of it comes from one."""
    a, b, c, d = nodes
    save(job, [a, a, b, c], [1])
    for holder in (b, c):
        hold(root, a, holder)
    erase(root, a)
    labels: dict[int, set[str]] = {}

    class Counting(PeerSource):
        async def read_into(self, rank: int, image: str, offset: int, view: memoryview) -> None:
            labels.setdefault(rank, set()).add(self.label)
            await super().read_into(rank, image, offset, view)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(everstep.nodes, "PeerSource", Counting)
        load(root, [d, d, b, c]).check(1)
    assert {len(labels[rank]) for rank in (0, 1)} == {1}
    assert labels[0] != labels[1], "one from each holder"


def test_what_is_there_as_meta_alone_is_not_taken_for_whole(root: Path, nodes: list[str], job: Job) -> None:
    a, b = nodes[:2]
    save(job, [a, b], [1, 2], durable=[1])
    hold(root, a, b, without=["own"])
    erase(root, a)
    loads = load(root, [b, b]).check(1, "disk")
    assert "rank(s) [0]" in loads.warned


def test_nothing_at_all_is_left(root: Path, held: list[str]) -> None:
    a, b = held[:2]
    for step in (1, 2):
        damage(root, a, Kind.OWN, 0, step)
        damage(root, b, Kind.HELD, 0, step)
    for result in load(root, [a, b]).results:
        assert isinstance(result.error, Damaged)
        assert "step 2" in str(result.error) and "step 1" in str(result.error)
