"""Write docs/reference/cli.md from the help of the commands: `python -m tests.support.cli_page`.

The text below `<!-- more -->` in a section is kept.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click

from qworker.cli.configured import walk
from qworker.cli.main import COMMANDS, GROUPS, cli

__all__ = ["PAGE", "written"]

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
_MARK = "<!-- Written from here on by `python -m tests.support.cli_page` from the commands' help. A test compares. -->"
_MORE = "<!-- more -->"
# What is code in a help text: options, variables, URLs with a scheme only.
_CODE = re.compile(r"(?<![`\w-])(--[a-z][a-z-]*|(?:QWORKER|FSQ|RFQ)_[A-Z_]+[A-Z*](?:<OPTION>)?)(?![\w`])")


def written() -> str:
    """The page."""
    page = PAGE.read_text()
    beginning = page.partition(_MARK)[0]
    more = dict(
        re.findall(
            rf"^## `(qworker [^`]+)`\n.*?(?=^{_MORE}\n|^## |\Z)(?:{_MORE}\n(.*?))?(?=^## |\Z)", page, re.S | re.M
        )
    )
    every = ((" ".join(["qworker", *path]), command) for path, command in walk(cli))
    sections = [_section(name, command, more.get(name, "")) for name, command in every]
    return "\n\n".join([f"{beginning}{_MARK}", _groups(), *sections]) + "\n"


def _groups() -> str:
    names = cli.list_commands(click.Context(cli))
    groups = {**GROUPS, "Protocols": [name for name in names if name not in COMMANDS]}
    rows = [
        f"| {title} | {', '.join(f'[`{name}`](#qworker-{name})' for name in group)} |"
        for title, group in groups.items()
    ]
    return "\n".join(["| group | commands |", "|---|---|", *rows])


def _section(name: str, command: click.Command, more: str) -> str:
    usage = " ".join(command.collect_usage_pieces(click.Context(command)))
    parts = [f"## `{name}`", f"```text\n{name} {usage}\n```", *_paragraphs(command.help or "")]
    options = [param for param in command.params if isinstance(param, click.Option)]
    if options:
        parts.append("\n".join(["| option | meaning | default |", "|---|---|---|", *map(_row, options)]))
    if more:
        parts += [_MORE, more.strip()]
    return "\n\n".join(parts)


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if not paragraph.startswith("\b\n"):
            yield textwrap.fill(
                _coded(" ".join(paragraph.split())), 120, break_on_hyphens=False, break_long_words=False
            )
            continue
        first, _, rest = paragraph.removeprefix("\b\n").partition("\n")
        if first.startswith("Example"):
            yield f"```bash\n{inspect.cleandoc(rest)}\n```"
        else:
            yield first
            yield f"```text\n{inspect.cleandoc(rest)}\n```"


def _row(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in (*sorted(option.opts, key=len), *option.secondary_opts))
    metavar = (
        "" if option.is_flag or option.count else f" `{_cell(option.make_metavar(click.Context(click.Command('x'))))}`"
    )
    default: object = option.default if option.show_default and not option.is_flag else None
    shown = "" if default is None or not isinstance(default, (str, int, float)) else f"`{_cell(_plain(default))}`"
    return f"| {names}{metavar} | {_cell(_coded(option.help or ''))} | {shown} |"


def _plain(default: float | str) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default)


def _coded(text: str) -> str:
    """A help text with its options and variables as code."""
    return "`".join(part if number % 2 else _CODE.sub(r"`\1`", part) for number, part in enumerate(text.split("`")))


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(written())
