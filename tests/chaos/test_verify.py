"""The verdict itself: it must see what it is there to see."""

from __future__ import annotations

from .plan import KINDS, Plan
from .verify import Life, Wiped, check_floors, check_numbers


def life(attempt: str, rank: int, began: float, resumed: int, through: int) -> Life:
    numbers = range(resumed + 1, through + 1)
    steps = [(began + step - resumed, step) for step in numbers]
    losses = {step: f"loss {step}" for step in numbers}
    return Life(
        attempt, rank, began, resumed, "memory", [], losses, steps, fingerprints={"/model/w": "right"}
    )


def test_a_resume_from_before_what_all_ranks_had_completed_is_seen() -> None:
    first = [life("a", 0, 100, 0, 9), life("a", 1, 100, 0, 8)]
    good = [life("b", 0, 200, 8, 20), life("b", 1, 200, 8, 20)]
    bad = [life("b", 0, 200, 7, 20), life("b", 1, 200, 7, 20)]
    assert check_floors([first, good], 2, [], late=False) == []
    assert len(check_floors([first, bad], 2, [], late=False)) == 2
    assert check_floors([first, bad], 2, [], late=True) == []
    assert check_floors([first, bad], 2, [Wiped(150, 5)], late=False) == []
    assert len(check_floors([first, bad], 2, [Wiped(150, 8)], late=False)) == 2
    assert check_floors([first[:1], bad], 2, [], late=False) == [], "one rank alone has completed nothing"


def test_a_durable_step_that_is_gone_is_seen() -> None:
    first = [life("a", 0, 100, 0, 9), life("a", 1, 100, 0, 9)]
    first[0].durable.append((105.0, 5))
    again = [life("b", 0, 200, 4, 20), life("b", 1, 200, 4, 20)]
    assert check_floors([first, again], 2, [Wiped(150, 4)], late=False) == []
    assert len(check_floors([first, again], 2, [Wiped(104, 4)], late=False)) == 2


def test_ranks_that_resume_from_different_steps_are_seen() -> None:
    assert len(check_floors([[life("a", 0, 100, 4, 9), life("a", 1, 100, 5, 9)]], 2, [], late=False)) == 1


def test_a_wrong_number_is_seen() -> None:
    right = [life("r", 0, 0, 0, 5)]
    assert check_numbers([[life("a", 0, 0, 0, 3)], [life("b", 0, 9, 2, 5)]], right, 5, 1) == []
    assert len(check_numbers([[life("a", 0, 0, 0, 3)]], right, 5, 1)) == 1, "steps are missing"
    wrong = life("a", 0, 0, 0, 5)
    wrong.losses[3] = "another"
    assert len(check_numbers([[wrong]], right, 5, 1)) == 1
    other = life("a", 0, 0, 0, 5)
    other.fingerprints = {"/model/w": "wrong"}
    assert len(check_numbers([[other]], right, 5, 1)) == 1
    unfinished = life("a", 0, 0, 0, 5)
    unfinished.fingerprints = None
    assert len(check_numbers([[unfinished]], right, 5, 1)) == 1


def test_seeds_are_themselves_and_cover_everything() -> None:
    plans = [Plan.of(seed) for seed in range(100, 140)]
    assert plans == [Plan.of(seed) for seed in range(100, 140)]
    drawn = [one for plan in plans for one in plan.disturbances]
    assert {one.kind for one in drawn} == set(KINDS)
    assert {plan.world for plan in plans} == {2, 3} and {plan.copy for plan in plans} == {"eager", "overlap"}
    assert any(plan.torchrun for plan in plans) and any(plan.agent == "inline" for plan in plans)
    assert {one.damage for one in drawn} == {None, "flip", "shorten", "remove"}
    assert any(one.wipe_memory and not one.wipe_runtime for one in drawn)
    assert any(one.wipe_runtime and not one.wipe_memory for one in drawn)
