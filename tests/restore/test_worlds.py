"""Loading by another number of ranks than saved, in simulated jobs: tensors, plain values, and what is a rank's own."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from everstep.errors import Damaged, NoCheckpoint, StateError, StateMismatch
from everstep.state.sharded import Shards
from everstep.state.trainstate import TrainState
from torch import nn

from .worlds import MemorySource, joined, load, numbered, quietly, split, values


def plain(value: Any, **more: Any) -> TrainState:
    return TrainState(rng=False, w=value, **more)


def blank(shape: tuple[int, ...], world: int) -> list[Shards]:
    return split(torch.full(shape, -1.0), world)


@pytest.mark.parametrize("size", [1, 5, 8])
@pytest.mark.parametrize(("saved", "loads"), [(1, 3), (2, 2), (3, 2), (2, 5), (4, 1), (5, 4)])
def test_shards_of_any_number_of_ranks_load_into_any(size: int, saved: int, loads: int) -> None:
    full = numbered(size, 3)
    source = MemorySource([plain({"t": part}) for part in split(full, saved)])
    targets = blank((size, 3), loads)
    load(source, [plain({"t": part}) for part in targets])
    assert torch.equal(joined(targets), full)


class Zero:
    """An optimizer of one's own over a range of a flattened tensor."""

    def __init__(self, shards: Shards) -> None:
        self.shards, self.given = shards, None

    def state_dict(self) -> dict[str, Any]:
        return {"master": self.shards, "count": [torch.zeros(2), self.shards]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state


def test_objects_get_back_the_shards_that_they_give_filled() -> None:
    full = numbered(7, 2)
    source = MemorySource([plain(Zero(part)) for part in split(full, 3)])
    zeros = [Zero(part) for part in blank((7, 2), 2)]
    load(source, [plain(zero) for zero in zeros])
    assert torch.equal(joined([zero.shards for zero in zeros]), full)
    for zero in zeros:
        assert zero.given is not None and zero.given["master"] is zero.shards is zero.given["count"][1]


def test_cut_another_way_and_in_several_boxes() -> None:
    full = numbered(6, 4)
    source = MemorySource([plain({"t": part}) for part in split(full, 3)])
    columns = [
        Shards(
            full.shape,
            [((0, at), (6, 2)), ((0, 3 - at), (2, 1))][: 1 + at],
            [torch.zeros(6, 2), torch.zeros(2, 1)][: 1 + at],
        )
        for at in (0,)
    ]
    columns.append(Shards(full.shape, [((0, 2), (6, 2))], [torch.zeros(6, 2)]))
    load(source, [plain({"t": part}) for part in columns])
    assert torch.equal(joined(columns), full)
    pieces = Shards(full.shape, [((5, 0), (1, 2)), ((0, 1), (2, 3))], [torch.zeros(1, 2), torch.zeros(2, 3)])
    load(source, [plain({"t": pieces})])
    assert torch.equal(pieces.tensors[0], full[5:, :2]) and torch.equal(pieces.tensors[1], full[:2, 1:])


def test_whole_targets_of_sharded_tensors_and_the_reverse() -> None:
    full = numbered(7)
    sharded = MemorySource([plain({"t": part}) for part in split(full, 3)])
    target = {"t": torch.zeros(7)}
    address = target["t"].data_ptr()
    load(sharded, [plain(target)])
    assert torch.equal(target["t"], full) and target["t"].data_ptr() == address
    assert torch.equal(values(sharded)["w"]["t"], full)
    alone = MemorySource([plain({"t": full})])
    parts = blank((7,), 2)
    load(alone, [plain({"t": part}) for part in parts])
    assert torch.equal(joined(parts), full)


def test_regions_without_contiguous_memory_and_of_another_dtype() -> None:
    full = numbered(4, 4)
    source = MemorySource([plain({"t": part}) for part in split(full, 2)])
    strided = torch.zeros(4, 4).t()[:2]
    load(source, [plain({"t": Shards(full.shape, [((0, 0), (2, 4))], [strided])})])
    assert torch.equal(strided, full[:2])
    halves = Shards(full.shape, [((2, 0), (2, 4))], [torch.zeros(2, 4, dtype=torch.float64)])
    with pytest.raises(StateMismatch, match="stored float32, target float64"):
        load(source, [plain({"t": halves})])
    assert load(source, [plain({"t": halves})], {"dtype"})[0][0].startswith("dtype: w/t")
    assert torch.equal(halves.tensors[0], full[2:].double())


def test_the_global_shape_must_match_exactly() -> None:
    source = MemorySource([plain({"t": part}) for part in split(numbered(6, 2), 2)])
    for shape in ((6, 3), (5, 2), (12,), (6, 2, 1)):
        targets = blank(shape, 3)
        with pytest.raises(StateMismatch, match=re.escape("w/t: stored (6, 2), target (")):
            load(source, [plain({"t": part}) for part in targets])
        assert all((tensor == -1).all() for part in targets for tensor in part.tensors)


def test_a_missing_key_is_named_and_nothing_live_is_touched_on_any_rank() -> None:
    source = MemorySource([plain({"t": part}) for part in split(numbered(6), 2)])
    targets = [{"t": part} for part in blank((6,), 3)]
    targets[2]["gone"] = torch.zeros(1)  # type: ignore[assignment]
    with pytest.raises(StateMismatch, match="missing: w/gone"):
        load(source, [plain(target) for target in targets])
    assert all((tensor == -1).all() for target in targets for tensor in target["t"].tensors)


def test_what_no_rank_takes_is_unexpected_and_what_one_takes_is_not() -> None:
    """Two stages of a pipeline into three ranks, each of which wants a part of the keys."""
    full = {name: numbered(4) + at for at, name in enumerate("abcd")}
    stages = [plain({name: full[name] for name in names}) for names in ("ab", "cd")]
    source = MemorySource(stages)
    targets = [{name: torch.zeros(4) for name in names} for names in ("a", "bc", "d")]
    load(source, [plain(target) for target in targets])
    assert all(torch.equal(tensor, full[name]) for target in targets for name, tensor in target.items())
    with pytest.raises(StateMismatch, match="unexpected: w/d") as caught:
        load(source, [plain({name: torch.zeros(4) for name in names}) for names in ("a", "bc", "c")])
    assert "w/a" not in str(caught.value)
    loosened = load(
        source, [plain({name: torch.zeros(4) for name in names}) for names in ("a", "bc")], {"unexpected"}
    )
    assert [len(some) for some in loosened] == [
        0,
        1,
    ]  # as many ranks as saved: told by the one that stored it


def test_stages_in_another_place_at_the_same_number_of_ranks() -> None:
    stages = [plain({"a": numbered(3)}), plain({"b": numbered(3) + 5})]
    targets = [{"b": torch.zeros(3)}, {"a": torch.zeros(3)}]
    load(MemorySource(stages), [plain(target) for target in targets])
    assert torch.equal(targets[0]["b"], numbered(3) + 5) and torch.equal(targets[1]["a"], numbered(3))


def test_each_rank_gets_its_own_at_the_same_number_of_ranks() -> None:
    source = MemorySource(
        [
            plain({"t": part, "own": torch.tensor([rank]), "n": rank})
            for rank, part in enumerate(split(numbered(5), 3))
        ]
    )
    targets = [{"t": part, "own": torch.tensor([-1]), "n": -1} for part in blank((5,), 3)[::-1]]
    load(source, [plain(target) for target in targets])
    assert [target["n"] for target in targets] == [0, 1, 2]
    assert [target["own"].item() for target in targets] == [0, 1, 2]
    assert torch.equal(joined([target["t"] for target in targets]), numbered(5))
    assert sorted(source.asked) == [0, 1, 2]  # each its own image, and no other


def test_own_values_that_a_rank_does_not_take_are_unexpected_though_another_takes_its_own() -> None:
    source = MemorySource([plain({"a": torch.ones(1), "b": torch.ones(1) * rank}) for rank in range(2)])
    with pytest.raises(StateMismatch, match="unexpected: w/b"):
        load(source, [plain({"a": torch.zeros(1), "b": torch.zeros(1)}), plain({"a": torch.zeros(1)})])


def test_own_copies_that_are_equal_to_one_that_is_taken_are_none_that_is_lost() -> None:
    """Sharded alike over all ranks, then stages of as many ranks: a counter or buffer is then needed once."""

    def saved(*fill: float) -> MemorySource:
        parts = split(numbered(9), 3)
        return MemorySource(
            [
                plain({"t": part, "a": torch.ones(2), "b": torch.full((3,), float(at))})
                for part, at in zip(parts, fill, strict=True)
            ]
        )

    def stages() -> tuple[list[dict[str, Any]], list[TrainState]]:
        targets: list[dict[str, Any]] = [{"t": torch.zeros(9)}, {"a": torch.zeros(2)}, {"b": torch.zeros(3)}]
        return targets, [plain(target) for target in targets]

    targets, states = stages()
    load(saved(2, 2, 2), states)
    assert torch.equal(targets[0]["t"], numbered(9))
    assert torch.equal(targets[1]["a"], torch.ones(2)) and torch.equal(targets[2]["b"], torch.full((3,), 2.0))
    for fill in ((2, 3, 2), (3, 2, 2)):
        targets, states = stages()
        with pytest.raises(StateMismatch, match="unexpected: w/b"):
            load(saved(*fill), states)
        assert not any(tensor.any() for target in targets for tensor in target.values())
    targets, states = stages()
    targets[1].update(t=torch.zeros(9))
    del targets[1]["a"]
    with pytest.raises(StateMismatch, match="unexpected: w/a"):
        load(saved(2, 2, 2), states)


def test_what_others_alone_have_is_not_told_where_something_is_missing() -> None:
    """At the same number of ranks: looking at others' keys for what a rank lacks makes none of these unexpected."""
    source = MemorySource(
        [plain({"a": numbered(2), f"own{rank}": numbered(1), f"n{rank}": rank}) for rank in range(2)]
    )
    targets = [
        {"a": torch.zeros(2), f"own{rank}": torch.zeros(1), f"n{rank}": -1, "new": torch.zeros(1)}
        for rank in range(2)
    ]
    targets[0]["own1"] = torch.zeros(1) - 1
    loosened = load(source, [plain(target) for target in targets], {"missing"})
    assert loosened == [("missing: w/new: in the target, not in the checkpoint",)] * 2
    assert torch.equal(targets[0]["own1"], numbered(1))
    assert [target[f"n{rank}"] for rank, target in enumerate(targets)] == [0, 1]


def test_tensors_of_each_rank_elsewhere_only_if_equal_or_allowed() -> None:
    def states(*fill: float) -> MemorySource:
        # Beside a shard, so that no two images are equal, and alone, so that all are.
        return MemorySource(
            [
                TrainState(
                    rng=False, w={"t": part, "own": torch.full((3,), at)}, v={"own": torch.full((2,), at)}
                )
                for at, part in zip(fill, split(numbered(6), len(fill)), strict=True)
            ]
        )

    def targets(world: int) -> list[TrainState]:
        return [
            TrainState(rng=False, w={"t": part, "own": torch.zeros(3)}, v={"own": torch.zeros(2)})
            for part in blank((6,), world)
        ]

    for world in (1, 3):
        made = targets(world)
        assert load(states(7.0, 7.0), made) == [()] * world
        assert all((state.others["w"]["own"] == 7).all() for state in made)
        assert all((state.others["v"]["own"] == 7).all() for state in made)
    made = targets(3)
    with pytest.raises(StateMismatch, match=r"ranks: v/own.*ranks \[0, 1\]|ranks: v/own") as caught:
        load(states(7.0, 8.0), made)
    assert (
        "w/own" in str(caught.value) and "replicated=" in str(caught.value) and "'ranks'" in str(caught.value)
    )
    assert all((state.others["w"]["own"] == 0).all() for state in made)
    loosened = load(states(7.0, 8.0), made, {"ranks"})
    assert [state.others["w"]["own"][0].item() for state in made] == [7, 8, 7]
    assert [state.others["v"]["own"][0].item() for state in made] == [7, 8, 7]
    assert all(len(some) == 2 and some[0].startswith("ranks: ") for some in loosened)


def test_a_region_is_never_made_of_different_ranks_copies() -> None:
    unequal = MemorySource([plain({"t": numbered(4) + rank}) for rank in range(2)])
    targets = blank((4,), 2)
    with pytest.raises(StateMismatch, match="ranks: w/t"):
        load(unequal, [plain({"t": part}) for part in targets])
    load(unequal, [plain({"t": part}) for part in targets], {"ranks"})
    assert torch.equal(joined(targets), numbered(4))
    equal = MemorySource([plain({"t": numbered(4)}) for _ in range(2)])
    targets = blank((4,), 2)
    load(equal, [plain({"t": part}) for part in targets])
    assert torch.equal(joined(targets), numbered(4))


def test_plain_values_elsewhere_only_if_all_ranks_have_the_same() -> None:
    def states(*numbers: int) -> MemorySource:
        return MemorySource(
            [
                plain({"t": numbered(2)}, replicated="w", extra={"n": n, "same": "x", "h": [1, n]})
                for n in numbers
            ]
        )

    target = plain({"t": torch.zeros(2)}, replicated="w", extra={"n": 0, "same": "", "h": []})
    load(states(4, 4), [target])
    assert target.extra == {"n": 4, "same": "x", "h": [1, 4]}
    made = [plain({"t": torch.zeros(2)}, extra={"n": 0, "same": "", "h": []}) for _ in range(3)]
    with pytest.raises(StateMismatch, match=r"ranks: extra/h: .*rank\(s\) \[1\]") as caught:
        load(states(4, 5), made)
    assert "extra/n" in str(caught.value) and "extra/same" not in str(caught.value)
    assert all(state.extra["n"] == 0 and (state.others["w"]["t"] == 0).all() for state in made)
    loosened = load(states(4, 5), made, {"ranks"})
    assert [state.extra["n"] for state in made] == [4, 5, 4]
    assert all(len(some) == 2 for some in loosened)
    assert load(states(4, 5), [plain({"t": torch.zeros(2)})], parts=["w"]) == [
        ()
    ]  # what is not taken may differ


def test_lists_that_differ_in_length_are_found() -> None:
    source = MemorySource([plain({"t": numbered(1)}, replicated="w", extra={"l": [1] * n}) for n in (1, 2)])
    with pytest.raises(StateMismatch, match="extra/l"):
        load(source, [plain({"t": torch.zeros(1)}, extra={"l": []})])


class Drawing:
    """A loader with a position of its own on each rank."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": torch.tensor([self.at])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_loaders_are_divided_anew_by_the_callback_alone() -> None:
    source = MemorySource([TrainState(rng=False, loader=Drawing(10 + rank)) for rank in range(2)])
    made = [TrainState(rng=False, loader=Drawing(rank)) for rank in range(2)]
    load(source, made)
    assert [state.loader.at for state in made] == [10, 11]
    made = [TrainState(rng=False, loader=Drawing(rank)) for rank in range(3)]
    with pytest.raises(StateMismatch, match=r"loader: .*reshard_loader"):
        load(source, made)
    assert [some[0][:7] for some in load(source, made, {"loader"})] == ["loader:"] * 3
    assert [state.loader.at for state in made] == [0, 1, 2]

    def divide(states: list[Any], rank: int, world: int) -> Any:
        assert [state["seen"].item() for state in states] == [10, 11]
        return {"at": sum(state["at"] for state in states) * 100 + rank * 10 + world}

    made = [TrainState(rng=False, loader=Drawing(0), reshard_loader=divide) for rank in range(3)]
    load(source, made)
    assert [state.loader.at for state in made] == [2103, 2113, 2123]

    def fails(states: list[Any], rank: int, world: int) -> Any:
        raise KeyError("epoch")

    with pytest.raises(StateError, match="reshard_loader failed for rank 0 of 1: KeyError"):
        load(source, [TrainState(rng=False, loader=Drawing(0), reshard_loader=fails)])


def test_finite_and_endless_data_are_not_mixed() -> None:
    source = MemorySource([TrainState(rng=False, loader=Drawing(1), data="stream")], kind="stream")
    with pytest.raises(StateMismatch, match="data='stream'"):
        load(source, [TrainState(rng=False, loader=Drawing(0), data="finite")])


def test_random_numbers_are_each_ranks_own_or_new_ones_with_a_warning() -> None:
    torch.manual_seed(1)
    random.seed(1)
    source = MemorySource([TrainState(x=torch.zeros(1), replicated="x") for _ in range(2)])
    expected = torch.rand(2)

    def drawn(world: int, rank: int) -> tuple[float, float]:
        """What rank ``rank`` draws; the others load too, but this process has only one set of generators."""
        states = [TrainState(x=torch.zeros(1), rng=at == rank) for at in range(world)]
        load(source, states, {"unexpected"} if world > 1 else ())
        return torch.rand(1).item(), random.random()

    torch.manual_seed(2)
    load(source, [TrainState(x=torch.zeros(1)), TrainState(x=torch.zeros(1), rng=False)], {"unexpected"})
    assert torch.equal(torch.rand(2), expected)
    with pytest.warns(RuntimeWarning, match=r"by 2 rank\(s\) and is loaded by 1.*derived"):
        alone = drawn(1, 0)
    again = quietly(drawn, 1, 0)
    three = [quietly(drawn, 3, rank) for rank in range(3)]
    assert (
        alone == again
        and len({alone, *three}) == 4
        and three == [quietly(drawn, 3, rank) for rank in range(3)]
    )


class Seeding:
    """Seeds torch when it is asked for its state, which is before the generators are."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def state_dict(self) -> dict[str, Any]:
        torch.manual_seed(self.seed)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_random_numbers_elsewhere_come_from_rank_0_alone() -> None:
    def drawn(*seeds: int) -> float:
        random.seed(0)
        np.random.seed(0)
        source = MemorySource(
            [TrainState(x=torch.zeros(1), ema=Seeding(seed), replicated="x") for seed in seeds]
        )
        states = [TrainState(x=torch.zeros(1), ema=Seeding(0), rng=rank == 1) for rank in range(3)]
        quietly(load, source, states, {"unexpected"})
        return torch.rand(1).item()

    assert drawn(1, 2) == drawn(1, 3) != drawn(2, 2)


def test_a_failure_on_one_rank_is_the_same_verdict_on_all() -> None:
    source = MemorySource([plain({"t": part}) for part in split(numbered(4), 2)])
    source.damage(1, "w")
    targets = blank((4,), 3)
    with pytest.raises(Damaged, match="1/w"):
        load(source, [plain({"t": part}) for part in targets])


# -- as values


def test_values_are_whole_and_merged() -> None:
    full = numbered(6, 2)
    source = MemorySource(
        [
            TrainState(
                rng=False,
                w={"t": part, "own": torch.tensor([rank])},
                stage={f"s{rank}": numbered(2) + rank},
                extra={"n": rank},
            )
            for rank, part in enumerate(split(full, 3))
        ]
    )
    for rank in range(3):
        found = values(source, rank)
        assert (
            torch.equal(found["w"]["t"], full)
            and found["w"]["own"].item() == rank
            and found["extra"] == {"n": rank}
        )
        assert {name: tensor[0].item() for name, tensor in found["stage"].items()} == {
            "s0": 0,
            "s1": 1,
            "s2": 2,
        }
    with pytest.raises(NoCheckpoint, match="no rank 3"):
        values(source, 3)


def test_keys_select_by_patterns() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    source = MemorySource(
        [
            TrainState(
                model,
                rng=False,
                extra={"a": 1, "deep": {"x": 2, "y": torch.ones(1)}, "l": [torch.zeros(1), 5]},
            )
        ]
    )
    assert set(values(source, keys=["model/0.*"])["model"]) == {"0.weight", "0.bias"}
    assert values(source, keys="extra/a") == {"extra": {"a": 1}}
    found = values(source, keys=["extra/deep/y", "*/1.running_*"])
    assert (
        found.keys() == {"extra", "model"}
        and found["extra"].keys() == {"deep"}
        and found["extra"]["deep"].keys() == {"y"}
    )
    assert set(found["model"]) == {"1.running_mean", "1.running_var"}
    assert values(source, keys="extra/l/[[]1]")["extra"]["l"][1] == 5
    assert values(source, keys="extra", parts=["extra"])["extra"]["deep"]["x"] == 2
    with pytest.raises(StateMismatch, match="no key of the checkpoint matches") as caught:
        values(source, keys=["model/0.wieght"])
    assert "model/0.weight" in str(caught.value)
    with pytest.raises(StateMismatch, match="no part called modle"):
        values(source, parts=["modle"])


def test_as_a_rank_of_the_job_that_saved() -> None:
    source = MemorySource(
        [plain({"t": part}, extra={"n": rank}) for rank, part in enumerate(split(numbered(4), 2))]
    )
    target = plain({"t": torch.zeros(4)}, extra={"n": -1})
    load(source, [target], rank=1)
    assert target.extra["n"] == 1 and torch.equal(target.others["w"]["t"], numbered(4))
