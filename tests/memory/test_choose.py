from __future__ import annotations

from everstep.memory.choose import Candidate, Key, choose
from hypothesis import given
from hypothesis import strategies as st


def slots(*keys: Key | None, busy: tuple[int, ...] = ()) -> list[Candidate]:
    return [Candidate(index, key is None, key, index in busy) for index, key in enumerate(keys)]


def test_free_slots_first() -> None:
    assert choose(slots((1, 1), None, (1, 2)), 1, (1, 2)) == 1


def test_the_oldest_before_w() -> None:
    assert choose(slots((1, 5), (1, 4), (1, 6)), 1, (1, 6)) == 1


def test_never_w_nor_what_comes_after_it() -> None:
    assert choose(slots((1, 5), (1, 6), (1, 7)), 1, (1, 5)) is None
    assert choose(slots((1, 5), (1, 6), (1, 7)), 1, None) is None


def test_never_a_pinned_one() -> None:
    assert choose(slots((1, 4), (1, 5), (1, 6), busy=(0,)), 1, (1, 6)) == 1


def test_steps_that_a_resume_left_are_reused_before_older_ones_of_the_lineage() -> None:
    # Incarnation 2 adopted step 5 of incarnation 1; its steps 6 are cut off.
    assert choose(slots((1, 4), (1, 5), (1, 6)), 2, (1, 5)) == 2
    assert choose(slots((1, 4), (1, 5), (2, 6)), 2, (1, 5)) == 0
    assert choose(slots((2, 7), (1, 5), (2, 6)), 2, (1, 5)) is None
    assert choose(slots((2, 7), (1, 5), (2, 6)), 2, (2, 6)) == 1


def test_unreadable_ones_are_reused() -> None:
    assert choose([Candidate(0, False, None, False), *slots((1, 1))], 1, (1, 1)) == 0


def test_a_newer_incarnations_snapshot_is_left_alone() -> None:
    assert choose(slots((3, 1), (3, 2)), 2, (1, 9)) is None


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Candidate], int, Key | None]:
    key = st.tuples(st.integers(1, 3), st.integers(1, 6))
    found = draw(st.lists(st.one_of(st.none(), key), max_size=5, unique_by=lambda k: k or object()))
    busy = draw(st.sets(st.integers(0, 4)))
    incarnation = draw(st.integers(1, 3))
    complete = draw(st.one_of(st.none(), st.tuples(st.integers(1, incarnation), st.integers(1, 6))))
    return slots(*found, busy=tuple(busy)), incarnation, complete


@given(situations())
def test_what_is_protected_is_never_chosen(situation: tuple[list[Candidate], int, Key | None]) -> None:
    found, incarnation, complete = situation
    index = choose(found, incarnation, complete)

    def protected(slot: Candidate) -> bool:
        if slot.busy or slot.key is None:
            return slot.busy
        newer = slot.key[0] == incarnation and (complete is None or slot.key > complete)
        return slot.key == complete or newer or slot.key[0] > incarnation

    if index is None:
        assert all(protected(slot) for slot in found)
    else:
        assert not protected(found[index])
