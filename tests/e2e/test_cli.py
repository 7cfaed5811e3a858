"""The command line: its output, the sources of its options, and its errors. Most tests run it in this process."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from qworker import bulk
from qworker.backend.registry import open_backend
from qworker.cli.main import COMMANDS, cli, main
from qworker.cli.output import Progress
from qworker.message import Draft
from tests.support.processes import environment
from tests.support.waiting import PATIENCE

URL = "file://./spool"
DOCS = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"

_numbers = itertools.count()

APP = """
from qworker import Tasks
tasks = Tasks("file://./spool")

@tasks.task(queue="sums")
async def add(a: int, b: int = 0) -> int:
    return a + b
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # Restores sys.path, to which importing an app adds the working directory.
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in [n for n in os.environ if n.startswith("QWORKER_")]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def app(folder: Path) -> str:
    """An app's place; a module of its own in each test, since modules are imported once."""
    name = f"cli_app_{os.getpid()}_{next(_numbers)}"
    (folder / f"{name}.py").write_text(APP)
    return f"{name}:tasks"


@pytest.fixture
def qworker(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def ok(qworker: Any) -> Callable[..., str]:
    def call(*arguments: str) -> str:
        status, out, err = qworker(*arguments)
        assert status == 0, err
        return out

    return call


def test_a_message_goes_through_the_commands_of_an_operator(ok: Any, qworker: Any) -> None:
    ok("create", URL, "inbox", "other")
    assert ok("ls", URL).split() == ["inbox", "other"]
    message_id = ok("publish", URL, "inbox", "--body", "hello").strip()
    assert json.loads(ok("stats", URL, "inbox", "--json"))["ready"] == 1
    assert "hello" in ok("browse", URL, "inbox")
    assert "next to be leased" in ok("explain", URL, "inbox", message_id)
    ok("pause", URL, "inbox")
    assert "paused" in ok("stats", URL, "inbox")
    assert "is paused" in ok("explain", URL, "inbox", message_id)
    ok("resume", URL, "inbox")
    requeued = {"queue": "inbox", "requeued": 0, "left_out": {}, "dry_run": False}
    assert json.loads(ok("requeue", URL, "inbox", "--json")) == requeued
    status, _, err = qworker("explain", URL, "inbox", "no-such-id")
    assert status == 1
    assert err == ""
    assert json.loads(ok("purge", URL, "inbox", "--yes", "--json")) == {"queue": "inbox", "purged": 1}
    assert "no message with this id" in qworker("explain", URL, "inbox", message_id)[1]


def test_every_command_that_prints_data_prints_json(ok: Any, app: str) -> None:
    ids = json.loads(ok("publish", URL, "inbox", "--body", "x", "--json"))["ids"]
    assert json.loads(ok("enqueue", app, "add", "1", "--json"))["queue"] == "sums"
    for arguments in [
        ("ls", URL),
        ("stats", URL),
        ("stats", URL, "inbox"),
        ("browse", URL, "inbox"),
        ("browse", URL, "inbox", "--state", "ready"),
        ("explain", URL, "inbox", ids[0]),
        ("requeue", URL, "inbox"),
        ("purge", URL, "inbox", "--state", "failed", "--yes"),
        ("pause", URL, "inbox"),
        ("resume", URL, "inbox"),
        ("create", URL, "inbox"),
        ("move", URL, "file://./elsewhere", "inbox"),
        ("doctor", URL),
        ("bench", "memory:", "--messages", "10"),
    ]:
        assert json.loads(ok(*arguments, "--json")) is not None, arguments


def test_bodies_come_from_a_file_from_lines_and_from_the_command_line(ok: Any, folder: Path) -> None:
    (folder / "data").write_bytes(b"one\ntwo\r\n\xff\n")
    ok("publish", URL, "whole", "-f", "data")
    assert "3 messages" in ok("publish", URL, "lines", "--lines", "-f", "data")
    [whole] = json.loads(ok("browse", URL, "whole", "--json"))
    assert whole["body_base64"] == "b25lCnR3bw0K/wo="
    lines = json.loads(ok("browse", URL, "lines", "--json"))
    assert [line.get("body") for line in lines] == ["one", "two", None]
    assert lines[2]["body_base64"] == "/w=="


def test_browse_goes_on_after_a_position_and_shows_the_last_first(ok: Any, folder: Path) -> None:
    (folder / "data").write_bytes(b"one\ntwo\nthree\nfour\n")
    ok("publish", URL, "lines", "--lines", "-f", "data")

    def seen(*options: str) -> list[dict[str, Any]]:
        return json.loads(ok("browse", URL, "lines", "--state", "ready", "--json", *options))

    first = seen("-n", "2")
    assert [line["body"] for line in first] == ["one", "two"]
    assert [line["body"] for line in seen("--after", first[1]["position"])] == ["three", "four"]
    assert [line["body"] for line in seen("--newest", "--limit", "1")] == ["four"]


def test_many_calls_come_from_lines_and_a_bad_line_is_named(ok: Any, qworker: Any, app: str, folder: Path) -> None:
    (folder / "calls").write_text('[1, 2]\n\n{"a": 3}\n')
    assert "2 calls of add" in ok("enqueue", app, "add", "--from-file", "calls")
    bodies = [json.loads(m["body"]) for m in json.loads(ok("browse", URL, "sums", "--json"))]
    assert [(b["args"], b.get("kwargs")) for b in bodies] == [([1, 2], None), ([], {"a": 3})]
    (folder / "calls").write_text('[1, 2]\n["x"]\n')
    status, _, err = qworker("enqueue", app, "add", "--from-file", "calls")
    assert status == 2
    assert "line 2 of calls" in err


def test_arguments_are_checked_before_anything_is_stored(qworker: Any, app: str, folder: Path) -> None:
    for arguments, said in [
        (["add", "x"], "is not valid JSON"),
        (["add", '"x"'], "argument 1"),
        (["add"], "missing a required argument"),
        (["subtract", "1"], "unknown task 'subtract'"),
        (["add", "1", "--kwargs", "[1]"], "JSON object"),
        (["add", "1", "--dely", "3"], "unknown option --dely"),
        (["add", "1", "--id", ""], "an id must have at least 1 byte"),
    ]:
        status, out, err = qworker("enqueue", app, *arguments)
        assert (status, out) == (2, ""), arguments
        assert said in err
        assert err.startswith("qworker: ")
        assert len(err.splitlines()) == 1
    assert not (folder / "spool").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["stats"], "Missing argument 'URL'"),
        (["stats", "nonsense"], "is not a valid backend URL"),
        (["stats", "gopher://x"], "no backend is installed for 'gopher:'"),
        (["stats", URL, "../../etc"], "not a valid queue name"),
        (["stats", URL, "absent"], "queue 'absent' does not exist"),
        (["stats", "file://./spool?nope=1"], "unknown option 'nope'"),
        (["browse", URL, "q", "--state", "odd"], "is not one of"),
        (["browse", URL, "q", "--after", "1:x"], "--after needs --state"),
        (["purge", URL, "q"], "--yes"),
        (["move", URL, URL], "must be different"),
        (["ls", "memory:"], "exist only in the process"),
        (["publish", URL, "q", "--lines"], "--lines needs --file"),
        (["run", "app"], "MODULE:ATTRIBUTE"),
        (["run", "no_such_module_here:tasks"], "no module 'no_such_module_here'"),
        (["run", "json:tasks"], "has no 'tasks'"),
        (["run", "json:loads"], "not a qworker.Tasks"),
        (["run", "x:tasks", "-w", "3:2"], "between two and eight"),
        (["run", "x:tasks", "--burst", "--reload"], "--burst and --reload cannot be combined"),
        (["run", "x:tasks", "-c", "0"], "--concurrency"),
        (["frobnicate"], "unknown command qworker frobnicate"),
    ],
)
def test_a_users_mistake_is_told_without_a_traceback(
    qworker: Any, folder: Path, arguments: list[str], said: str
) -> None:
    (folder / "spool").mkdir()
    status, _, err = qworker(*arguments)
    assert status == 2
    assert said in err
    assert "Traceback" not in err


