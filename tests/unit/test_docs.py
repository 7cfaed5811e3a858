"""The pages that a newcomer types from really run, and the site builds without a dangling link.

In README.md and docs/quickstart.md, a Python block that begins with `# <name>.py` is that file, and a `console` block is a session: each
line after `$ ` is run by a shell in the same folder, and the lines under it must appear in what it prints, in their order, where
`...` stands for anything. A `qworker run` without `--burst` runs until its lines have appeared, and is then stopped as Ctrl-C would.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "docs/quickstart.md"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATIENCE = 120.0

# Each of these starts a dozen interpreters, perhaps beside many others.
pytestmark = pytest.mark.timeout(900)


def blocks(page: str) -> list[tuple[str, str]]:
    return [
        (language, text)
        for language, text in BLOCK.findall((ROOT / page).read_text())
        if language in {"python", "console"}
    ]


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
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QWORKER_")}
    return {**kept, "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}", "PYTHONUNBUFFERED": "1"}


def run_to_its_end(command: str, expected: list[str], folder: Path) -> None:
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
    assert shown(expected, done.stdout), f"$ {command}\n{done.stdout}{done.stderr}\nlacks {expected}"


def run_until_shown(command: str, expected: list[str], folder: Path) -> None:
    log = folder / "output.log"
    with log.open("w") as output:
        started = subprocess.Popen(
            command.split(),
            cwd=folder,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while not shown(expected, log.read_text()):
            assert started.poll() is None, f"$ {command}\nended with {started.returncode}:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"$ {command}\n{log.read_text()}\nlacks {expected}"
            time.sleep(0.02)
        started.send_signal(signal.SIGINT)
        assert started.wait(PATIENCE) == 0, f"$ {command}\n{log.read_text()}"
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_is_what_happens(page: str, tmp_path: Path) -> None:
    commands = 0
    for language, text in blocks(page):
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", text)
            assert name, f"{page}: a Python block that is no file cannot be run:\n{text}"
            (tmp_path / name.group(1)).write_text(text)
            continue
        for command, expected in sessions(text):
            commands += 1
            forever = command.startswith("qworker run") and "--burst" not in command
            (run_until_shown if forever else run_to_its_end)(command, expected, tmp_path)
    assert commands >= 2


def test_the_tests_on_the_page_about_testing_pass(tmp_path: Path) -> None:
    names = []
    for _, text in blocks("docs/howto/testing.md"):
        name = re.match(r"# (\w+\.py)\n", text)
        assert name
        names.append(name.group(1))
        (tmp_path / name.group(1)).write_text(text)
    assert names == ["conftest.py", "app.py", "test_app.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-o", "asyncio_mode=auto", "-p", "no:cacheprovider", "-p", "no:anyio"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
    assert not (tmp_path / "spool").exists()


@pytest.mark.parametrize(
    "page", [*sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")), "README.md", "CONTRIBUTING.md"]
)
def test_every_relative_link_and_every_python_block_is_sound(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}, which does not exist"
    for language, block in BLOCK.findall(text):
        if language == "python":
            compile(block, page, "exec", dont_inherit=True)


def commands(group: click.Group, context: click.Context, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command by what is typed for it, and those of groups by their own names."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield prefix + name, command
        if isinstance(command, click.Group):
            yield from commands(command, context)


def test_every_command_and_every_option_of_the_command_line_is_in_its_page() -> None:
    from qworker.cli.main import cli

    page = (ROOT / "docs" / "cli.md").read_text()
    for name, command in commands(cli, click.Context(cli), "qworker "):
        assert name in page, f"docs/cli.md does not have `{name}`"
        for option in (parameter for parameter in command.params if isinstance(parameter, click.Option)):
            longest = max(option.opts, key=len)
            assert longest in page, f"docs/cli.md does not have {longest} of `{name}`"
