"""The public names of qworker, as the code has them, and the tables of the pages that list them.

`python -m tests.reference` writes the tables that need no words of their own.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import click

from qworker.cli.configured import PREFIX, VARIABLES, options_of, walk
from qworker.cli.main import cli
from qworker.errors import InvalidURL
from qworker.registry import open_backend, schemes
from qworker_file.fsq.constants import Constants

__all__ = [
    "ROOT",
    "command_names",
    "settings",
    "sources",
    "table",
    "tables",
    "url_options",
    "variables",
    "written_settings",
]

ROOT = Path(__file__).parents[1]
_CONFIGURATION = "docs/configuration.md"
_MARK = "<!-- Written by `python -m tests.reference` from the commands; a test compares. -->\n"


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


def url_options() -> dict[str, set[str]]:
    """The options of every URL scheme, as the scheme itself lists them when it refuses one."""
    found: dict[str, set[str]] = {}
    for scheme in schemes():
        place = "///s" if scheme == "unix" else "//h/main" if scheme == "redis+sentinel" else "//h"
        server = scheme.startswith(("redis", "unix", "rfq", "mq+"))
        try:
            open_backend(f"{scheme}:{place if server else '///x'}?no_such_option=1")
        except InvalidURL as error:
            found[scheme] = {*str(error).partition("known: ")[2].split(", ")}
    return found


def variables() -> set[str]:
    """Every variable that the code names and that is not an option of a command."""
    found = {*VARIABLES, *(f"FSQ_{name.upper()}" for name in Constants.__struct_fields__)}
    for path in sources():
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type != tokenize.COMMENT:
                found |= {*re.findall(r"\b(?:QWORKER|FSQ|RFQ)_[A-Z][A-Z_]*[A-Z]\b(?![*_])", token.string)}
    return found - {PREFIX + name.upper() for name in settings()} | VARIABLES


def settings() -> dict[str, list[str]]:
    """Every option that can be a setting, with its commands, as they are typed after `qworker`."""
    found: dict[str, list[str]] = {}
    for name, command in _commands(cli, ""):
        if isinstance(command, click.Group):
            continue
        for key in options_of(command):
            found.setdefault(key, []).append(name)
    return dict(sorted(found.items()))


def command_names() -> list[str]:
    """Every command, as it is typed after `qworker`."""
    assert len([*walk(cli)]) == len([*_commands(cli, "")])
    return [name for name, _ in _commands(cli, "")]


def _commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path}{name} ")


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
