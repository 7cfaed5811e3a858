"""What SECURITY.md promises has a test, and no module of the package reads code from data."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.unit.test_feature_table import functions

ROOT = Path(__file__).parents[2]
# They make objects of any class from bytes, or run text.
MODULES = {"pickle", "marshal", "shelve", "dbm", "dill", "cloudpickle", "jsonpickle", "yaml", "code", "multiprocessing"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell",
}


def code_from_data(source: str) -> list[str]:
    """What in a module could run what it reads."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            found += {ast.unparse(node.func)} & CALLS
            found += ["shell" for keyword in node.keywords if keyword.arg == "shell"]
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["pickle"]),
        ("def f():\n    from multiprocessing.managers import BaseManager", ["multiprocessing.managers"]),
        ("eval(text)", ["eval"]),
        ("os.system(text)", ["os.system"]),
        ("subprocess.run(text, shell=True)", ["shell"]),
        ("re.compile(text)\nimport json", []),
    ],
)
def test_code_that_comes_from_data_is_found(source: str, found: list[str]) -> None:
    assert code_from_data(source) == found


def test_no_module_reads_pickles_or_evaluates_text() -> None:
    sources = [*(ROOT / "qworker").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]
    assert {path.name for path in sources} >= {"envelope.py", "child_main.py"}
    found = {path.relative_to(ROOT).as_posix(): code_from_data(path.read_text()) for path in sources}
    assert {name: problems for name, problems in found.items() if problems} == {}


def test_each_promise_of_the_page_has_a_test() -> None:
    text = (ROOT / "SECURITY.md").read_text().partition("## What holds\n")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    tests = [re.search(r"\| `([\w/.]+)::(\w+)` \|$", row) for row in rows]
    assert len(tests) >= 12
    for row, test in zip(rows, tests, strict=True):
        assert test is not None, row
        assert test[2] in functions(ROOT / test[1]), row
