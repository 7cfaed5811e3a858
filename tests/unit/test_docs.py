"""Every block of every page is proved, outside of the checkout; and links lead somewhere.

What proves a block depends on its language (see tests/support/pages.py). A block that nothing here understands fails
its page's test.
"""

from __future__ import annotations

import asyncio
import configparser
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import pytest

import qworker.testing
import qworker.worker
from qworker import errors
from qworker.backend.registry import open_backend
from qworker.cli.main import cli, main
from qworker.cli.run import command as run_command
from qworker.failed_call import FailureCode
from qworker.message import Draft, SettleAction, Settlement
from qworker.tools.explain import Code
from qworker.url import BackendURL
from tests.support import cli_page, errors_page
from tests.support.pages import ROOT, blocks, commands, pages, parsed, sessions
from tests.support.reader import PEERS, Reader
from tests.support.servers import RedisServer

# Public names that only annotations of other names show.
UNLISTED = {"qworker.worker": {"QueueShare", "RunningMessage", "WorkerCounts"}}
# Commands of qworker that end by themselves, and need nothing but a store: they are run.
_RUN = """
browse create doctor enqueue explain export failures history ls move pause publish purge remove requeue resume schedules
stats
"""
RUN = set(_RUN.split())
# What those find: an app, and queues with messages in them.
APP = """\
from qworker import Tasks

tasks = Tasks("file://./spool")


@tasks.task(queue="thumbs")
def thumbnail(path: str, width: int = 100) -> None: ...


@tasks.task
def square(number: int) -> None: ...
"""
FAILED = "20261121071038_123456789_4242_host-7f3a9b21"

# A page starts a dozen interpreters, perhaps beside many others.
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("page", pages())
def test_a_page_does_what_it_shows_in_an_empty_folder(page: str, tmp_path: Path) -> None:
    with Reader(page, tmp_path) as reader:
        for block in blocks(page):
            reader.do(block)
        reader.read()


@pytest.mark.parametrize(
    ("page", "least"),
    [("README.md", 2), ("docs/tutorial/quickstart.md", 10), ("docs/howto/retries.md", 4), ("docs/howto/testing.md", 1)],
)
def test_a_newcomers_page_is_a_session_that_is_run(page: str, least: int) -> None:
    consoles = [block for block in blocks(page) if block.language == "console"]
    assert sum(len(sessions(block.text)) for block in consoles) >= least


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```python\nprint(1)\n```\n", "begins with"),
        ("```rust\nfn main() {}\n```\n", "nothing here proves"),
        ("```sh\nqworker stat file://./spool\n```\n", "unknown command"),
        ("```sh\nqworker stats file://./spool --jsonl\n```\n", "[Nn]o such option"),
        ("```sh\necho a | qwroker publish\n```\n", "does not know it"),
        ("```console\n$ echo a\nb\n```\n", "lacks"),
        ("```json\n{'a': 1}\n```\n", "Expecting property name"),
        ("Type\n\n    qworker run app:tasks\n", "without a fence"),
    ],
)
def test_a_block_that_is_wrong_or_new_fails_its_page(text: str, problem: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)

    def read() -> None:
        for block in blocks(str(page)):
            with Reader(str(page), tmp_path) as reader:
                reader.do(block)

    with pytest.raises((AssertionError, ValueError, click.UsageError)) as raised:
        read()
    assert re.search(problem, getattr(raised.value, "message", str(raised.value)))


# -- commands that are shown, and can be run ---------------------------------------------------------------------------


def runnable(page: str) -> list[list[str]]:
    """The commands of a page that end by themselves and need no input."""
    found = [command for block in blocks(page) if block.language in {"sh", "bash"} for command in commands(block.text)]
    return [
        arguments
        for program, *arguments in found
        if program == "qworker"
        and (arguments[0] in RUN or {"top", "--once"} <= {*arguments})
        and not {"-", "-f", "--follow", "--app", "-A"} & set(arguments)
        and (arguments[0] != "purge" or "--yes" in arguments)
    ]


async def fill(url: str) -> None:
    """Make queues in which there is something to see."""
    backend = open_backend(url)
    await backend.publish("thumbs", [Draft(body=b"bad", id=FAILED)])
    for lease in await backend.lease("thumbs", 1, 60.0):
        await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_PERM, error="no such picture")])
    for queue in ("thumbs", "inbox", "default"):
        await backend.publish(queue, [Draft(body=b"x")])
    await backend.aclose()


def write_app(page: str, folder: Path) -> None:
    """Write the files of a page that has an app of its own, and otherwise `APP`."""
    files = [block for block in blocks(page) if block.language == "python"]
    if page.startswith(PEERS) or "app.py" not in {block.file for block in files}:
        (folder / "app.py").write_text(APP)
        return
    for block in files:
        assert block.file is not None
        with (folder / block.file).open("a" if block.continues else "w") as file:
            file.write(block.text)


@pytest.fixture
def _no_modules_of_the_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget what a page's commands import, and what other tests have imported: each page has another `app`."""
    path, folders = list(sys.path), str(tmp_path_factory.getbasetemp())
    _forget_modules(folders)
    yield
    sys.path[:] = path
    _forget_modules(folders)


def _forget_modules(folder: str) -> None:
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]


def test_a_page_does_not_get_the_modules_of_another_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "left_behind.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("left_behind")
    request.getfixturevalue("_no_modules_of_the_page")
    assert "left_behind" not in sys.modules


