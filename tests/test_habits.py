"""What the code may not grow into: long files and functions, modules without a word, calls that execute what
is stored. The limits are a ratchet: they may go down."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.sources import sources, test_files

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
TEST_LINES_MAX = 60
LINES_PER_FILE_MEAN_MAX = 200

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "imp"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "torch.save",
    "np.load",
    "numpy.load",
    "torch.jit.load",
    "allow_pickle=True",
}
IMPORTS_BY_NAME = {"everstep", "everstep.cli.main", "everstep.dcp", "everstep.benchmarks.harness.systems"}
"""Modules that import others by a name: their own, from a table in the code; the last one adapters too, which users
name on the command line or install."""
PICKLES = {"everstep.backends.conformance", "everstep.port.dcp_dirs", "everstep.port.torch_files"}
"""The first pickles and unpickles errors of its own making, to prove that they can be. The others read other
libraries' files: by an unpickler that refuses what it does not know, or only to name torch's own refusal."""
FOREIGN = {
    "everstep.benchmarks.harness.plain": {"torch.save", "torch.load"},
    "everstep.dcp.values": {"torch.save"},
    "everstep.port.dcp_dirs": {"torch.save"},
    "everstep.port.torch_files": {"torch.save"},
    "everstep.state.pickled": {"torch.load"},
}
"""Modules that read and write other libraries' files, or speak with torch's planners in streams that never leave
memory; each ``torch.load`` with ``weights_only=True``."""

INVARIANTS = {
    "len(record.root) == HASH_BYTES",
    "(self.steps is None) != (self.seconds is None)",
    "newest is not None and newest.step == step",
}
"""Asserted things that only a mistake of the code can break. What is stored, or comes from a user, is checked
with errors: an assertion is gone under ``python -O``."""

SHIPPED_TESTS = {"everstep.backends.conformance"}


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_no_file_is_long() -> None:
    files = [(len(source.text.splitlines()), source.name) for source in (*sources(), *test_files())]
    assert len(files) > 200
    assert max(files)[0] <= FILE_LINES_MAX, max(files)
    own = [lines for lines, name in files if not name.startswith("tests")]
    assert sum(own) / len(own) <= LINES_PER_FILE_MEAN_MAX


def test_no_function_needs_scrolling() -> None:
    for limit, files in ((FUNCTION_LINES_MAX, sources()), (TEST_LINES_MAX, test_files())):
        functions = [
            (length(node), source.name, node.name) for source in files for node in source.functions()
        ]
        assert max(functions)[0] <= limit, sorted(functions)[-5:]


def test_every_module_says_what_it_is() -> None:
    assert [source.name for source in sources() if not ast.get_docstring(source.tree)] == []


def test_nothing_stored_is_executed() -> None:
    for source in sources():
        imported = {arrow.target.split(".")[0] for arrow in source.arrows()} & FORBIDDEN_MODULES
        assert not imported or source.module in PICKLES, f"{source.name}: {imported}"
        called = set(calls(source.tree)) - FOREIGN.get(source.module, set())
        assert not called & FORBIDDEN_CALLS, f"{source.name}: {called & FORBIDDEN_CALLS}"
        by_name = any(name.rpartition(".")[2] == "import_module" for name in called)
        assert not by_name or source.module in IMPORTS_BY_NAME, f"{source.name} imports what a name says"


def test_foreign_files_are_read_as_weights_only() -> None:
    loads = [
        {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert loads and all(keywords.get("weights_only") == "True" for keywords in loads)


def calls(tree: ast.AST) -> Iterator[str]:
    """What is called, as written, and keywords that are switched on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)
            for keyword in node.keywords:
                if isinstance(keyword.value, ast.Constant) and keyword.value.value is True:
                    yield f"{keyword.arg}=True"


def test_assertions_are_of_the_codes_own_invariants() -> None:
    seen = set()
    for source in sources():
        if source.module in SHIPPED_TESTS:
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Assert) and not narrows(node.test):
                said = ast.unparse(node.test)
                assert said in INVARIANTS, f"{source.name}:{node.lineno}: {said}: raise an error, or list it"
                assert node.msg is not None, f"{source.name}:{node.lineno}: say why it holds"
                seen.add(said)
    assert seen == INVARIANTS, "some are gone: take them off the list"


def narrows(test: ast.expr) -> bool:
    """``x is not None`` and ``isinstance(x, ...)`` tell the type checker what the code knows."""
    if isinstance(test, ast.Compare):
        return [type(op) for op in test.ops] == [ast.IsNot] and ast.unparse(test.comparators[0]) == "None"
    return isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance"


def test_these_tests_see_what_they_forbid() -> None:
    tree = ast.parse(
        "eval(x)\ntorch.load(f)\nnp.load(f, allow_pickle=True)\nassert x == 1\nassert x is not None"
    )
    assert {"eval", "torch.load", "np.load", "allow_pickle=True"} == set(calls(tree))
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert [narrows(node.test) for node in asserts] == [False, True]


def test_prose_speaks_of_the_project_alone() -> None:
    """No paths of somebody's machine, no unfinished business."""
    for source in sources():
        for word in ("/home/", "TODO", "FIXME", "XXX"):
            assert word not in source.text, f"{source.name}: {word}"
