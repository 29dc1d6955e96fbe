"""The comparison of hashes, without any storage."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from everstep.format.layout import Box, Entry, EntrySpec, Scope, build_layout
from everstep.plan import agreement
from everstep.plan.agreement import Disagreement, disagreements, equal_parts, name_of, windows


def entries(*keys: str, scope: Scope = Scope.RANK, part: str = "model", items: int = 4) -> tuple[Entry, ...]:
    full = (Box.full((items,)),)
    return build_layout([EntrySpec(part, key, "float32", (items,), full, scope) for key in keys]).entries


def own(layout: tuple[Entry, ...], **values: str) -> dict[str, str]:
    """One rank's hashes: ``values`` by key, ``x`` for the rest."""
    return {name_of(entry): values.get(entry.key, "x") for entry in layout}


def test_equal_hashes_are_no_disagreement() -> None:
    assert disagreements({0: {"model/w": "a"}, 1: {"model/w": "a"}, 2: {}}) == []
    assert disagreements({0: {"model/w": "a"}, 1: {"model/v": "b"}}) == [], "nobody contradicts"


def test_a_disagreement_names_key_and_ranks() -> None:
    found = disagreements({rank: {"model/w": "b" if rank == 2 else "a", "model/v": "c"} for rank in range(4)})
    assert found == [Disagreement("model", "w", ((0, 1, 3), (2,)))]
    assert found[0].odd == (2,)
    assert "model/w is different on rank 2 than on ranks 0, 1, 3" in found[0].text()
    assert "stored is that of rank 2" in replace(found[0], stored=2).text()


def test_two_against_two_have_no_majority() -> None:
    (found,) = disagreements({rank: {"m/w": "ab"[rank % 2]} for rank in range(4)})
    assert found.groups == ((0, 2), (1, 3)) and found.odd == ()
    assert "ranks 0, 2 and ranks 1, 3" in found.text()


def test_what_is_each_ranks_own_never_disagrees() -> None:
    layout = entries("w")
    assert disagreements({0: own(layout, w="a"), 1: own(layout, w="b")}) == []


def test_boxes_make_other_names() -> None:
    left, right = Box((0,), (4,)), Box((4,), (4,))
    names = {
        agreement.entry_name("m", "w", (8,), boxes, Scope.GLOBAL)
        for boxes in ([left], [right], [left, right], [Box.full((8,))])
    }
    assert len(names) == 4 and "m/w" in names and "m/w@0:4" in names
    assert agreement.split_name("m/w@0:4+4:4") == ("m", "w@0:4+4:4")


@pytest.mark.parametrize("part", ["model", "a/b", "a~1b", "~0@", "@rank"])
def test_names_come_apart_again(part: str) -> None:
    for scope in Scope:
        name = agreement.entry_name(part, "x/y", (3,), (Box.full((3,)),), scope)
        assert agreement.split_name(name) == (part, "x/y")


def test_many_disagreements_are_counted_and_cut() -> None:
    hashes = {rank: {f"m/{i:03}": str(rank) for i in range(100)} for rank in range(300)}
    found = disagreements(hashes)
    assert len(found) == 100
    facts = agreement.disagreement_facts(found)
    assert facts["count"] == 100 and len(facts["entries"]) == agreement.KEPT_MAX
    assert facts["text"].endswith("and 92 more") and len(facts["text"]) < 4000


def test_equal_own_tensors_are_found_by_part() -> None:
    layout = (*entries("w", "b"), *entries("m", part="optimizer"), *entries("n", part="other"))
    hashes = {rank: own(layout, n=str(rank)) for rank in range(3)}
    parts = equal_parts(hashes, 3, layout)
    assert [(p.part, p.tensors, p.nbytes, p.whole) for p in parts] == [
        ("model", 2, 32, True),
        ("optimizer", 1, 16, True),
    ]
    facts = agreement.equality_facts(parts, 3)
    assert facts["saves"] == 2 * 48
    text = agreement.equality_text(facts)
    assert "TrainState(replicated={'model', 'optimizer'}) saves 96 B" in text and "2 tensors" in text


def test_a_part_with_one_tensor_that_differs_is_not_to_be_marked() -> None:
    layout = entries("w", "b")
    parts = equal_parts({rank: own(layout, b=str(rank)) for rank in range(2)}, 2, layout)
    assert [(p.tensors, p.whole) for p in parts] == [(1, False)]
    facts = agreement.equality_facts(parts, 2)
    assert facts["saves"] == 0 and "replicated=" not in agreement.equality_text(facts)


def test_a_part_is_not_whole_where_a_rank_has_more_of_it_or_a_tensor_was_not_compared() -> None:
    layout = entries("w", "b")
    more = entries("w", "b", "extra")
    assert not equal_parts({0: own(layout), 1: own(more)}, 2, layout)[0].whole
    some = {name_of(layout[0]): "x"}
    assert not equal_parts({0: some, 1: some}, 2, layout)[0].whole
    buffer = entries("b", scope=Scope.FIRST)
    assert not equal_parts({0: some, 1: some}, 2, (layout[0], *buffer))[0].whole


def test_nothing_is_said_unless_all_ranks_speak() -> None:
    layout = entries("w")
    assert equal_parts({0: own(layout)}, 2, layout) == []
    assert equal_parts({0: own(layout), 1: {}}, 2, layout) == []
    assert equal_parts({0: own(layout)}, 1, layout) == []


def test_own_entries_leave_out_what_is_each_ranks_own_by_nature() -> None:
    layout = (*entries("w", "v"), *entries("torch", part="rng"), *entries("g", scope=Scope.GLOBAL))
    assert agreement.own_entries(layout, 2) == [1, 0]
    assert len(agreement.own_entries(layout, agreement.HASHES_MAX)) == 1


@pytest.mark.parametrize("seed", range(20))
def test_windows_hold_every_entry_once_within_the_bounds(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    sizes = [
        ("m", f"k{i}", rng.choice([4, 1000, rng.randrange(200 << 20)])) for i in range(rng.randrange(1, 300))
    ]
    least, world = rng.randrange(1, 20), rng.choice([2, 8, agreement.HASHES_MAX // 5])
    found = windows(sizes, least, world)
    assert sorted(i for window in found for i in window) == list(range(len(sizes)))
    assert len(found) >= least
    largest = max(nbytes for _, _, nbytes in sizes)
    for window in found:
        assert sum(sizes[i][2] for i in window) <= agreement.AUDIT_BYTES + largest
    shuffled = rng.sample(sizes, len(sizes))
    keys = [{sizes[i][1] for i in window} for window in found]
    assert keys == [{shuffled[i][1] for i in window} for window in windows(shuffled, least, world)]


def test_windows_of_small_entries_are_even_and_bounded_in_number() -> None:
    found = windows([("m", f"{i}", 4) for i in range(1000)], 10, 2)
    assert [len(window) for window in found] == [100] * 10
    many = windows([("m", f"{i}", 4) for i in range(1000)], 10, agreement.HASHES_MAX // 5)
    assert max(map(len, many)) <= 5
    assert windows([], 10, 2) == []
