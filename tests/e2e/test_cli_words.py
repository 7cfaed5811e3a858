"""Names that the command line does not know: one line with the name that may have been meant."""

from __future__ import annotations

import importlib
import json
import os
import re
from importlib.metadata import entry_points
from pathlib import Path

import click
import pytest

import qworker
from qworker.backend.registry import GROUP
from qworker.cli.configured import _INTERNAL, OPTIONS, PREFIX, VARIABLES, all_options, options_of, walk
from qworker.cli.main import COMMANDS, cli, main
from qworker.settings import backend_url
from qworker.url import BackendURL


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said of a mistake: one line."""
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("qworker: ")
    return err


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("worker", "run"),
        ("start", "run"),
        ("list", "ls"),
        ("status", "stats"),
        ("inspect", "browse"),
        ("flush", "purge"),
        ("clear", "purge"),
        ("delete", "purge"),
        ("retry", "requeue"),
        ("beat", "every worker enqueues their calls"),
        ("scheduler", "schedules"),
        ("enqeue", "enqueue"),
        ("sttas", "stats"),
        # What commands were called once, and what is in a group now.
        ("down", "did you mean pause?"),
        ("up", "did you mean resume?"),
        ("install", "did you mean create?"),
        ("mover", "did you mean mq mover?"),
        ("reaper", "did you mean mq reaper?"),
        ("add-host", "did you mean fsq add-host?"),
        ("jsonrpcd", "did you mean fsq jsonrpcd?"),
        ("archive", "did you mean pipeline archive?"),
    ],
)
def test_a_command_that_is_not_there_names_the_one_that_was_meant(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = said(capsys, word)
    assert f"unknown command qworker {word}: " in line
    assert meant in line


def test_a_command_like_no_other_leads_to_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "xyzzy") == "qworker: unknown command qworker xyzzy: see qworker --help\n"
    assert "did you mean report?" in said(capsys, "pipeline", "raport")
    assert "did you mean publish?" in said(capsys, "rfq", "publsh")


def test_no_word_of_other_programs_hides_a_command() -> None:
    assert not type(cli).synonyms.keys() & COMMANDS.keys()


def test_the_list_of_commands_has_six_groups_in_the_order_of_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    found = re.findall(r"^([A-Z][\w ]+):\n((?:  .+\n)+)", capsys.readouterr().out, re.MULTILINE)
    groups = {title: re.findall(r"^  (\S+)", lines, re.MULTILINE) for title, lines in found if title != "Options"}
    assert list(groups) == ["Run and enqueue", "Look", "Change", "Bulk and Spark", "Servers", "Protocols"]
    assert [name for names in groups.values() for name in names] == cli.list_commands(click.Context(cli))
    assert groups["Protocols"] == ["fsq", "mq", "rfq"]


# -- options, in the environment and in pyproject.toml -----------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("QWORKER_")]:
        monkeypatch.delenv(name)
    return tmp_path


def test_the_options_that_are_written_down_are_those_of_the_commands() -> None:
    assert all_options(cli) == OPTIONS


def test_every_variable_that_the_program_reads_is_known() -> None:
    root = Path(qworker.__file__).parent
    found: set[str] = set()
    for place in (root, *(Path(p).parent for p in backend_files())):
        for file in place.rglob("*.py"):
            found |= set(re.findall(r'"(QWORKER_[A-Z_]+)"', file.read_text()))
    # The name of the token in 0.1.0 is read only to be refused.
    known = VARIABLES | _INTERNAL | {PREFIX + option.upper() for option in OPTIONS} | {"QWORKER_TOKEN"}
    assert found
    assert found <= known


def backend_files() -> list[str]:
    modules = (importlib.import_module(point.module.partition(".")[0]) for point in entry_points(group=GROUP))
    return sorted({module.__file__ or "" for module in modules})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("QWORKER_CONCURENCY", "did you mean QWORKER_CONCURRENCY?"),
        ("QWORKER_LOGLEVEL", "did you mean QWORKER_LOG_LEVEL?"),
        ("QWORKER_REDIS_PASSWD", "did you mean QWORKER_REDIS_PASSWORD?"),
        # Of no qworker: what Kubernetes sets for a service of this name, and what an app calls its own.
        ("QWORKER_SERVICE_HOST", None),
        ("QWORKER_PORT_8080_TCP_ADDR", None),
        ("QWORKER_ADMIN_EMAIL", None),
        ("QWORKER_CONCURRENCY", None),
        ("QWORKER_URL", None),
    ],
)
def test_a_variable_that_is_like_an_option_is_warned_of(
    name: str, told: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "spool").mkdir()
    monkeypatch.setenv(name, "file://./spool" if name == "QWORKER_URL" else "5")
    assert main(["stats", "file://./spool"]) == 0
    err = capsys.readouterr().err
    assert err == ("" if told is None else f"qworker: {name} is not an option of any command: {told}\n")


def test_every_option_is_called_in_the_environment_as_on_the_command_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [(key, option) for _, command in walk(cli) for key, option in options_of(command).items()]
    assert options
    for key, option in options:
        assert option.envvar == PREFIX + key.upper() or not option.allow_from_autoenv
        assert f"--{key.replace('_', '-')}" in option.opts


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[tool.qworker]\nconcurency = 5", "[tool.qworker] has 'concurency': did you mean concurrency?"),
        ("[tool.qworker]\nxyzzy = 5", "[tool.qworker] has 'xyzzy': no command has such an option"),
        (
            "[tool.qworker.run]\nshutdown_timout = 5",
            "[tool.qworker.run] has 'shutdown_timout': did you mean shutdown-timeout?",
        ),
        ("[tool.qworker.run]\nxyzzy = 5", "[tool.qworker.run] has 'xyzzy': qworker run has no such option"),
        ("[tool.qworker.runn]\nlimit = 5", "[tool.qworker] has 'runn': did you mean run?"),
        ("[tool.qworker.fsq.pusch]\nlock = true", "[tool.qworker.fsq] has 'pusch': did you mean push?"),
        ("[tool.qworker.fsq]\nverbose = true", "[tool.qworker.fsq] has 'verbose': it has tables of commands only"),
        ("[tool.qworker]\nconcurrency = 'many'", "concurrency: 'many' is not a valid integer range."),
        ("[tool.qworker]\nconcurrency = true", "concurrency: 'True' is not a valid integer range."),
        ("[tool.qworker]\nconcurrency = [1, 2]", "concurrency must be one value (got [1, 2])"),
        ("[tool.qworker]\nconcurrency = 0", "concurrency: 0 is not in the range x>=1."),
        ("[tool.qworker]\nburst = 'maybe'", "burst: 'maybe' is not a valid boolean"),
        ("[tool.qworker.run]\nworkers = 'x'", "workers: --workers 'x': write 4, or 2:8"),
        ("[tool.qworker.run]\nlog-level = 3", "log-level: '3' is not one of 'debug'"),
        ("[tool.qworker.run]\nqueue = ['a/b']", "queue: 'a/b' is no"),
        ("[tool]\nqworker = 5", "'qworker' must be a table (got 5)"),
        ("[tool.qworker]\nurl = 5", "url must be text (got 5)"),
        ("[tool.qworker", " is not valid TOML: "),
    ],
)
def test_a_setting_that_is_wrong_is_one_line_with_the_file(
    text: str, told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "pyproject.toml").write_text(text)
    line = said(capsys, "run", "app:tasks")
    assert line.startswith(f"qworker: {folder / 'pyproject.toml'}")
    assert told in line


def test_numbers_and_switches_of_the_file_are_those_of_the_command_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "pyproject.toml").write_text(
        '[tool.qworker]\nconcurrency = 3\nkeep = true\n[tool.qworker.run]\nworkers = 2\nqueue = ["a", "b"]\n'
        "burst = true\nshutdown-timeout = 1.5\n[tool.qworker.history]\nevent = 'acked failed'\nlimit = 4\n"
    )
    run = cli.get_command(click.Context(cli), "run")
    history = cli.get_command(click.Context(cli), "history")
    assert run is not None
    assert history is not None
    given = run.make_context("run", ["app:tasks"]).params
    queues = tuple(share.name for share in given["queue"])
    assert (given["concurrency"], given["workers"], queues, given["burst"], given["shutdown_timeout"]) == (
        3,
        (2, 2),
        ("a", "b"),
        True,
        1.5,
    )
    assert history.make_context("history", ["file:x"]).params["event"] == ("acked", "failed")
    monkeypatch.setenv("QWORKER_EVENT", "lost")
    assert history.make_context("history", ["file:x"]).params["event"] == ("lost",)


def test_a_command_of_a_group_has_a_table_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = folder / "pyproject.toml"
    settings.write_text("[tool.qworker.publish]\npriority = 3\n[tool.qworker.fsq.add-host]\nforce = true\n")
    assert main(["doctor", "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["settings"]["health"] == "ok"
    settings.write_text("[tool.qworker.fsq.add-host]\nforse = true\n")
    assert main(["fsq", "add-host", f"fsq://{folder}", "web1", "thumbs"]) == 100
    assert "[tool.qworker.fsq.add-host] has 'forse': did you mean force?" in capsys.readouterr().err


def test_a_bad_value_in_the_environment_is_one_line_with_the_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QWORKER_CONCURRENCY", "many")
    assert said(capsys, "run", "app:tasks") == ("qworker: QWORKER_CONCURRENCY: 'many' is not a valid integer range.\n")


def test_scan_keeps_its_own_status_for_a_wrong_setting(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pyproject.toml").write_text("[tool.qworker]\nconcurency = 5\n")
    assert main(["scan", "file://./spool", "inbox", "true"]) == 100
    assert "did you mean concurrency?" in capsys.readouterr().err


def test_a_misspelt_option_of_scan_names_the_one_that_was_meant(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scan", "--max-trys", "3", "file://./spool", "inbox", "true"]) == 100
    assert "did you mean max-tries?" in capsys.readouterr().err


def test_a_misspelt_option_of_enqueue_is_not_taken_for_an_argument(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = said(capsys, "enqueue", "qworker.cli.demo_app:tasks", "short", "--url", "file://./spool", "--dealy", "5")
    assert "unknown option --dealy: did you mean --delay?" in line


def test_a_relative_url_in_the_file_is_relative_to_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    below = folder / "a b" / "c"
    below.mkdir(parents=True)
    for url, where in (
        ("file://./spool", folder / "spool"),
        ("file:spool?sync=off", folder / "spool"),
        ("file://../up", folder / ".." / "up"),
        (f"file://{folder}/whole", folder / "whole"),
    ):
        (folder / "pyproject.toml").write_text(f'[tool.qworker]\nurl = "{url}"\n')
        for place in (folder, below):
            monkeypatch.chdir(place)
            assert BackendURL.parse(backend_url(None)).directory == where
    (folder / "a b" / "pyproject.toml").write_text('[tool.qworker]\nurl = "file://./x%20y"\n')
    assert BackendURL.parse(backend_url(None)).directory == folder / "a b" / "x y"
    for url in ("redis://localhost/0", "memory:", "unix:///run/redis.sock"):
        (folder / "a b" / "pyproject.toml").write_text(f'[tool.qworker]\nurl = "{url}"\n')
        assert backend_url(None) == url
    monkeypatch.setenv("QWORKER_URL", "file://./here")
    assert BackendURL.parse(backend_url(None)).directory == below / "here"
