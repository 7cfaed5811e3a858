"""What people read in errors and in help is plain English."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

from qworker.cli.main import cli

ROOT = Path(__file__).parents[2]
# Words of a dialect, and forms that name only what would have been right.
FORBIDDEN = re.compile(
    r"\b(anew|mend(s|ed)?|told|tells?|somebody|anybody|nobody|whoever|likewise|beside|whence|thus|lest)\b"
    r"|(?<!there )\b(is|are) no (?!longer|older)\b|\bat (least|most) .*, not\b|\bis at (least|most)\b|\bis \d+ to \d+\b"
    r"|\bfor good\b|\blet go\b|\bgive[ns]? back\b",
    re.IGNORECASE,
)


def test_error_texts_and_log_lines_have_no_words_of_a_dialect() -> None:
    found = [place for path in sources() for place in wrong_texts(path)]
    assert not found, "\n".join(found)


def test_help_has_no_words_of_a_dialect() -> None:
    found = [f"{where}: {text}" for where, text in help_texts(cli, "qworker") if FORBIDDEN.search(text)]
    assert not found, "\n".join(found)


def sources() -> list[Path]:
    return [*(ROOT / "qworker").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]


def wrong_texts(path: Path) -> Iterator[str]:
    """The texts of a module that are not docstrings."""
    tree = ast.parse(path.read_text())
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in documentation:
            continue
        if FORBIDDEN.search(node.value) and not (node.value.isidentifier() and node.value[0].isupper()):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}"


def help_texts(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    yield name, f"{command.help or ''} {command.epilog or ''} {command.short_help or ''}"
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield f"{name} {parameter.opts[0]}", parameter.help or ""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None, child
            yield from help_texts(found, f"{name} {child}")
