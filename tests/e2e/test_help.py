"""Every command says how it is used, in an installation without extras too."""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click

from qworker.cli.configured import options_of, walk
from qworker.cli.main import cli
from qworker.cli.options import Unavailable
from tests.support.processes import PYTHON, environment, without_extras
from tests.support.waiting import PATIENCE


def commands(group: click.Group, *above: str) -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*above, name)
        if isinstance(command, click.Group):
            yield from commands(command, *above, name)


def test_help_begins_with_one_short_sentence_and_every_option_says_what_it_is() -> None:
    wrong = []
    for path, command in walk(cli):
        if isinstance(command, Unavailable):
            continue
        name = " ".join(path)
        first = inspect.cleandoc(command.help or "").partition("\n\n")[0]
        if not re.fullmatch(r"[A-Z][^.:;]+\.", first) or len(first) > 72:
            wrong.append(f"{name}: {first}")
        helps = {key: option.help or "" for key, option in options_of(command).items()}
        wrong += [f"{name} {key}: {text}" for key, text in helps.items() if not re.fullmatch(r"[A-Z].*[.)]", text)]
    assert not wrong, "\n".join(wrong)


# One interpreter for all commands: to start one takes longer than a help. After each of them, both streams have a mark.
PROGRAM = """
import sys
from qworker.cli.main import main

for line in sys.argv[1:]:
    status = main([*line.split(), "--help"])
    for stream in (sys.stdout, sys.stderr):
        print(f"{chr(0)}{status}{chr(0)}", end="", file=stream, flush=True)
"""


def test_every_command_has_help_or_names_the_extra_that_it_lacks(tmp_path: Path) -> None:
    asked = [(), *commands(cli)]
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM, *map(" ".join, asked)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs, errors = done.stdout.split("\0"), done.stderr.split("\0")
    lacking = set()
    for command, output, status, error in zip(asked, outputs[::2], outputs[1::2], errors[::2], strict=False):
        shown = f"{command} ended with {status}:\n{output}{error}"
        if status == "2" and re.fullmatch(r"qworker: .* needs the extra '\w+': .*\n", error):
            lacking.add(command)
            continue
        assert status == "0", shown
        assert "Usage: " in output, shown
        assert error == "", shown
        if command == ():
            assert all(name in output for name in cli.list_commands(click.Context(cli))), shown
    assert len(outputs) == len(errors) == 2 * len(asked) + 1
    assert () not in lacking
    assert bool(lacking) == without_extras(), f"without help for want of an extra: {sorted(lacking)}"
