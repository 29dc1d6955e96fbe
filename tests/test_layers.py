"""No import runs against the layers of ``engine/DESIGN.md``, and the package is what it says it is.

All imports count, those inside functions too; the few that may happen only when a function is called are
named here.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Iterator

import everstep
import pytest

from tests.sources import PACKAGES, TOP, Arrow, arrows, layer_of, module_of, modules, sources

STORE = frozenset({"errors", "format", "codec", "plan", "memory", "backends"})
EVERYTHING = frozenset({"facade", "agent", "peers", "exchange", "state", "snapshot", "store", *STORE})
MAY_IMPORT = {
    "errors": frozenset[str](),
    "backends": frozenset[str](),
    "format": frozenset({"errors"}),
    "codec": frozenset({"errors", "format"}),
    "plan": frozenset({"errors", "format"}),
    "memory": frozenset({"errors", "format"}),
    "store": STORE,
    "peers": STORE | {"store"},
    "agent": STORE | {"store", "peers"},
    "exchange": STORE | {"store", "peers"},
    "state": frozenset({"errors", "format", "plan"}),
    "snapshot": frozenset({"errors", "format", "memory", "state"}),
    "facade": EVERYTHING,
    "dcp": EVERYTHING,
    "port": EVERYTHING,
    "demo": EVERYTHING,
    "benchmarks": EVERYTHING | {"dcp", "demo"},
    "cli": EVERYTHING | {"dcp", "demo", "benchmarks", "port"},
}
"""By layer: the layers that it may import, besides itself."""

TORCH_LAYERS = frozenset({"state", "snapshot", "facade", "dcp", "port", "demo", "benchmarks"})
LAZY_TORCH = {
    "everstep.codec.chunk": "numpy",
    "everstep.codec.classes": "numpy",
    "everstep.memory.copying": "numpy",
    "everstep.codec.planes": "numpy",
    "everstep.codec.probe": "numpy",
    "everstep.codec.scratch": "numpy",
    "everstep.codec.streams": "numpy",
    "everstep.store.bases": "numpy",
    "everstep.store.pieces": "numpy",
    "everstep.store.numbers": "numpy",
    "everstep.format.columns": "numpy",
    "everstep.plan.coverage": "numpy",
    "everstep.plan.galois": "numpy",
}
"""Outside those layers: only inside functions that fsck and the agent do not call, or call only for jobs that have
tensors of the whole job, whose coverage is checked with arrays, or for packed images."""

LIGHT = ("everstep", "everstep.places", "everstep.policy", "everstep.sizing", "everstep.state.codec")
"""Besides the layers without torch, what the maintenance commands use."""

HEAVY = frozenset({"torch", "numpy"})


def inner_arrows() -> Iterator[tuple[Arrow, str]]:
    """Imports of everstep's own modules, each with the module that it loads."""
    for arrow in arrows():
        if arrow.target.split(".")[0] == "everstep":
            yield arrow, module_of(arrow.target)


def test_every_layer_has_its_rule() -> None:
    assert {layer_of(module) for module in modules()} == set(MAY_IMPORT)


def test_the_parser_sees_the_imports() -> None:
    """A test of the tests: known arrows of each form are found, and there are many."""
    found = {(arrow.module, module_of(arrow.target)): arrow for arrow in arrows()}
    assert len(found) > 600
    relative = found["everstep.format.vote", "everstep.format.hashing"]
    assert not relative.lazy and not relative.typing
    assert found["everstep.cli.fsck", "everstep.store.fsck_images"].lazy
    assert found["everstep.state.decode_user", "everstep.state.codec"].typing
    assert ("everstep.former", "everstep.agent.client") in found
    assert layer_of("everstep") == layer_of("everstep.session") == "facade"
    assert layer_of("everstep.backends.door") == "backends"


def test_no_arrow_runs_against_the_layers() -> None:
    wrong = []
    for arrow, target in inner_arrows():
        layer, other = layer_of(arrow.module), layer_of(target)
        if other != layer and other not in MAY_IMPORT[layer]:
            wrong.append(f"{arrow}: {layer} may not import {other}")
    assert not wrong, "\n".join(wrong)


def test_the_package_itself_is_not_imported_from_inside() -> None:
    """``import everstep`` from within would load names as they are asked for, past every layer."""
    allowed = {"everstep.describing", "everstep.dcp.writer", "everstep.demo.train"}  # its version; a user
    wrong = [str(a) for a, target in inner_arrows() if target == "everstep" and a.module not in allowed]
    assert not [text for text in wrong if "benchmarks" not in text], "\n".join(wrong)


def test_facade_modules_import_each_other_in_one_direction() -> None:
    """No cycle between modules, other than through what only the type checker sees."""
    edges: dict[str, set[str]] = {}
    for arrow, target in inner_arrows():
        if not arrow.typing and not arrow.lazy and target != arrow.module:
            edges.setdefault(arrow.module, set()).add(target)
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for other in edges.get(module, ()):
                visit(other, (*trail, module))
            done.add(module)

    for module in list(edges):
        visit(module, ())


