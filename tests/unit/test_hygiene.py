"""What tests promise of themselves: none sleeps and hopes, and none can pass without an assertion."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Only these sleep: the helpers that poll or let time pass, each under a name that says what for.
HELPERS = {"tests/support/waiting.py", "qworker/testing/wait_until.py"}
# Programs that tests start, which run alone, or with old code too. They work, retry and keep a pace.
PROGRAMS = {
    "tests/fault/mixed_programs.py",
    "tests/fault/programs.py",
    "tests/fault/redis_programs.py",
    "tests/fault/soak_app.py",
    "tests/interop/rfq_peer.py",
}
# A function that sleeps, with its reason.
SLEEPERS = {"qworker/testing/harness.py:advance": "time really passes on a store with a clock of its own"}

# Calls that assert: those of pytest, of pytester and of Hypothesis.
ASSERTING = {"raises", "fail", "assert_outcomes", "fnmatch_lines", "run_state_machine_as_test"}
# What is iterated over is not empty, if it is made by one of these. Constants and classes are not empty either.
FILLED = {"range", "enumerate", "zip", "sorted", "sample"}
# A test that can pass without an assertion, with its reason.
SILENT = {
    "qworker/testing/contract_history.py:test_another_process_reads_on_where_it_has_left_off": "no history",
    "qworker/testing/contract_history.py:test_forgotten_history_may_be_gone_and_what_follows_stays": "no history",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the tests and of the shipped suite, by its path."""
    paths = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "qworker/testing").glob("*.py")]
    names = {path.relative_to(ROOT).as_posix(): path for path in paths}
    left_out = ("tests/fixtures/", "tests/bench/")
    return {name: ast.parse(path.read_bytes()) for name, path in sorted(names.items()) if not name.startswith(left_out)}


def functions(tree: ast.AST) -> Iterator[Function]:
    """Functions at any depth."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def name_of(node: ast.AST) -> str:
    """The last name of what a call or an expression names."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls in a tree."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


# -- sleeping ----------------------------------------------------------------------------------------------------------


def sleeps(tree: ast.AST) -> set[ast.Call]:
    """The calls of `sleep` that are not `sleep(0)`."""
    return {
        call
        for call in calls(tree)
        if name_of(call) == "sleep" and not (len(call.args) == 1 and ast.unparse(call.args[0]) == "0")
    }


def test_only_the_helpers_sleep() -> None:
    found = []
    for name, tree in modules().items():
        allowed = {call for each in functions(tree) if f"{name}:{each.name}" in SLEEPERS for call in sleeps(each)}
        if name not in HELPERS | PROGRAMS:
            found += [f"{name}:{call.lineno}" for call in sleeps(tree) - allowed]
    assert found == [], "wait for a fact, or say by a name in tests/support/waiting.py what the time is for"


# -- asserting ---------------------------------------------------------------------------------------------------------


@cache
def asserting() -> dict[str, set[str]]:
    """By module, its functions that assert: at once, or by a call of another one that the module has or imports."""

    def asserts(tree: ast.AST) -> bool:
        raised = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None)
        return any(isinstance(node, ast.Assert) for node in ast.walk(tree)) or "AssertionError" in map(name_of, raised)

    known = {name: {each.name for each in functions(tree) if asserts(each)} for name, tree in modules().items()}
    count = -1
    while count != (count := sum(map(len, known.values()))):
        for name, tree in modules().items():
            seen = visible(name, known)
            known[name] |= {each.name for each in functions(tree) if any(name_of(call) in seen for call in calls(each))}
    return known


def visible(name: str, known: dict[str, set[str]]) -> set[str]:
    """The asserting functions that a module can call."""
    found = known[name] | ASSERTING
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.ImportFrom) and node.module:
            source = node.module.replace(".", "/")
            for path in (f"{source}.py", *(f"{source}/{alias.name}.py" for alias in node.names)):
                found |= known.get(path, set())
    return found


class Paths:
    """The paths through a test: whether each of them comes to an assertion.

    Args:
        test: The test.
        asserting: The names of functions that assert.
    """

    def __init__(self, test: Function, asserting: Collection[str]) -> None:
        self._asserting = asserting
        # Names of lists, sets and dictionaries that the test writes down.
        self._filled = {
            name_of(node.targets[0])
            for node in ast.walk(test)
            if isinstance(node, ast.Assign) and self._is_filled(node.value, set())
        }

    def all_assert(self, body: Sequence[ast.stmt]) -> bool:
        """Whether each path through these statements asserts."""
        for statement in body:
            if self._asserts(statement):
                return True
            if isinstance(statement, ast.Return) or self._may_leave(statement):
                return False
        return False

    def _asserts(self, statement: ast.stmt) -> bool:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return False
            case ast.For(iter=over, body=body) | ast.AsyncFor(iter=over, body=body):
                return self._has(over) or (self._is_filled(over, self._filled) and self.all_assert(body))
            case ast.If(test=test, body=body, orelse=other):
                return self._has(test) or (self.all_assert(body) and self.all_assert(other))
            case ast.While(test=test, body=body):
                return self._has(test) or self.all_assert(body)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                return any(map(self._has, items)) or self.all_assert(body)
            case ast.Try(body=body, handlers=handlers, orelse=other, finalbody=final):
                after = self.all_assert(other) and all(self.all_assert(each.body) for each in handlers)
                return after or self.all_assert(body) or self.all_assert(final)
            case _:
                return self._has(statement)

    def _may_leave(self, statement: ast.stmt) -> bool:
        """Whether a path ends in this statement without an assertion."""
        if isinstance(statement, ast.If):
            return any(
                any(isinstance(each, ast.Return) for each in branch) and not self.all_assert(branch)
                for branch in (statement.body, statement.orelse)
            )
        return False

    def _has(self, tree: ast.AST) -> bool:
        return any(
            isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and name_of(node) in self._asserting)
            for node in ast.walk(tree)
        )

    def _is_filled(self, over: ast.expr, names: Collection[str]) -> bool:
        match over:
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items) | ast.Dict(values=items):
                return bool(items)
            case ast.IfExp(body=one, orelse=other):
                return self._is_filled(one, names) and self._is_filled(other, names)
            case ast.Call():
                return name_of(over) in FILLED or (
                    name_of(over) in {"items", "values"}
                    and self._is_filled(over.func.value if isinstance(over.func, ast.Attribute) else over, names)
                )
            case _:
                return name_of(over) in names or name_of(over) == "__all__" or name_of(over)[:1].isupper()


def test_no_test_can_pass_without_an_assertion() -> None:
    silent = set()
    for name, tree in modules().items():
        if Path(name).name.startswith(("test_", "contract_")):
            seen = visible(name, asserting())
            for each in functions(tree):
                if each.name.startswith("test_") and not Paths(each, seen).all_assert(each.body):
                    silent.add(f"{name}:{each.name}")
    assert silent - set(SILENT) == set(), "assert on every path, also where a loop has nothing to do"