@pytest.mark.usefixtures("_no_modules_of_the_page")
@pytest.mark.parametrize("page", [page for page in pages() if runnable(page)])
def test_the_commands_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_app(page, tmp_path)
    asyncio.run(fill("file://./spool"))
    asyncio.run(fill(f"file://{tmp_path}/var/spool/app"))
    with RedisServer() as server:
        asyncio.run(fill(server.url))
        for arguments in runnable(page):
            found = [FAILED if word == "ID" else word for word in arguments]
            found = [re.sub(r"redis://[\w.-]+/\d", server.url, word) for word in found]
            found = [word.replace(":///var/", f"://{tmp_path}/var/") for word in found]
            assert main(found) == 0, f"{page}: qworker {arguments}"


def test_the_systemd_unit_runs_a_command_that_there_is_drains_and_shares_its_queue() -> None:
    text = next(block.text for block in blocks("docs/howto/systemd.md") if block.language == "ini")
    assert text == (ROOT / "examples" / "systemd" / "app-worker.service").read_text()
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    service = unit["Service"]
    program, *arguments = service["ExecStart"].split()
    assert program.endswith("/qworker")
    parsed(arguments)
    options = run_command.make_context("run", arguments[1:]).params
    assert options["wait_for_backend"]
    assert float(service["TimeoutStopSec"]) >= options["shutdown_timeout"] + 15
    assert (service["KillMode"], service["Restart"], service["RestartPreventExitStatus"]) == (
        "mixed",
        "on-failure",
        "2",
    )
    # The group writes to the queue, and the sandbox lets the workers set the setgid bit.
    name, _, value = service["Environment"].partition("=")
    url = BackendURL.parse(value)
    assert name == "QWORKER_URL"
    assert str(url.directory) == f"/var/lib/{service['StateDirectory']}"
    assert int(url.choice("dir_mode", "", ("02770",)), 8) == int(service["StateDirectoryMode"], 8) == 0o2770
    assert service["UMask"] == "0007"
    assert "RestrictSUIDSGID" not in service


@pytest.mark.parametrize("page", pages())
def test_every_relative_link_leads_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    assert [target for target in targets if not ((ROOT / page).parent / target).exists()] == []


def every_command(group: click.Group, context: click.Context, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command by what is typed for it."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield prefix + name, command
        if isinstance(command, click.Group):
            yield from every_command(command, context, f"{prefix}{name} ")


def test_every_command_and_every_option_that_prose_names_exists() -> None:
    known = dict(every_command(cli, click.Context(cli), "qworker "))
    wrong, found = list[str](), 0
    for page in pages():
        prose = re.sub(r"^ *```.*?^ *```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
        for span in re.findall(r"`(qworker [a-z][^`]*)`", prose):
            name = max((name for name in known if f"{span} ".startswith(f"{name} ")), key=len, default=None)
            command = None if name is None else known[name]
            if isinstance(command, click.Group):
                continue
            params = [] if command is None else command.params
            options = {option for param in params for option in param.opts + param.secondary_opts}
            asked = set(re.findall(r"(?<=[ \[])--[\w-]+", span))
            if command is None or asked - options - {"--help"}:
                wrong.append(f"{page}: `{span}`")
            found += 1
    assert not wrong, "; ".join(wrong)
    assert found > 50


def test_the_examples_in_the_help_of_every_command_are_understood() -> None:
    found = 0
    for _, command in every_command(cli, click.Context(cli), "qworker "):
        shown = [
            line for line in (command.help or "").splitlines() if re.match(r" *(\w+=\S+ |[^:]*\| )?qworker ", line)
        ]
        for program, *arguments in commands("\n".join(re.sub(" {3,}.*", "", line.strip()) for line in shown)):
            if program == "qworker":
                parsed(arguments)
                found += 1
    assert found > 60


def test_the_page_of_the_command_line_says_what_the_help_of_every_command_says() -> None:
    assert cli_page.PAGE.read_text() == cli_page.written(), "write it again: .venv/bin/python -m tests.support.cli_page"


def headings(page: str, pattern: str) -> list[str]:
    return re.findall(rf"^### {pattern}$", (ROOT / page).read_text(), re.MULTILINE)


def test_the_page_of_errors_has_every_text_that_the_code_raises() -> None:
    assert errors_page.PAGE.read_text() == errors_page.written(), (
        "write it: .venv/bin/python -m tests.support.errors_page"
    )


def test_troubleshooting_has_an_anchor_for_every_code_and_every_class_of_errors() -> None:
    page = "docs/howto/troubleshooting.md"
    assert sorted(headings(page, r"`([a-z-]+)`")) == sorted(get_args(Code))
    assert sorted(headings(page, r"Code `(\w+)`")) == sorted(get_args(FailureCode))
    classes = [name for name, found in vars(errors).items() if isinstance(found, type) and issubclass(found, Exception)]
    assert sorted(headings(page, r"([A-Z]\w+)")) == sorted(classes)


def test_the_reference_of_the_api_has_every_public_name_with_an_example() -> None:
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "reference" / "api").glob("*.md")))
    with_example = re.findall(
        r"^## (\w+)\n\n```python\n[^`]*```\n\n::: qworker\.(?:worker\.|\w+\.)?\1$", text, re.MULTILINE
    )
    listed = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    assert "qworker.errors" in listed
    assert {*qworker.__all__} - {*with_example} == {*qworker.__all__} & {*vars(errors)}
    for module in (qworker.testing, qworker.worker):
        documented = {name.rpartition(".")[2] for name in listed if name.startswith(f"{module.__name__}.")}
        assert {*module.__all__} - documented == UNLISTED.get(module.__name__, set())


def test_every_file_of_this_repository_that_a_page_names_exists() -> None:
    named = r"`((?:tests|qworker|backends|examples|docs)/[\w/.-]+\.\w+)`"
    missing = [
        f"{page}: {name}"
        for page in pages()
        for name in re.findall(named, (ROOT / page).read_text())
        if not (ROOT / name).exists()
    ]
    assert not missing
