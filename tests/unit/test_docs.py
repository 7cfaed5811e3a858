"""Every block of every page is proved, outside of the checkout; and links lead somewhere.

What proves a block depends on its language (see tests/support/pages.py). A block that nothing here understands fails
its page's test.
"""

from __future__ import annotations

import asyncio
import configparser
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import click
import pytest
import yaml

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
from tests.support.pages import ROOT, Block, blocks, commands, environment, pages, parsed, sessions, shown
from tests.support.servers import RedisServer
from tests.support.waiting import wait_for

PATIENCE = 120.0
# What a page's files lie beside.
BESIDE = dict.fromkeys(["docs/howto/services.md", "docs/howto/after-commit.md"], "examples/django_service") | {
    page: str(Path(page).parent) for page in pages() if page.startswith("examples/")
}
# Public names that only annotations of other names show.
UNLISTED = {"qworker.worker": {"QueueShare", "RunningMessage", "WorkerCounts"}}
# Pages that install a package.
INSTALL = {"docs/howto/backend.md"}
# Pages whose Python needs Spark: tests/spark runs it.
SPARK = "docs/pipeline/"
# Pages whose Python needs other task queues: tests/e2e/test_coming_from.py runs it.
PEERS = "docs/coming-from/"
# Programs of others.
_PROGRAMS = """
. apt-get arq cat celery convert-to-thumbnail cp curl docker dramatiq echo find flask groupadd hostname huey_consumer
journalctl kubectl ls mv openssl pip pkill printf pytest redis-cli rfq rm rq sed seq sh spark-submit sudo systemctl
systemd-analyze useradd uvicorn
"""
PROGRAMS = set(_PROGRAMS.split())
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
# What a module of a Django site needs before it can be imported.
DJANGO = "import os, django; os.environ['DJANGO_SETTINGS_MODULE'] = 'shop.settings'; django.setup(); "
FAILED = "20261121071038_123456789_4242_host-7f3a9b21"

# A page starts a dozen interpreters, perhaps beside many others.
pytestmark = pytest.mark.timeout(900)


class Reader:
    """Somebody in an empty folder, who does what a page shows."""

    def __init__(self, page: str, folder: Path) -> None:
        self.page = page
        self.folder = folder
        self.environment = environment()
        # Python files that are written and not imported yet.
        self.unread: list[str] = []
        if page in INSTALL:
            self._install_elsewhere()
        if page in BESIDE:
            # What a developer's own runs have left there is not part of the example.
            made = shutil.ignore_patterns("__pycache__", "spool", "archive", "*.sqlite*")
            shutil.copytree(ROOT / BESIDE[page], folder, dirs_exist_ok=True, ignore=made)

    def _install_elsewhere(self) -> None:
        """Take an environment of its own, with what is installed in this one; packages are built from what is here."""
        own = self.folder.with_name(f"{self.folder.name}-environment")
        venv.create(own, with_pip=False)
        packages = own / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (packages / "this.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        for name in ("pip", "pytest", "qworker"):
            program = own / "bin" / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(str(own / "bin" / "python"))} -m {name} "$@"\n')
            program.chmod(0o755)
        path = f"{own / 'bin'}:{self.environment['PATH']}"
        self.environment |= {"PATH": path, "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}

    def do(self, block: Block) -> None:
        """Do what a block shows, and check what is to be seen."""
        do = getattr(self, f"_{block.language}", None)
        assert do is not None, f"{self.page}:{block.line}: nothing here proves a block of {block.language!r}"
        if block.language != "python" or block.file in self.unread:
            self.read()
        if block.file is not None:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a" if block.continues else "w") as file:
                file.write(block.text)
        try:
            do(block)
        except Exception as error:
            error.add_note(f"{self.page}:{block.line}")
            raise

    def _python(self, block: Block) -> None:
        assert block.file is not None, "a Python block begins with `# NAME.py`, because it is run as that file"
        compile((self.folder / block.file).read_text(), block.file, "exec", dont_inherit=True)
        if not self.page.startswith((SPARK, PEERS)):
            self.unread.append(block.file)

    def read(self) -> None:
        """Import the files since the last block that is no file, in one process: a reader has all of them by now."""
        if self.unread:
            modules = ", ".join(dict.fromkeys(file.removesuffix(".py").replace("/", ".") for file in self.unread))
            self.unread.clear()
            first = DJANGO if (self.folder / "manage.py").exists() else ""
            python = shutil.which("python", path=self.environment["PATH"])
            assert python is not None
            self._run([python, "-W", "error", "-c", f"{first}import {modules}"])

    def _console(self, block: Block) -> None:
        for command, expected in sessions(block.text):
            if command.startswith("qworker run") and "--burst" not in command:
                self._run_until_shown(command, expected)
            else:
                output = self._run(["bash", "-c", command])
                assert shown(expected, output), f"$ {command}\n{output}\nlacks {expected}"

    def _sh(self, block: Block) -> None:
        for command in commands(block.text):
            program, *arguments = command
            if program == "qworker":
                parsed(arguments)
            elif program == "make":
                assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
            elif program.startswith("python"):
                self._names_a_program(arguments)
            elif "/" in program:
                assert (self.folder / program).exists() or (ROOT / program).exists() or ".venv" in program, command
            else:
                assert program in PROGRAMS, f"is {command} right? tests/unit/test_docs.py does not know it"

    _bash = _sh

    def _names_a_program(self, arguments: list[str]) -> None:
        if arguments[0] == "-m":
            assert find_spec(arguments[1]) is not None, arguments
        else:
            assert (self.folder / arguments[0]).is_file(), arguments

    def _toml(self, block: Block) -> None:
        tomllib.loads(block.text)

    def _ini(self, block: Block) -> None:
        configparser.RawConfigParser(strict=False).read_string(block.text)

    def _yaml(self, block: Block) -> None:
        assert list(yaml.safe_load_all(block.text))

    def _json(self, block: Block) -> None:
        json.loads(block.text)

    def _text(self, block: Block) -> None:
        """Prose, in columns."""

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _run_until_shown(self, command: str, expected: list[str]) -> None:
        """Run a worker until its lines have appeared, and stop it as Ctrl-C would."""
        log = self.folder / "output.log"
        with log.open("w") as output:
            started = subprocess.Popen(
                command.split(),
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:

            def is_shown() -> bool:
                assert started.poll() is None, f"$ {command}\nended with {started.returncode}:\n{log.read_text()}"
                return shown(expected, log.read_text())

            wait_for(is_shown, f"$ {command}: shows {expected}", log.read_text, timeout=PATIENCE)
            started.send_signal(signal.SIGINT)
            assert started.wait(PATIENCE) == 0, f"$ {command}\n{log.read_text()}"
        finally:
            if started.poll() is None:
                started.kill()
                started.wait()


@pytest.mark.parametrize("page", pages())
def test_a_page_does_what_it_shows_in_an_empty_folder(page: str, tmp_path: Path) -> None:
    reader = Reader(page, tmp_path)
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
            Reader(str(page), tmp_path).do(block)

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
def _no_modules_of_the_page(tmp_path: Path) -> Iterator[None]:
    """Forget what a page's commands import: another page has another `app`."""
    path, before = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


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
