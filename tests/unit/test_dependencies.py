"""What qworker and its backends import is what `pyproject.toml` declares."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from qworker.extras import EXTRAS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Functions that import a module by its name, or look for it.
IMPORTERS = {"import_module", "find_spec"}

# Modules that are imported and not declared.
UNDECLARED = {
    # Only type checkers import it, and they have it built in.
    "typing_extensions",
    # Only an app that has it imports what needs it.
    "django",
    "flask",
    "pydantic",
    "sqlalchemy",
}
# Distributions that are declared and not imported.
NOT_IMPORTED = {
    # PySpark's `DataFrame.mapInArrow` raises an error without it.
    "pandas",
}


def declared() -> dict[str, set[str]]:
    """The extras of each declared distribution. A base dependency has the extra ``."""
    groups = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    found: dict[str, set[str]] = {}
    for extra, requirements in groups.items():
        for requirement in map(Requirement, requirements):
            if requirement.name != PROJECT["name"]:
                found.setdefault(canonicalize_name(requirement.name), set()).add(extra)
    return found


@cache
def distributions() -> dict[str, set[str]]:
    """The installed distributions that have a module, by the module's name."""
    return {module: {canonicalize_name(name) for name in names} for module, names in packages_distributions().items()}


def distributions_of(module: str) -> set[str]:
    """The distributions that have a module. If none is installed, it is taken to have the module's name."""
    return distributions().get(module, {canonicalize_name(module)})


@cache
def imports() -> dict[str, set[str]]:
    """The packages of this project that import a third-party module, by the module's name."""
    found: dict[str, set[str]] = {}
    for path in chain((ROOT / "qworker").rglob("*.py"), (ROOT / "backends").rglob("*.py")):
        package = "/".join(path.relative_to(ROOT).with_suffix("").parts[:2])
        for name in imported(ast.parse(path.read_text())):
            module = name.partition(".")[0]
            if module not in sys.stdlib_module_names and not re.match(r"qworker(_|$)", module):
                found.setdefault(module, set()).add(package)
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
        elif isinstance(node, ast.Call) and node.args:
            function, name = node.func, node.args[0]
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if called in IMPORTERS and isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value


def test_imports_are_found_wherever_they_are_written() -> None:
    source = """
import a.b as c, d
from e.f import g
def later():
    import h
    importlib.import_module("i.j")
    importlib.util.find_spec("k")
    importlib.import_module(name)
"""
    assert list(imported(ast.parse(source))) == ["a.b", "d", "e.f", "h", "i.j", "k"]


def test_every_module_that_is_imported_belongs_to_a_declared_dependency() -> None:
    undeclared = {module for module in imports() if not distributions_of(module) & declared().keys()}
    assert undeclared == UNDECLARED


def test_every_declared_dependency_is_imported() -> None:
    used = set(chain.from_iterable(map(distributions_of, imports())))
    assert declared().keys() - used == NOT_IMPORTED


def test_the_error_for_a_missing_module_names_an_extra_that_installs_it() -> None:
    extras = {name: found for name, found in declared().items() if "" not in found}
    optional = {module for module in imports() if distributions_of(module) & extras.keys()}
    assert optional <= EXTRAS.keys()
    for module, extra in EXTRAS.items():
        assert any(extra in extras.get(name, ()) for name in distributions_of(module)), module


def test_what_one_package_imports_comes_with_one_extra() -> None:
    known = declared()
    packages: dict[str, list[set[str]]] = {}
    for module, importers in imports().items():
        if module in EXTRAS:
            extras = set(chain.from_iterable(known.get(name, set()) for name in distributions_of(module)))
            for package in importers:
                packages.setdefault(package, []).append(extras)
    # `cli` has a command for each extra.
    several = {name for name, needed in packages.items() if not set.intersection(*needed) and name != "qworker/cli"}
    assert packages
    assert several == set()


def test_the_readme_lists_every_extra() -> None:
    table = re.search(r"\n\| extra .*?\n\n", (ROOT / "README.md").read_text(), re.DOTALL)
    assert table is not None
    assert re.findall(r"^\| `(\w+)` \|", table[0], re.MULTILINE) == list(PROJECT["optional-dependencies"])


def test_all_has_every_extra_of_a_program() -> None:
    (everything,) = map(Requirement, PROJECT["optional-dependencies"]["all"])
    assert everything.extras == PROJECT["optional-dependencies"].keys() - {"all", "testing"}
