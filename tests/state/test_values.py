"""Plain values: containers, keys, user classes, what is refused, and by which path."""

from __future__ import annotations

import collections
import dataclasses
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from everstep.errors import UnsupportedValue
from everstep.state import wire
from everstep.state.codec import decode_state, encode_plain
from everstep.state.compare import equal_states
from everstep.state.keys import component
from everstep.state.registry import Registry, Unknown
from everstep.state.tree import TreeEncoder, flatten
from hypothesis import given, settings
from kit import (
    Access,
    Attributes,
    Colour,
    Config,
    Empty,
    Frozen,
    Level,
    Names,
    Ordered,
    Point,
    Slotted,
    Text,
    hashables,
    round_trip,
)

EMPTY = [
    None,
    {},
    [],
    (),
    set(),
    frozenset(),
    "",
    b"",
    bytearray(),
    Empty(),
    torch.Size([]),
    range(0),
    np.zeros((0, 2)),
]


@pytest.mark.parametrize("value", EMPTY, ids=lambda value: type(value).__name__)
def test_empty_values_keep_their_type_anywhere(value: Any) -> None:
    for tree in (value, (1, value, 2), {"only": value}, [[value]], {"a": {}, "b": value, "c": ()}):
        assert equal_states(round_trip(tree), tree) == []


def test_dotted_nested_and_odd_keys_stay_apart() -> None:
    one = torch.ones(1)
    tree = {
        "a.b": one * 1,
        "a": {"b": one * 2, "": one * 3},
        "a/b": one * 4,
        "..": one * 5,
        "": one * 6,
        "A": one * 7,
        "a.": one * 8,
        "k" * 5000: one * 9,
        "é": one * 10,
        "e\u0301": one * 11,
        "#0": one * 12,
        0: one * 13,
        "[0]": one * 14,
        "~": one * 15,
        "__metadata__": one * 16,
        "a@0": one * 17,
        "\ud800": one * 18,
        True + 0.5: one * 19,
        None: one * 20,
        "None": one * 21,
        "~n": one * 22,
        (0, "a"): one * 23,
        b"a": one * 24,
    }
    flat = flatten({"part": tree})
    names = [leaf.key for leaf in flat.leaves]
    assert len(set(names)) == len(names) == 24
    assert "__metadata__" not in names
    assert all(name and "@" not in name for name in names)
    for name in names:
        name.encode()
    assert equal_states(round_trip(tree), tree) == []


@settings(max_examples=300, deadline=None)
@given(hashables, hashables)
def test_key_text_is_injective(a: Any, b: Any) -> None:
    encoder = TreeEncoder(None)
    texts = [component(key, encoder.key(key, "", ())) for key in (a, b)]
    if equal_states(a, b):
        assert texts[0] != texts[1]
    else:
        assert texts[0] == texts[1]


def test_key_types_are_exact() -> None:
    tree = {
        1: "int",
        "1": "str",
        1.5: "float",
        None: "none",
        (1, 2): "tuple",
        Level.HIGH: "enum",
        b"1": "bytes",
    }
    found = round_trip(tree)
    assert [(type(key), value) for key, value in found.items()] == [
        (type(key), value) for key, value in tree.items()
    ]
    assert type(next(iter(round_trip({True: 0})))) is bool
    counter = round_trip(collections.Counter({25: 1, "25": 2}))
    assert type(counter) is collections.Counter and counter == {25: 1, "25": 2}


def test_numbers_are_exact() -> None:
    values = [
        2**63,
        2**64,
        -(2**63) - 1,
        10**400,
        -(10**400),
        2**64 - 1,
        -(2**63),
        5e-324,
        -0.0,
        float("inf"),
    ]
    assert equal_states(round_trip(values), values) == []
    for whole in (
        [1, -(2**63), 2**64 - 1],
        [1, 2**64],
        [-(2**63) - 1, 1],
        [1, True, 0],
        [1, 1.0],
        [0, None],
        [],
    ):
        for sequence in (whole, tuple(whole), collections.deque(whole)):
            found = round_trip(sequence)
            assert equal_states(found, sequence) == [] and list(map(type, found)) == list(map(type, whole))
    nan = np.frombuffer(np.uint64(0xFFF8_0000_0000_1234).tobytes(), "<f8")[0].item()
    assert np.float64(round_trip(nan)).view("u8") == 0xFFF8_0000_0000_1234


def test_values_are_private_copies() -> None:
    """A later change of nested lists, arrays or dicts does not reach what was flattened."""
    tree = {"list": [1, [2]], "array": np.arange(4), "dict": {"a": {"b": 1}}, "bytes": bytearray(b"ab")}
    flat = flatten({"part": tree})
    expected = decode_state(flat.state, lambda index: index)["part"]
    tree["list"][1].append(3)
    tree["array"][:] = 9
    tree["dict"]["a"]["b"] = 2
    tree["bytes"][0] = 0
    found = decode_state(flat.state, lambda index: index)["part"]
    assert equal_states(found, expected) == []
    assert found["list"] == [1, [2]] and found["array"].tolist() == [0, 1, 2, 3]


