"""The shape of the code: backends that are alike, short functions, and one module for what only Linux has."""

from __future__ import annotations

import ast
import inspect
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import qworker
from qworker.backend import Backend

# A module's name says what is in it. One thing has one name in every package.
FORMER_NAMES = {
    "looks": "browse",
    "contents": "browse",
    "consume": "lease",
    "claim": "lease",
    "claims": "lease",
    "publisher": "publish",
    "publishing": "publish",
    "settling": "settle",
    "waiting": "wait",
    "wake": "wait",
    "life": "holder",
    "owner": "holder",
}
# Modules of every backend. `memory:` has one store module, and rfq shares some of `redis:`.
MODULES = {"backend", "lease", "settle", "reap", "browse", "admin", "options", "publish", "store"}
WITHOUT = {
    "MemoryBackend": {"lease", "settle", "reap", "browse", "admin", "options", "publish"},
    "RfqBackend": {"settle", "reap", "options", "publish", "store"},
}
LONGEST_METHOD = 10
LONGEST_FUNCTION = 50
MOST_PARAMETERS = 7

CLASSES = sorted({point.load() for point in entry_points(group="qworker.backends")}, key=lambda one: one.__name__)


@pytest.mark.parametrize("backend", CLASSES, ids=lambda one: one.__name__)
def test_a_backend_is_one_class_in_which_every_method_of_the_contract_can_be_seen(backend: type[Backend]) -> None:
    assert backend.__bases__ == (Backend,)
    assert vars(backend).keys() >= Backend.__abstractmethods__


@pytest.mark.parametrize("backend", CLASSES, ids=lambda one: one.__name__)
def test_a_method_of_the_contract_is_short_since_the_work_is_in_the_modules_beside_it(backend: type[Backend]) -> None:
    tree = ast.parse(Path(inspect.getfile(backend)).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == backend.__name__]
    lengths = {
        node.name: _length(node) for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert lengths.keys() >= Backend.__abstractmethods__
    too_long = {name: lengths[name] for name in Backend.__abstractmethods__ if lengths[name] > LONGEST_METHOD}
    assert not too_long


@pytest.mark.parametrize("backend", CLASSES, ids=lambda one: one.__name__)
def test_the_modules_of_a_backend_have_the_names_that_all_backends_use(backend: type[Backend]) -> None:
    folder = Path(inspect.getfile(backend)).parent
    modules = {path.stem for path in folder.glob("*.py")}
    assert {name: FORMER_NAMES[name] for name in modules & FORMER_NAMES.keys()} == {}
    assert modules >= MODULES - WITHOUT.get(backend.__name__, set())


def test_functions_are_short_and_constructors_take_few_parameters() -> None:
    functions = [
        (f"{path}:{node.lineno}: {node.name}", node)
        for path in _sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [name for name, node in functions if _length(node) > LONGEST_FUNCTION] == []
    assert [name for name, node in functions if node.name == "__init__" and _parameters(node) > MOST_PARAMETERS] == []


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many parameters a method takes besides self."""
    return len([*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]) - 1


def _sources() -> list[Path]:
    packages = [Path(qworker.__file__).parent, *{Path(inspect.getfile(backend)).parent for backend in CLASSES}]
    return [path for package in packages for path in package.rglob("*.py")]


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body, without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_only_one_module_needs_linux() -> None:
    assert [path.stem for path in _sources() if _linux_only(ast.parse(path.read_text()))] == ["linux"]


def _linux_only(tree: ast.Module) -> set[str]:
    """Return what is in a module, besides prose, that no other system has."""
    prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node not in prose and isinstance(node.value, str):
            found.update(word for word in ("/proc/", "prctl") if word in node.value)
        elif isinstance(node, ast.alias | ast.Name):
            found.update({"ctypes"} & {node.name if isinstance(node, ast.alias) else node.id})
        elif isinstance(node, ast.Attribute):
            found.update({"F_SETLEASE"} & {node.attr})
    return found
