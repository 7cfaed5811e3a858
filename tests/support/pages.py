"""The blocks of the pages, and what proves each kind of them.

A `python`, `toml`, `ini` or `sh` block that begins with `# NAME` is that file; with `# NAME, continued` it is
what follows in it. A `console` block is a session: each line after `$ ` is run by a shell, and the lines under it must
appear in what it prints, in their order, where `...` stands for anything. `sh` and `bash` blocks are commands to type:
each must be known, and those of qworker are parsed by the command line itself.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import click

from qworker.cli.main import cli
from tests.support.processes import PYTHON

__all__ = ["ROOT", "Block", "blocks", "commands", "environment", "pages", "parsed", "sessions", "shown"]

ROOT = Path(__file__).parents[2]
_FILE = re.compile(r"# ([\w-]+(?:/[\w-]+)*\.(?:py|toml|ini|sh))(, continued)?\n")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        line: Where it begins.
        language: What stands after the fence.
        text: Its lines.
    """

    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that it is, if it is one."""
        found = _FILE.match(self.text)
        return None if found is None else found[1]

    @property
    def continues(self) -> bool:
        """Whether it follows what an earlier block has put into its file."""
        found = _FILE.match(self.text)
        return found is not None and found[2] is not None


def pages() -> list[str]:
    """Every page that a user or contributor reads."""
    found = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")]
    return ["README.md", "CONTRIBUTING.md", "SECURITY.md", *sorted(str(path.relative_to(ROOT)) for path in found)]


def blocks(page: str) -> list[Block]:
    """The blocks of a page; code that no fence encloses is an error, because nothing would prove it."""
    found: list[Block] = []
    opened: tuple[int, str] | None = None
    lines: list[str] = []
    above = ""
    for number, line in enumerate((ROOT / page).read_text().splitlines(keepends=True), 1):
        fence = re.match(r" *```(\S*)", line)
        if fence is not None and opened is None:
            opened, lines = (number, fence[1]), []
        elif fence is not None and opened is not None:
            found.append(Block(*opened, "".join(lines)))
            opened = None
        elif opened is not None:
            lines.append(line)
        else:
            assert not (line.startswith("    ") and above.strip() == ""), f"{page}:{number}: code without a fence"
        above = line
    assert opened is None, f"{page}:{opened}: a fence that is not closed"
    return found


def sessions(text: str) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines that it must print."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line:
            found[-1][1].append(line)
    return found


def shown(expected: list[str], output: str) -> bool:
    """Whether a page's lines stand in what was printed; the widths of columns may differ."""
    wanted, found = (re.sub(" +", " ", text) for text in ("\n".join(expected), output))
    return re.search("[^\\0]*?".join(re.escape(part) for part in wanted.split("...")), found) is not None


def environment() -> dict[str, str]:
    """What a reader's shell has: the installed programs, and nothing of the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("QWORKER_", "PYTEST_"))}
    return {**kept, "PATH": f"{Path(PYTHON).parent}:{kept['PATH']}", "PYTHONUNBUFFERED": "1"}


def commands(text: str) -> list[list[str]]:
    """The simple commands of a shell block, each as its words; those of `$(...)` are commands of their own."""
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        for inner in _SUBSTITUTION.findall(line):
            found += commands(inner)
        words = shlex.shlex(_SUBSTITUTION.sub("SUBSTITUTED", line), posix=True, punctuation_chars="();|&<>")
        words.whitespace_split = True
        found += _simple(list(words))
    return found


def _simple(words: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    redirected = False
    for word in words:
        if set(word) <= set("<>&") and set(word) & set("<>"):
            redirected = True
        elif set(word) <= set("();|&"):
            found.append([])
        elif redirected or (not found[-1] and _ASSIGNMENT.match(word)):
            redirected = False
        else:
            found[-1].append(word)
    return [command for command in found if command]


def parsed(arguments: list[str], group: click.Group = cli) -> None:
    """Let the command line itself parse a command, without running it.

    Raises:
        click.UsageError: it does not understand it.
    """
    context = click.Context(group)
    if arguments[0] in {name for option in group.get_params(context) for name in option.opts}:
        return
    command = group.get_command(context, arguments[0])
    if command is None:
        raise click.UsageError(f"unknown command {arguments[0]!r}")
    if isinstance(command, click.Group):
        parsed(arguments[1:], command)
    else:
        command.make_context(arguments[0], arguments[1:], parent=context)