def test_a_position_that_no_browse_gave_is_a_users_mistake(qworker: Any, folder: Path) -> None:
    assert qworker("create", URL, "q")[0] == 0
    status, _, err = qworker("browse", URL, "q", "--state", "ready", "--after", "garbage")
    assert status == 2
    assert err.startswith("qworker: 'garbage' is not a valid position")
    assert err.count("\n") == 1


def test_an_unreachable_backend_has_an_exit_status_of_its_own(qworker: Any, folder: Path) -> None:
    status, _, err = qworker("stats", f"unix://{folder}/none.sock")
    assert status == 3, err
    assert len(err.splitlines()) == 1


def test_an_exception_inside_the_users_module_shows_where(qworker: Any, folder: Path) -> None:
    name = f"broken_{os.getpid()}_{next(_numbers)}"
    (folder / f"{name}.py").write_text("def dive():\n    return {}['pearl']\n\ndive()\n")
    status, _, err = qworker("run", f"{name}:tasks")
    assert status == 2
    assert "KeyError: 'pearl'" in err
    assert f'{name}.py", line 2, in dive' in err
    # Not one frame of ours: the stack begins in the user's file.
    assert "loader.py" not in err
    assert "importlib" not in err


def test_a_mistake_in_the_app_that_qworker_refuses_is_one_line_with_its_place(qworker: Any, folder: Path) -> None:
    name = f"twice_{os.getpid()}_{next(_numbers)}"
    (folder / f"{name}.py").write_text(
        "from qworker import Tasks\ntasks = Tasks('memory:')\n"
        "@tasks.task(name='a')\ndef one() -> None: ...\n@tasks.task(name='a')\ndef two() -> None: ...\n"
    )
    status, _, err = qworker("run", f"{name}:tasks")
    assert status == 2
    assert re.fullmatch(rf"qworker: .*{name}\.py:\d+: the task name 'a' is already used.*\n", err)


