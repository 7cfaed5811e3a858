"""Errors and help are in plain English (docs/contribute/style.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import click

from qworker.cli.main import cli
from tests.support.dialect import problems_in

ROOT = Path(__file__).parents[2]


def test_error_texts_and_log_lines_have_no_words_of_a_dialect() -> None:
    problems = problems_in(text for path in sources() for text in texts_of(path))
    assert not problems, "\n".join(problems)


def test_help_has_no_words_of_a_dialect() -> None:
    problems = problems_in(help_texts(cli, "qworker"))
    assert not problems, "\n".join(problems)


def sources() -> list[Path]:
    return [*(ROOT / "qworker").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]


def texts_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the string constants of a module that are not docstrings or names of classes, each with its place."""
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
        if not (node.value.isidentifier() and node.value[0].isupper()):
            yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


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