def test_torch_and_numpy_stay_at_the_edge() -> None:
    wrong = []
    for arrow in arrows():
        top = arrow.target.split(".")[0]
        if top not in HEAVY or layer_of(arrow.module) in TORCH_LAYERS:
            continue
        if not (arrow.lazy and LAZY_TORCH.get(arrow.module) == top):
            wrong.append(str(arrow))
    assert not wrong, "\n".join(wrong)


@functools.cache
def loaded_by() -> dict[str, set[str]]:
    """By module: what it loads when it is loaded itself, its package's ``__init__`` too."""
    direct = {module: {module.rpartition(".")[0]} - {""} for module in modules()}
    for arrow in arrows():
        if not arrow.lazy and not arrow.typing:
            top = arrow.target.split(".")[0]
            direct[arrow.module].add(top if top in HEAVY else module_of(arrow.target))
    return direct


def closure(start: str) -> dict[str, list[str]]:
    """All modules that importing ``start`` loads, each with the way there."""
    ways = {start: [start]}
    todo = [start]
    while todo:
        module = todo.pop()
        for target in loaded_by().get(module, ()):
            if target not in ways:
                ways[target] = [*ways[module], target]
                todo.append(target)
    return ways


def test_loading_a_light_module_loads_no_torch() -> None:
    light = {module for module in modules() if layer_of(module) not in TORCH_LAYERS} | set(LIGHT)
    for module in sorted(light):
        heavy = [way for target, way in closure(module).items() if target in HEAVY]
        assert not heavy, " -> ".join(heavy[0])


def test_the_closure_sees_torch_where_it_is() -> None:
    assert "torch" in closure("everstep.session")
    assert "numpy" in closure("everstep.checkpointer")


def test_design_names_every_layer() -> None:
    """The table of DESIGN.md says what this test demands."""
    page = (TOP / "engine" / "DESIGN.md").read_text()
    rows = dict(re.findall(r"^\| `everstep\.(\w+)` \|[^|]*\|([^|]*)\|$", page, re.M))
    for layer in ("format", "codec", "plan", "memory", "state", "snapshot"):
        assert {word.strip() for word in rows[layer].split(",")} == MAY_IMPORT[layer], layer
    assert rows["errors"].strip() == "nothing"
    assert rows["backends"].strip() == "nothing of everstep"
    for layer in MAY_IMPORT:
        assert f"`everstep.{layer}`" in page or layer == "facade", layer


def test_pyproject_lists_every_package() -> None:
    text = (TOP / "pyproject.toml").read_text()
    listed = re.search(r"^packages = \[(.*?)^\]", text, re.M | re.S)
    assert listed is not None
    directories = {source.module for source in sources() if source.is_package}
    assert set(re.findall(r'"([\w.]+)"', listed.group(1))) == directories
    section = text.split("[tool.setuptools.package-dir]")[1].split("\n[")[0]
    assert dict(re.findall(r'^"?([\w.]+)"? = "(\w+)"$', section, re.M)) == {v: k for k, v in PACKAGES.items()}


def test_every_directory_with_modules_is_a_package() -> None:
    for directory in PACKAGES:
        for path in (TOP / directory).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path


def test_package_modules_do_nothing_when_loaded() -> None:
    """``__init__`` holds a docstring alone, but for those that users import from, which load names as they are asked
    for."""
    for source in sources():
        if source.is_package and source.module not in ("everstep", "everstep.dcp"):
            assert len(source.tree.body) <= 1, f"{source.name} does something"


def test_exported_names() -> None:
    assert everstep.__all__ == sorted(
        everstep.__all__, key=lambda name: (name[0].islower(), name.strip("_"), name)
    )
    assert set(everstep.__all__) == {*everstep._HOMES, "__version__"}
    for name in everstep.__all__:
        value = getattr(everstep, name)
        home = everstep._HOMES.get(name)
        if home:
            assert value is getattr(importlib.import_module(f"everstep.{home}"), name)
            assert value.__doc__, f"everstep.{name} has no docstring"
    assert everstep.errors is sys.modules["everstep.errors"]
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = everstep.no_such_name


def test_the_public_face_is_the_documented_one() -> None:
    """What users may rely on: a name that goes or comes is a decision, not an accident."""
    assert set(everstep.__all__) - {"__version__"} == {
        "Checkpointer",
        "Memory",
        "MemoryPlan",
        "Policy",
        "Recovery",
        "SaveHandle",
        "Tier",
        "Shards",
        "TrainState",
        "errors",
        "flat_range",
        "load",
        "pin",
        "plan_memory",
        "register",
        "save",
    }