def test_the_command_line_beats_the_environment_which_beats_the_file(
    ok: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def messages(*arguments: str) -> int:
        return int(json.loads(ok("bench", "memory:", "--json", *arguments))["messages"])

    (folder / "pyproject.toml").write_text(
        "[tool.qworker]\nmessages = 5\nbatch = 2\n\n[tool.qworker.bench]\nsize = 3\n"
    )
    assert json.loads(ok("bench", "memory:", "--json")) | {"steps": 0, "durability": 0} == {
        "messages": 5,
        "batch": 2,
        "size": 3,
        "steps": 0,
        "durability": 0,
    }
    monkeypatch.setenv("QWORKER_MESSAGES", "7")
    assert messages() == 7
    assert messages("--messages", "9") == 9


def test_the_url_comes_from_the_settings_where_none_is_given(
    ok: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok("create", URL, "inbox")
    (folder / "pyproject.toml").write_text(f'[tool.qworker]\nurl = "{URL}"\n')
    assert json.loads(ok("stats", "inbox", "--json"))["queue"] == "inbox"
    (folder / "elsewhere").mkdir()
    monkeypatch.setenv("QWORKER_URL", "file://./elsewhere")
    assert ok("ls", "--json").strip() == "[]"
    assert ok("ls", URL).split() == ["inbox"]


def test_passwords_and_control_characters_do_not_reach_the_terminal(qworker: Any) -> None:
    _, _, err = qworker("stats", "gopher://user:hush@host/\x1b[31m")
    assert "hush" not in err
    assert "\x1b" not in err
    _, _, err = qworker("stats", "file://user:hush@host/x")
    assert "hush" not in err


def test_a_stored_message_cannot_draw_on_the_terminal(ok: Any) -> None:
    ok("publish", URL, "inbox", "--body", "\x1b[2Jgone\rover")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", ok("browse", URL, "inbox"))


def test_a_reader_that_goes_away_is_no_error(ok: Any, folder: Path) -> None:
    (folder / "many").write_text("x" * 40 + "\n" * 1 + ("y" * 40 + "\n") * 3000)
    ok("publish", URL, "inbox", "--lines", "-f", "many")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "qworker", "browse", URL, "inbox", "--limit", "3000"],
            cwd=folder,
            env=environment(),
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=PATIENCE,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_many_messages_show_progress_on_a_terminal_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shown in [(Terminal(), "published 2,000 ("), (io.StringIO(), "")]:
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress("published") as progress:
            progress.add(1500)
            progress.add(500)
        assert shown in stream.getvalue()
        assert bool(stream.getvalue()) == bool(shown)


def test_doctor_tries_the_directory_and_says_what_is_broken(qworker: Any, ok: Any, folder: Path) -> None:
    ok("create", URL, "inbox")
    checks = {check["name"]: check for check in json.loads(ok("doctor", URL, "--json"))}
    for name in (
        "versions",
        "backend file",
        "open files",
        "reachable",
        "durability",
        "rename",
        "link",
        "fsync",
        "flock",
    ):
        assert checks[name]["health"] in {"ok", "warn"}, checks[name]
    assert checks["rename"]["health"] == "ok"
    assert not list((folder / "spool").glob(".doctor*"))
    (folder / "spool").chmod(0o777)
    status, out, _ = qworker("doctor", URL)
    assert status == 1
    assert "BROKEN directory" in out
    assert "chmod o-rwx" in out


async def _sealed(url: str) -> None:
    """A bulk write that dies before its first message is published."""
    backend = open_backend(url)
    try:
        writer = bulk.open(backend, "thumbs", "orders-7")
        assert await writer.seal(0, [await writer.stage("run", 0, "only", [[Draft(body=b"a"), Draft(body=b"b")]])])
    finally:
        await backend.aclose()


@pytest.mark.parametrize("url", [URL, "vsqs://./spool"])
def test_doctor_names_bulk_writes_whose_rest_waits_for_another_run(ok: Any, url: str) -> None:
    asyncio.run(_sealed(url))
    checks = {check["name"]: check for check in json.loads(ok("doctor", url, "--json"))}
    assert checks["bulk write orders-7"]["health"] == "warn"
    assert "to thumbs: 2 messages" in checks["bulk write orders-7"]["detail"]
    assert "run it again to publish the rest" in ok("doctor", url)


def test_doctor_tells_a_damaged_bulk_write_from_a_store_that_cannot_be_reached(qworker: Any, folder: Path) -> None:
    asyncio.run(_sealed(URL))
    [seal] = (folder / "spool").glob("thumbs/tmp/staged/orders-7/seal-*")
    seal.write_bytes(b"{")
    status, out, _ = qworker("doctor", URL)
    assert status == 1
    assert "ok     reachable" in out
    assert "BROKEN bulk writes: the seal staged/orders-7/seal-0 is damaged" in out


def test_doctor_reads_the_settings_of_every_command(qworker: Any, folder: Path) -> None:
    def settings(text: str) -> dict[str, str]:
        (folder / "pyproject.toml").write_text(text)
        checks = json.loads(qworker("doctor", "--json")[1])
        return next(check for check in checks if check["name"] == "settings")

    assert settings("[tool.qworker]\nshutdown-timeout = 3\n[tool.qworker.run]\nworkers = 2\n")["health"] == "ok"
    found = settings("[tool.qworker.run]\nconcurency = 5\n")
    assert found["health"] == "broken"
    assert "[tool.qworker.run] has 'concurency': did you mean concurrency?" in found["detail"]


def commands() -> list[click.Command]:
    context = click.Context(cli)
    found = [cli.get_command(context, name) for name in COMMANDS]
    return [command for command in found if command is not None]


def test_every_command_explains_itself_with_an_example() -> None:
    assert len(commands()) == len(COMMANDS)
    for command in commands():
        assert command.help, command.name
        if command.name != "demo":
            assert "Example" in command.help, command.name
        for param in command.params:
            if isinstance(param, click.Option):
                assert param.help, f"{command.name} {param.name}"


def test_every_command_and_option_is_documented() -> None:
    text = DOCS.read_text()
    sections = {part.split("\n", 1)[0].strip(" `"): part for part in text.split("\n## ")[1:]}
    assert commands()
    for command in commands():
        section = sections.get(f"qworker {command.name}")
        assert section is not None, f"docs/reference/cli.md has no section `qworker {command.name}`"
        for param in command.params:
            if isinstance(param, click.Option):
                missing = [name for name in param.opts if f"`{name}" not in section and f", {name}" not in section]
                assert not missing, f"docs/reference/cli.md, {command.name}: {missing}"
