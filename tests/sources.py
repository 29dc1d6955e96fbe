"""The project's own source, parsed: what the tests of layers and of habits look at."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).parents[1]
PACKAGES = {"engine": "everstep", "backends": "everstep.backends", "benchmarks": "everstep.benchmarks"}
"""Directory at the top to import package."""


@dataclass(frozen=True)
class Arrow:
    """One import: ``module`` imports ``target`` in line ``line``. ``lazy``: inside a function, when that is
    called. ``typing``: for the type checker alone."""

    module: str
    target: str
    line: int
    lazy: bool
    typing: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


@dataclass(frozen=True)
class Source:
    """One source file. ``module`` is its import name, a package's without ``.__init__``."""

    path: Path
    module: str
    is_package: bool

    @property
    def name(self) -> str:
        return str(self.path.relative_to(TOP))

    @functools.cached_property
    def text(self) -> str:
        return self.path.read_text()

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.name)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node

    def arrows(self) -> Iterator[Arrow]:
        """Every import of the file, absolute names for relative ones."""
        yield from self._arrows(self.tree, lazy=False, typing=False)

    def _arrows(self, node: ast.AST, *, lazy: bool, typing: bool) -> Iterator[Arrow]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                for target in self._targets(child):
                    yield Arrow(self.module, target, child.lineno, lazy, typing)
            elif isinstance(child, ast.If) and _is_type_checking(child.test):
                for inner in child.body:
                    yield from self._arrows(ast.Module([inner], []), lazy=lazy, typing=True)
                for inner in child.orelse:
                    yield from self._arrows(ast.Module([inner], []), lazy=lazy, typing=typing)
            else:
                is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from self._arrows(child, lazy=lazy or is_function, typing=typing)

    def _targets(self, node: ast.Import | ast.ImportFrom) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        base = node.module or ""
        if node.level:
            package = self.module.split(".") if self.is_package else self.module.split(".")[:-1]
            package = package[: len(package) - (node.level - 1)]
            base = ".".join([*package, base] if base else package)
        # ``from everstep.x import y``: y may be a module itself.
        return [f"{base}.{alias.name}" for alias in node.names]


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@functools.cache
def sources() -> tuple[Source, ...]:
    """All files of the three packages."""
    found = []
    for directory, package in PACKAGES.items():
        for path in sorted((TOP / directory).rglob("*.py")):
            parts = path.relative_to(TOP / directory).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join((package, *(parts[:-1] if is_package else parts)))
            found.append(Source(path, name, is_package))
    return tuple(found)


def test_files() -> tuple[Source, ...]:
    """The files of the tests."""
    return tuple(Source(path, path.stem, False) for path in sorted((TOP / "tests").rglob("*.py")))


test_files.__test__ = False  # type: ignore[attr-defined]  (pytest is not to collect it)


@functools.cache
def arrows() -> tuple[Arrow, ...]:
    """All imports of all files."""
    return tuple(arrow for source in sources() for arrow in source.arrows())


@functools.cache
def modules() -> frozenset[str]:
    return frozenset(source.module for source in sources())


@functools.cache
def module_of(target: str) -> str:
    """The module that importing ``target`` loads: the last part may be a name in a module."""
    known = modules()
    while target not in known and "." in target:
        target = target.rpartition(".")[0]
    return target


@functools.cache
def layer_of(module: str) -> str:
    """``everstep.format.names`` is of the layer ``format``; modules of everstep itself are of ``facade``, but
    for ``errors``."""
    parts = module.split(".")
    subpackages = {".".join(s.module.split(".")[:2]) for s in sources() if s.is_package}
    if module == "everstep.errors":
        return "errors"
    return parts[1] if ".".join(parts[:2]) in subpackages and len(parts) > 1 else "facade"
