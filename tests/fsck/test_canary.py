"""fsck with one of its checks switched off must fail: each statement in it that tells something, or asks something that
may be told, is taken out in turn, and then some harm must be told otherwise."""

from __future__ import annotations

import ast
import asyncio
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from everstep.store import fsck, fsck_images
from everstep.store.fsck_images import Extent

from tests.fsck.harms import HARMS
from tests.fsck.run import make_run

MODULES: dict[str, types.ModuleType] = {"fsck": fsck, "fsck_images": fsck_images}

ASKS = {"check_image", "check_record", "_object", "_chunks", "_size_alone", "append"}
"""Calls whose only use is what they raise or note."""

NOT_CHECKS = {
    "fsck_images._read: append",  # the buffers
    "fsck_images._read: check_record",  # asked by _image, too, which may be quick
}


@dataclass(frozen=True)
class Site:
    """A statement that is taken out: the ``number``-th of its kind in its function."""

    module: str
    function: str
    what: str
    number: int
    line: int

    @property
    def kind(self) -> str:
        return f"{self.module}.{self.function}: {self.what}"

    def __str__(self) -> str:
        return self.kind + (f" ({self.number})" if self.number > 1 else "")


def called(node: ast.expr | None) -> str | None:
    """The name of what is called."""
    if isinstance(node, ast.Await):
        node = node.value
    if isinstance(node, ast.Call):
        return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "?")
    return None


def what_of(node: ast.stmt) -> str | None:
    """What the statement tells or asks; None if it does neither."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield):
        return f"yield {called(node.value.value) or ast.unparse(node.value.value)}"  # type: ignore[arg-type]
    if isinstance(node, ast.Expr) and called(node.value) in ASKS:
        return str(called(node.value))
    if isinstance(node, ast.Return) and called(node.value) in ("Finding", "_damage", "_cannot_tell"):
        return f"return {called(node.value)}"
    if isinstance(node, ast.Return) and isinstance(node.value, ast.List) and node.value.elts:
        return f"return {ast.unparse(node.value)}"
    if isinstance(node, ast.AugAssign) and ast.unparse(node.target) in ("bad", "errors", "open_attempts"):
        return f"{ast.unparse(node.target)} +="
    return None


class Without(ast.NodeTransformer):
    """Lists the sites of a module; takes the one at ``line`` out. ``marked``: each says before that it is reached."""

    def __init__(self, module: str, line: int | None = None, marked: bool = False) -> None:
        self.module, self.line, self.marked = module, line, marked
        self.sites: list[Site] = []
        self._function: ast.AsyncFunctionDef | ast.FunctionDef | None = None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._within(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._within(node)

    def _within(self, node: Any) -> ast.AST:
        before, self._function = self._function, node
        self.generic_visit(node)
        self._function = before
        return node  # type: ignore[no-any-return]

    def generic_visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt) and self._function is not None and self._is_optional(node):
            what = what_of(node)
            assert what is not None
            name = self._function.name
            number = 1 + sum((one.function, one.what) == (name, what) for one in self.sites)
            self.sites.append(Site(self.module, name, what, number, node.lineno))
            if node.lineno == self.line:
                return ast.copy_location(self._instead(node), node)
            if self.marked:
                call = ast.Call(ast.Name("reached", ast.Load()), [ast.Constant(str(self.sites[-1]))], [])
                return [ast.copy_location(ast.Expr(call), node), super().generic_visit(node)]
        return super().generic_visit(node)

    def _is_optional(self, node: ast.stmt) -> bool:
        """Whether the function may do without it: what makes a finding for others may not."""
        assert self._function is not None
        returns = ast.unparse(self._function.returns) if self._function.returns else ""
        return what_of(node) is not None and not (isinstance(node, ast.Return) and returns == "Finding")

    def _instead(self, node: ast.stmt) -> ast.stmt:
        if isinstance(node, ast.Return):
            return ast.Return(ast.List([], ast.Load()) if isinstance(node.value, ast.List) else None)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield):
            return ast.If(ast.Constant(False), [node], [])  # it stays a generator
        return ast.Pass()


def tree_of(module: str) -> ast.Module:
    return ast.parse(Path(str(MODULES[module].__file__)).read_text())


def sites() -> Iterator[Site]:
    for module in MODULES:
        found = Without(module)
        found.visit(tree_of(module))
        yield from (one for one in found.sites if one.kind not in NOT_CHECKS)


def mutant(
    site: Site | None, patch: pytest.MonkeyPatch, reached: Callable[[str], object] | None = None
) -> types.ModuleType:
    """fsck, made anew without ``site``; with ``reached``, it says which sites are reached."""
    made = {}
    for name in ("fsck_images", "fsck"):
        line = site.line if site is not None and site.module == name else None
        tree = ast.fix_missing_locations(Without(name, line, reached is not None).visit(tree_of(name)))
        module = made[name] = types.ModuleType(f"everstep.store.{name}")
        module.__package__ = "everstep.store"
        module.reached = reached  # type: ignore[attr-defined]
        patch.setitem(sys.modules, module.__name__, module)
        exec(compile(tree, f"{name} without {site}", "exec"), module.__dict__)
    made["fsck"].DECISION_WAIT_S = 0.0  # type: ignore[attr-defined]
    return made["fsck"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run with each of the harms."""
    home = tmp_path_factory.mktemp("harmed")
    make_run(home / "whole")
    for number, harm in enumerate(HARMS.values()):
        shutil.copytree(home / "whole", home / str(number))
        harm.make(home / str(number))
    return {"": home / "whole", **{what: home / str(number) for number, what in enumerate(HARMS)}}


def is_told(check: Any, runs: dict[str, Path], what: str) -> bool:
    harm = HARMS[what]

    async def go() -> set[tuple[str, str, str]]:
        backend = harm.open(runs[what])
        found = [one async for one in check(backend, extent=Extent(quick=harm.quick), decision_wait_s=0)]
        await backend.close()
        return {(one.severity.value, one.kind.value, one.name) for one in found}

    try:
        return asyncio.run(go()) == harm.says(runs[""])
    except Exception:
        return False


@pytest.fixture(scope="module")
def reaching(runs: dict[str, Path]) -> dict[str, list[str]]:
    """By site, the harms with which it is reached; those that reach the fewest sites first."""
    found: dict[str, set[str]] = {what: set() for what in HARMS}
    with pytest.MonkeyPatch.context() as patch:
        check = mutant(None, patch, lambda site: found[what].add(site)).check
        for what in HARMS:
            assert is_told(check, runs, what), what
    by_site: dict[str, list[str]] = {}
    for what in sorted(found, key=lambda what: len(found[what])):
        for site in found[what]:
            by_site.setdefault(site, []).append(what)
    return by_site


@pytest.mark.parametrize("site", list(sites()), ids=str)
def test_fsck_without_it_misses_a_harm(
    runs: dict[str, Path], reaching: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, site: Site
) -> None:
    check = mutant(site, monkeypatch).check
    those = reaching.get(str(site), [])
    assert those, f"no harm reaches line {site.line} of {site.module}.py"
    likely = LIKELY.get(site.what, "")
    missed = next(
        (
            what
            for what in sorted(those, key=lambda what: likely not in what)
            if not is_told(check, runs, what)
        ),
        None,
    )
    assert missed, f"nothing is missed without line {site.line} of {site.module}.py"


LIKELY = {
    "check_image": "image grown",
    "check_record": "lacks a hash",
    "_object": "passes by",
    "_chunks": "image's data",
    "bad +=": "image's data",
}
"""Of what is reached with every harm: a word of those that are tried first."""
