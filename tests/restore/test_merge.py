"""State images of several ranks as one, and whose values they have not in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from everstep.format.layout import Box, Entry, Layout, Scope
from everstep.plan import whose
from everstep.state.codec import StateImage
from everstep.state.merge import Saved, differences, merged, selected
from everstep.state.plan_base import StoredTensor
from everstep.state.registry import ObjectState
from everstep.state.tree import flatten


def saved(rank: int, parts: dict[str, Any]) -> Saved:
    flat = flatten(parts)
    entries = [
        Entry(leaf.part, leaf.key, leaf.dtype, leaf.shape, leaf.boxes, leaf.scope, 0, 0, leaf.nbytes)
        for leaf in flat.leaves
    ]
    return Saved(rank, StateImage(flat.state, name=f"image {rank}"), entries)


def united(*parts: dict[str, Any], **options: Any) -> tuple[dict[str, Any], Any]:
    """(values by part, each tensor as "rank:key"; the skeleton)"""
    skeleton = merged([saved(rank, one) for rank, one in enumerate(parts)], **options)

    def named(index: int) -> Any:
        entry = skeleton.entries[index]
        return f"{skeleton.ranks[index]}:{entry.key}"

    decoder = skeleton.image.decoder(named)
    return {part: decoder.value(node) for part, node in skeleton.image.parts.items()}, skeleton


T = torch.zeros(2)


def test_dicts_that_hold_tensors_are_united_and_others_are_not() -> None:
    found, _ = united(
        {"w": {"a": T.clone(), "deep": {1: T.clone()}, "n": 1}, "plain": {"x": 1}, "list": [T.clone()]},
        {
            "w": {"b": T.clone(), "deep": {2: T.clone()}, "n": 2},
            "plain": {"x": 2, "y": 3},
            "list": [T.clone(), T.clone()],
            "more": 5,
        },
    )
    assert found == {
        "w": {"a": "0:a", "deep": {1: "0:deep/#1", 2: "1:deep/#2"}, "n": 1, "b": "1:b"},
        "plain": {"x": 1},
        "list": ["0:[0]"],
        "more": 5,
    }


def test_what_the_image_says_twice_stays_one_object() -> None:
    shared: list[Any] = [1]
    found, _ = united(
        {"a": {"t": T, "one": shared, "two": shared}}, {"a": {"u": T, "three": shared, "four": shared}}
    )
    value = found["a"]
    assert (
        value["one"] is value["two"]
        and value["three"] is value["four"]
        and value["one"] is not value["three"]
    )
    assert value == {"t": "0:t", "one": [1], "two": [1], "u": "1:u", "three": [1], "four": [1]}


def test_every_kind_of_node_is_copied() -> None:
    import collections
    import datetime

    parts = {
        "p": {
            "t": T,
            "ints": [1, 2, 3],
            "tuple": (1, (20, T.clone())),
            "ordered": collections.OrderedDict(a=1, b=[5]),
            "deque": collections.deque([1, 2], 5),
            "counter": collections.Counter("aab"),
            "default": collections.defaultdict(list, {"k": [1]}),
            "mixed": {1: 2, (3, 4): "x", None: b"y"},
            "array": np.arange(3),
            "large": np.arange(100000),
            "date": datetime.date(2020, 1, 2),
            "set": {1, 2},
        }
    }
    found, skeleton = united(parts, {"p": {"u": T}})
    value = found["p"]
    assert value.pop("u") == "1:u"
    assert value.pop("large") is not None and value.pop("array").tolist() == [0, 1, 2]
    expected = {key: item for key, item in parts["p"].items() if key not in ("large", "array")}
    expected["t"], expected["tuple"] = "0:t", (1, (20, "0:tuple/[1]/[1]"))
    assert value == expected and type(value["ordered"]) is collections.OrderedDict
    assert sorted(skeleton.ranks[index] for index in skeleton.image.refs("p")) == [0, 0, 0, 1]


def optimizer(**states: float) -> ObjectState:
    groups = [{"lr": 0.1, "params": list(states)}]
    return ObjectState(
        "torch.optim:Adam",
        {"state": {k: {"m": T.clone(), "n": v} for k, v in states.items()}, "param_groups": groups},
    )


def test_optimizers_by_name_are_united_and_by_position_are_not() -> None:
    found, _ = united({"o": optimizer(a=1, b=2)}, {"o": optimizer(b=9, c=3)})
    content = found["o"]
    assert content["state"] == {
        "a": {"m": "0:state/a/m", "n": 1},
        "b": {"m": "0:state/b/m", "n": 2},
        "c": {"m": "1:state/c/m", "n": 3},
    }
    assert [group["params"] for group in content["param_groups"]] == [["a", "b"], ["c"]]
    first = {"state": {0: {"m": T}}, "param_groups": [{"params": [0]}]}
    second = {"state": {0: {"m": T}, 1: {"m": T.clone()}}, "param_groups": [{"params": [0, 1]}]}
    assert united({"o": first}, {"o": second})[0]["o"]["state"] == {0: {"m": "0:state/#0/m"}}


def test_parts_of_one_rank_alone_and_of_every_rank() -> None:
    parts = [{"rng": rank, "loader": {"at": rank, "seen": T}} for rank in range(3)]
    skeleton = merged(
        [saved(rank, parts[rank]) for rank in (2, 0, 1)], taken={"rng": 0}, each={"loader": range(3)}
    )
    decoder = skeleton.image.decoder(lambda index: skeleton.ranks[index])
    assert decoder.value(skeleton.image.parts["rng"]) == 0
    assert decoder.value(skeleton.image.parts["loader"]) == {"at": 2, "seen": 2}
    assert [decoder.value(node) for node in skeleton.each["loader"]] == [
        {"at": n, "seen": n} for n in range(3)
    ]


def test_differences_are_of_what_both_have() -> None:
    nan = float("nan")

    def one(rank: int, **more: Any) -> Saved:
        own = {f"t{rank}": T, "n": nan, "l": [1, T.clone()], "d": {"x": 1, "y": {"z": 2}}, **more}
        return saved(rank, {"p": own, "o": optimizer(**{f"w{rank}": rank, "both": 1})})

    parts = ("p", "o")
    assert differences(one(0), [one(1), one(2)], parts) == {}
    assert differences(one(0), [one(1), one(2, n=1.0)], parts) == {"p/n": [2]}
    assert differences(one(0), [one(1, d={"x": 1, "y": {"z": 3}})], parts) == {"p/d/y/z": [1]}
    assert differences(one(0), [one(1, d={"x": 1, "y": {"q": 2}})], parts) == {"p/d/y": [1]}
    assert differences(one(0), [one(1, l=[1, T, T.clone()]), one(2, l=[2, T.clone()])], parts) == {
        "p/l": [1],
        "p/l/[0]": [2],
    }

    def groups(*names: str) -> Saved:
        content = {"state": {}, "param_groups": [{"lr": 0.2, "params": list(names)}]}
        return saved(1, {"o": ObjectState("torch.optim:Adam", content)})

    assert differences(one(0), [groups("w1", "both")], parts) == {"o/param_groups/[0]/lr": [1]}
    assert differences(one(0), [groups("w1")], parts) == {}  # another stage's group
    assert differences(one(0), [one(1)], ["absent"]) == {}


def test_selecting_leaves_the_image_as_it_is() -> None:
    one = saved(0, {"a": {"x": T, "y": 1}, "b": [T.clone()]})
    short = selected(one.image, ["a", "b"], ["a/x"])
    assert list(short.parts) == ["a"]
    assert short.decoder(StoredTensor).value(short.parts["a"]) == {"x": StoredTensor(0)}
    assert set(one.image.decoder(StoredTensor).value(one.image.parts["a"])) == {"x", "y"}


# -- whose


def layout(*keys: str, scope: Scope = Scope.RANK) -> Layout:
    return Layout(tuple(entry(key, scope) for key in keys), ())


def entry(key: str, scope: Scope = Scope.RANK) -> Entry:
    return Entry("p", key, "float32", (2,), (Box.full((2,)),), scope, 0, 0, 8)


def test_representatives_have_every_key_and_none_is_too_many() -> None:
    layouts = [layout("a", "b"), layout("b", "a"), layout("c"), layout("c", "d"), layout("d")]
    assert whose.representatives(layouts, 0) == [0, 2, 3]
    assert whose.representatives(layouts, 3) == [3, 0]
    assert whose.alike(layouts) == [[0, 1], [2], [3], [4]]


@pytest.mark.parametrize("own", [True, False])
def test_doubt_is_of_what_several_have_for_themselves(own: bool) -> None:
    layouts = [layout("a", "b", "first"), layout("a", "first")]
    layouts[0] = Layout((*layouts[0].entries[:2], entry("first", Scope.FIRST)), ())
    wanted = [entry("a"), entry("b"), entry("first")]
    found = whose.doubtful(wanted, layouts, 0, own=own)
    assert {key[1]: sorted(holders) for key, holders in found.items()} == ({} if own else {"a": [0, 1]})
    region = [entry("a", Scope.GLOBAL)]
    assert list(whose.doubtful(region, layouts, 0, own=own)) == [("p", "a")]
    assert whose.doubtful(region, [layout("a", scope=Scope.GLOBAL)] * 2, 0, own=own) == {}
    assert list(whose.doubtful([entry("a")], [layout("z"), *layouts], 0, own=own)) == [("p", "a")]


def test_own_things_are_told_apart_from_shared_ones() -> None:
    layouts = [layout("a", "b"), layout("a")]
    assert whose.names_of([entry("a"), entry("b")], ["p/x"], layouts, 0) == {"=p/a@0", "=p/b", "p/x@0"}
    assert whose.names_of([entry("a")], ["p/x"], layouts, None) == {"=p/a", "p/x"}
