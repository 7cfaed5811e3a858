"""The public names of qworker, as the code has them, and the tables of the pages that list them.

`python -m tests.support.reference` writes the tables that need no words of their own.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import click
import msgspec

from qworker import log_events as events
from qworker.backend.registry import open_backend, schemes
from qworker.cli.configured import PREFIX, VARIABLES, options_of, walk
from qworker.cli.main import cli
from qworker.errors import InvalidURL
from qworker.health.exposition import WorkerCollector, format_metrics
from qworker.health.worker_report import WorkerReport
from qworker.message import Lease, Message, QueueStats
from qworker.worker.delivery import Delivery, WorkerCounts
from qworker.worker.metrics import Feature, TaskCounts
from qworker_fsq.environment import Constants

__all__ = [
    "ROOT",
    "LogEvent",
    "Metric",
    "bound_fields",
    "command_names",
    "instruments",
    "log_events",
    "message_fields",
    "metrics",
    "settings",
    "sources",
    "table",
    "tables",
    "url_options",
    "variables",
    "written_settings",
]

ROOT = Path(__file__).parents[2]
_CONFIGURATION = "docs/reference/configuration.md"
_MARK = "<!-- Written by `python -m tests.support.reference` from the commands; a test compares. -->\n"


def tables(page: str, heading: str) -> list[list[list[str]]]:
    """The tables of a page below a heading, up to the next one: their rows of cells, without the head."""
    text = (ROOT / page).read_text()
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page} has no heading {heading!r}"
    blocks = re.findall(r"(?:^\|.*\n)+", found[1], re.MULTILINE)
    return [[_cells(line) for line in block.splitlines()[2:]] for block in blocks]


def table(page: str, heading: str) -> list[list[str]]:
    """The one table below a heading.

    A name that stands twice in its first column is an error.
    """
    (rows,) = tables(page, heading)
    names = [row[0] for row in rows]
    assert len(names) == len({*names}), f"{page}, {heading}: {sorted(n for n in names if names.count(n) > 1)}"
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]


def sources() -> Iterator[Path]:
    """Every module."""
    for top in ("qworker", "backends"):
        yield from sorted((ROOT / top).rglob("*.py"))


@cache
def url_options() -> dict[str, set[str]]:
    """The options of every URL scheme, as the scheme itself lists them when it refuses one."""
    found: dict[str, set[str]] = {}
    for scheme in schemes():
        place = "///s" if scheme == "unix" else "//h/main" if scheme == "redis+sentinel" else "//h"
        server = scheme.startswith(("redis", "unix", "rfq", "mq+"))
        try:
            open_backend(f"{scheme}:{place if server else '///x'}?no_such_option=1")
        except InvalidURL as error:
            found[scheme] = {*str(error).partition("Options: ")[2].split(", ")}
    return found


@cache
def variables() -> set[str]:
    """Every variable that the code names and that is not an option of a command."""
    found = {*VARIABLES, *(f"FSQ_{name.upper()}" for name in Constants.__struct_fields__)}
    for path in sources():
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type != tokenize.COMMENT:
                found |= {*re.findall(r"\b(?:QWORKER|FSQ|RFQ)_[A-Z][A-Z_]*[A-Z]\b(?![*_])", token.string)}
    return found - {PREFIX + name.upper() for name in settings()} | VARIABLES


class LogEvent(msgspec.Struct):
    """An event that some logger logs.

    Attributes:
        levels: The levels that it is logged at.
        fields: What the calls give, and not what their loggers are bound to.
    """

    levels: set[str] = msgspec.field(default_factory=set[str])
    fields: set[str] = msgspec.field(default_factory=set[str])


@cache
def log_events() -> dict[str, LogEvent]:
    """Every log event by its name, as the calls of loggers in the code have them.

    A line of the standard library's logging is a sentence, and has neither.
    """
    found: dict[str, LogEvent] = {}
    for path in sources():
        module = ast.parse(path.read_text())
        for function in ast.walk(module):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for name, levels, fields in _logged(function, module):
                    event = found.setdefault(name, LogEvent())
                    event.levels |= levels
                    event.fields |= fields
    return found


@cache
def bound_fields() -> set[str]:
    """Every field that a logger is bound to."""
    found: set[str] = set()
    for path in sources():
        module = ast.parse(path.read_text())
        for node in ast.walk(module):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "bind"):
                continue
            if "log" in ast.unparse(node.func.value).lower():
                given = [one for one in node.keywords if one.arg or isinstance(one.value, ast.Dict)]
                found |= {name for one in given for name in _fields(one, None, module)}
    return found


class Metric(msgspec.Struct):
    """A metric of `/metrics`."""

    type: str
    labels: set[str] = msgspec.field(default_factory=set[str])


def metrics() -> dict[str, Metric]:
    """Every metric of a page of `/metrics` on which all of them are."""
    stats = QueueStats(queue="q", ready=1, leased=1, delayed=1, done=1, failed=1, oldest_age_s=1.0)
    counts = TaskCounts("q", "t", acked=1, retried=1, failed=1, released=1, lost=1)
    for feature in get_args(Feature):
        counts.features[feature] = {"x": 1}
    report = WorkerReport(life="1", pid=1, state="working", counts=[counts], queues=[stats], looked_at=0.0)
    found: dict[str, Metric] = {}
    name = ""
    page, _ = format_metrics(WorkerCollector([report], [counts], [stats]), own_metrics=False)
    for line in page.decode().splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.removeprefix("# TYPE ").split(" ")
            found[name] = Metric(kind)
        elif not line.startswith("#"):
            found[name].labels |= {*re.findall(r"[{,](\w+)=", line)} - {"le"}
    return found


def instruments() -> dict[str, str]:
    """Every instrument of OpenTelemetry, with its type."""
    calls = re.finditer(
        r"create_(?:observable_)?(\w+)\(\s*\"([^\"]+)\"", (ROOT / "qworker" / "worker" / "telemetry.py").read_text()
    )
    return {call[2]: call[1] for call in calls}


def message_fields() -> set[str]:
    """The fields of an event of one message, outside of a trace."""
    lease = Lease(message=Message(id="1", queue="q", body=b""), token=1, expires_at=0.0)
    return {*Delivery(lease=lease, extended_at=0.0, expires=0.0).fields()}


_LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def _logged(
    function: ast.FunctionDef | ast.AsyncFunctionDef, module: ast.Module
) -> Iterator[tuple[str, set[str], set[str]]]:
    """What a function logs: names, levels and fields."""
    for node in ast.walk(function):
        if not (isinstance(node, ast.Call) and node.args):
            continue
        levels = _levels(node.func, function)
        if not levels or (isinstance(node.args[0], ast.Constant) and " " in str(node.args[0].value)):
            continue
        fields = {name for given in node.keywords for name in _fields(given, function, module)}
        for name in _names(node.args[0], function, module):
            yield name, levels, fields


def _levels(called: ast.expr, function: ast.AST) -> set[str]:
    """The levels of what is called, if it logs; it may be a name that was given to one of several methods."""
    if isinstance(called, ast.Attribute):
        is_log = called.attr in _LEVELS and "log" in ast.unparse(called.value).lower()
        return {called.attr} if is_log else set()
    if isinstance(called, ast.IfExp):
        return _levels(called.body, function) | _levels(called.orelse, function)
    if isinstance(called, ast.Name):
        given = _assigned(called.id, function)
        return _levels(given, function) if given is not None and not isinstance(given, ast.Name) else set()
    return set()


def _names(given: ast.expr, function: ast.FunctionDef | ast.AsyncFunctionDef, module: ast.Module) -> list[str]:
    """The events that an argument can be: a constant, or those that the callers of the function give it."""
    if not isinstance(given, ast.Name):
        return [_word(given)]
    return [
        _word(one)
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == function.name
        for one in node.args
        if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "events"
    ]


def _fields(given: ast.keyword, function: ast.AST | None, module: ast.Module) -> set[str]:
    """The fields that one keyword argument of a call gives, which may be a dictionary of them."""
    value = given.value
    text = ast.unparse(value)
    if given.arg is not None:
        return {given.arg}
    if isinstance(value, ast.Dict):
        return _keys(value)
    if text.endswith(".fields()"):
        return message_fields()
    if text.endswith("asdict(self.counts)"):
        return {*WorkerCounts.__struct_fields__}
    if isinstance(value, ast.Call):
        return {key for returned in _returned(ast.unparse(value.func), module) for key in _keys(returned)}
    assert isinstance(value, ast.Name), text
    assert function is not None, text
    dictionary = _assigned(value.id, function)
    assert isinstance(dictionary, ast.Dict), text
    later = [n.slice for n in ast.walk(function) if isinstance(n, ast.Subscript) and ast.unparse(n.value) == value.id]
    return _keys(dictionary) | {*map(_word, later)}


def _keys(dictionary: ast.Dict) -> set[str]:
    return {_word(key) for key in dictionary.keys if key is not None}


def _returned(name: str, module: ast.Module) -> list[ast.Dict]:
    """The dictionaries that a function of the module returns."""
    found = [
        node.value
        for function in module.body
        if isinstance(function, ast.FunctionDef) and function.name == name
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Dict)
    ]
    assert found, f"cannot tell the fields that {name} returns: say it in tests/support/reference.py"
    return found


def _assigned(name: str, function: ast.AST) -> ast.expr | None:
    for node in ast.walk(function):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if name in map(ast.unparse, targets):
            return node.value  # type: ignore[attr-defined, no-any-return]
    return None


def _word(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "events":
        return str(vars(events)[node.attr])
    return str(ast.literal_eval(node))


@cache
def settings() -> dict[str, list[str]]:
    """Every option that can be a setting, with its commands, as they are typed after `qworker`."""
    found: dict[str, list[str]] = {}
    for path, command in walk(cli):
        if isinstance(command, click.Group):
            continue
        for key in options_of(command):
            found.setdefault(key, []).append(" ".join(path))
    return dict(sorted(found.items()))


def command_names() -> list[str]:
    """Every command, as it is typed after `qworker`."""
    return [" ".join(path) for path, _ in walk(cli)]


def written_settings() -> str:
    """The page of the configuration with its table of settings."""
    beginning, mark, _ = (ROOT / _CONFIGURATION).read_text().partition(_MARK)
    rows = [
        f"| `{key.replace('_', '-')}` | {', '.join(f'`{name}`' for name in names)} |"
        for key, names in settings().items()
        if key != "url"
    ]
    return "\n".join([f"{beginning}{mark}", "| setting | commands |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    (ROOT / _CONFIGURATION).write_text(written_settings())