def test_aliased_containers_stay_one() -> None:
    shared: list[Any] = [1, {"a": 2}]
    array = np.arange(3)
    found = round_trip({"x": shared, "y": (shared, shared[1]), "n": [array, array]})
    assert found["x"] is found["y"][0] and found["x"][1] is found["y"][1]
    assert found["n"][0] is found["n"][1]
    assert equal_states(found["x"], shared) == []


def test_containers_made_on_the_fly_are_not_taken_for_aliases() -> None:
    class Maker:
        def __init__(self, number: int) -> None:
            self.number = number

        def state_dict(self) -> dict[str, Any]:
            return {"numbers": [self.number], "tensor": torch.full((3,), self.number)}

        def load_state_dict(self, state: Any) -> None: ...

    found = round_trip([Maker(number) for number in range(200)])
    assert [item["numbers"] for item in found] == [[number] for number in range(200)]
    assert [int(item["tensor"][0]) for item in found] == list(range(200))


def test_user_classes_come_back_without_their_constructors() -> None:
    values = [Colour.RED, Colour.PAIR, Colour.FUNCTION, Level.LOW, Access.READ | Access.WRITE, Access(0)]
    values += [
        Point(1, [2]),
        Empty(),
        Config([1]),
        Frozen({"a": 1}),
        Slotted(3),
        Ordered(a=1),
        Names([1]),
        Text("t"),
    ]
    attributed = Attributes(a=1)
    attributed.owner = ["me"]  # type: ignore[attr-defined]
    before = Attributes.made
    found = round_trip([*values, attributed])
    assert Attributes.made == before
    assert equal_states(found, [*values, attributed]) == []
    assert found[0] is Colour.RED and found[2] is Colour.FUNCTION
    assert found[-1].owner == ["me"]


def test_a_class_that_is_not_known_gives_a_stand_in_that_can_be_saved_again() -> None:
    local = dataclasses.make_dataclass("Local", ["value"])
    secret = collections.namedtuple("Secret", ["a", "b"])
    odd = type("Odd", (dict,), {})
    enum = __import__("enum").Enum("Mode", ["ON"])
    tree = {
        "d": local([1]),
        "t": secret(1, 2),
        "m": odd(a=1),
        ("k", enum.ON): enum.ON,
        "s": type("S", (str,), {})("x"),
    }
    data = encode_plain({"part": tree})
    found = decode_state(data, int)["part"]
    assert found["d"] == Unknown(found["d"].type_name, "dataclass", {"value": [1]}, {}, [])
    assert found["d"].type_name.endswith("Local")
    assert found["t"].value == [1, 2] and found["t"].extra == ["a", "b"]
    assert found["m"].value == {"a": 1}
    assert encode_plain({"part": found}) == data
    registry = Registry()
    name = found["d"].type_name
    registry.register(local, name)
    assert decode_state(data, int, registry)["part"]["d"] == local([1])


def test_a_class_with_other_fields_now_is_another_class() -> None:
    before = dataclasses.make_dataclass("Shape", ["a"])
    data = encode_plain({"part": before(1)})
    registry = Registry()
    registry.register(dataclasses.make_dataclass("Shape", ["a", "b"]), f"{before.__module__}:Shape")
    assert isinstance(decode_state(data, int, registry)["part"], Unknown)


def test_nothing_is_imported_because_a_file_names_it() -> None:
    data = encode_plain({"part": Unknown("antigravity:Thing", "dataclass", {}, {}, [])})
    assert "antigravity" not in sys.modules
    assert isinstance(decode_state(data, int)["part"], Unknown)
    assert "antigravity" not in sys.modules


def test_a_class_is_taken_by_its_own_name_only() -> None:
    import kit

    assert dataclasses.is_dataclass(kit.Saved)
    names = [field.name for field in dataclasses.fields(kit.Saved)]
    data = encode_plain({"part": Unknown("kit:Saved", "dataclass", {}, {}, names)})
    assert isinstance(decode_state(data, int)["part"], Unknown)


@pytest.mark.parametrize("kind", ["dataclass", "dict", "list", "namedtuple", "str", "tuple"])
def test_a_name_of_another_kind_of_class_is_not_taken(kind: str) -> None:
    value: Any = {"dict": {}, "dataclass": {}, "list": [], "namedtuple": [], "str": "", "tuple": ()}[kind]
    for name in (
        "subprocess:Popen",
        "threading:Thread",
        "os:system",
        "collections:OrderedDict.x",
        "sys:modules",
    ):
        data = encode_plain({"part": Unknown(name, kind, value, {}, [])})
        assert isinstance(decode_state(data, int)["part"], Unknown)


def _generator() -> Any:
    yield 1


def _cycle() -> Any:
    items: list[Any] = [1]
    items.append({"back": (items,)})
    return items


