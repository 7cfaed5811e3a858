"""Every command says how it is used, in an installation without extras too."""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import pytest

from qworker.cli.configured import options_of, walk
from qworker.cli.main import cli
from qworker.cli.options import Unavailable
from tests.support.processes import PYTHON, environment, without_extras
from tests.support.waiting import PATIENCE

# As many interpreters as there are commands.
pytestmark = pytest.mark.timeout(300)


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


def test_every_command_has_help_or_names_the_extra_that_it_lacks(tmp_path: Path) -> None:
    asked = [(), *commands(cli)]

    def help_of(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PYTHON, "-m", "qworker", *command, "--help"],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )

    lacking = set()
    with ThreadPoolExecutor(2) as threads:
        for command, done in zip(asked, threads.map(help_of, asked), strict=True):
            shown = f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            if done.returncode == 2 and re.fullmatch(r"qworker: .* needs the extra '\w+': .*\n", done.stderr):
                lacking.add(command)
                continue
            assert done.returncode == 0, shown
            assert "Usage: " in done.stdout, shown
            assert done.stderr == "", shown
            if command == ():
                assert all(name in done.stdout for name in cli.list_commands(click.Context(cli))), shown
    assert () not in lacking
    assert bool(lacking) == without_extras(), f"without help for want of an extra: {sorted(lacking)}"