def _deep() -> Any:
    tree: Any = 1
    for _ in range(wire.DEPTH_MAX + 2):
        tree = [tree]
    return tree


class _Object:
    pass


class _Matrix(np.ndarray):  # type: ignore[type-arg]
    pass


class _TensorKind(torch.Tensor):
    pass


@dataclasses.dataclass
class _OverC(ValueError):
    value: int = 1


REFUSED = {
    "lambda": lambda: lambda: 0,
    "lock": threading.Lock,
    "generator": _generator,
    "object": _Object,
    "class": lambda: _Object,
    "module": lambda: sys,
    "meta": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "tensor subclass": lambda: torch.ones(3).as_subclass(_TensorKind),
    "lazy": lambda: torch.nn.parameter.UninitializedParameter(),
    "object array": lambda: np.array([None, 1], dtype=object),
    "structured array": lambda: np.zeros(3, dtype=[("a", "i4")]),
    "structured scalar": lambda: np.zeros(3, dtype=[("a", "i4")])[0],
    "array subclass": lambda: np.zeros(3).view(_Matrix),
    "masked": lambda: np.ma.masked_array([1, 2]),
    "factory": lambda: collections.defaultdict(lambda: 0),
    "cycle": _cycle,
    "deep": _deep,
    "struct sequence": time.localtime,
    "return type": lambda: torch.max(torch.ones(2, 2), dim=0),
    "tensor in a set": lambda: {torch.ones(1)},
    "tensor as a key": lambda: {torch.ones(1): 1},
    "exception dataclass": _OverC,
    "slice of objects": lambda: slice(1.5, None),
    "memoryview": lambda: memoryview(b"a"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_anything_else_is_refused_by_its_path(name: str) -> None:
    value = REFUSED[name]()
    with pytest.raises(UnsupportedValue) as caught:
        flatten({"extra": {"fine": 1, "hooks": [0, value]}})
    assert caught.value.path.startswith("extra/hooks/[1]")
    assert "extra/hooks/[1]" in str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_a_whole_part_that_is_refused_is_named_as_the_part(name: str) -> None:
    value = REFUSED[name]()
    with pytest.raises(UnsupportedValue) as caught:
        flatten({"v": value})
    path = caught.value.path
    assert path == "v" or (path.startswith("v/") and not isinstance(value, torch.Tensor))
    assert "~root" not in str(caught.value) and "~root" not in path


@pytest.mark.filterwarnings("ignore")
def test_quantised_tensors_are_refused() -> None:
    with pytest.raises(UnsupportedValue, match="quint8"):
        flatten({"p": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)})


def test_a_small_array_in_a_large_fortran_order_and_a_large_one_come_back_as_numpy() -> None:
    large = np.asfortranarray(np.random.default_rng(0).random((200, 100)))
    tree = {
        "f": large,
        "swapped": large.astype(">f4"),
        "rev": large[::-1],
        "times": np.arange(20000).astype("<M8[s]"),
    }
    tree["twice"] = tree["f"]
    frozen = large.copy()
    frozen.flags.writeable = False
    tree["frozen"] = frozen
    flat = flatten({"p": tree})
    assert len(flat.leaves) == 5 and len(flat.state) < 2000
    found = round_trip(tree)
    assert equal_states(found, tree) == []
    assert found["f"] is found["twice"]


def test_light_decoding_needs_neither_torch_nor_numpy(tmp_path: Any) -> None:
    tree = {
        "w": torch.ones(2),
        "dtype": torch.float8_e5m2,
        "a": np.arange(3),
        "n": [1, (2, None)],
        "s": torch.Size([1]),
    }
    tree["big"] = np.zeros(20000)
    (tmp_path / "state").write_bytes(flatten({"p": tree}).state)
    code = (
        "import sys; from everstep.state.codec import decode_state\n"
        "data = open(sys.argv[1], 'rb').read()\n"
        "found = decode_state(data, lambda i: f'tensor {i}', light=True)['p']\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'imported'\n"
        "print(found['w'], found['dtype'].type_name, found['n'], found['a'].value, found['big'])\n"
        "print(found['s'].type_name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "state")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tensor 0 torch:dtype [1, (2, None)] [18, '<i8', [3], b")
    assert done.stdout.endswith("tensor 1\ntorch:Size\n")


def test_comparing_names_what_differs() -> None:
    pairs: list[tuple[Any, Any]] = [
        (1, True),
        (0.0, -0.0),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1: 0}, {True: 0}),
        ([1], (1,)),
        (torch.ones(1), torch.ones(())),
        (torch.zeros(2), -torch.zeros(2)),
        (np.float32(1), np.float64(1)),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}),
    ]
    for a, b in pairs:
        assert equal_states(a, b), (a, b)
        assert equal_states(a, a) == []
    assert equal_states(*pairs[-1]) == ["a/b/[1]: '2' and '3'"]
    assert equal_states(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")])) == []
