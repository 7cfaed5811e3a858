"""Tables are as wide as the terminal, and lose no name and no number to fit."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from qworker.cli.main import main
from qworker.cli.output import print_table
from tests.support.processes import environment

URL = "file://./spool"
BODY = "a body that is far longer than any terminal is wide " * 4


@pytest.fixture
def message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The id of the only message of `inbox`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    # The number of the process would make a new id shorter or longer.
    assert main(["publish", URL, "inbox", "--id", "20261121071038_123456789_4242_host-7f3a9b21", "--body", BODY]) == 0
    return capsys.readouterr().out.strip()


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    def call(columns: str, *arguments: str) -> list[str]:
        monkeypatch.setenv("COLUMNS", columns)
        assert main(list(arguments)) == 0
        return capsys.readouterr().out.splitlines()

    return call


@pytest.mark.parametrize("columns", [200, 140, 120, 116])
def test_texts_are_cut_where_the_terminal_is_narrow(
    columns: int, message: str, shown: Callable[..., list[str]]
) -> None:
    heading, row = shown(str(columns), "browse", URL, "inbox")
    assert heading.startswith("state  id ")
    assert message in row
    assert len(row) <= columns
    assert row.endswith("…")


@pytest.mark.parametrize("columns", [40, 20])
def test_a_row_becomes_lines_where_nothing_else_fits(
    columns: int, message: str, shown: Callable[..., list[str]]
) -> None:
    lines = shown(str(columns), "browse", URL, "inbox")
    assert all(len(line) <= columns + 2 for line in lines)
    assert lines[0].split() == ["state", "ready"]
    cells = "".join(line[10:] for line in lines)
    assert message in cells
    lines = shown(str(columns), "stats", URL)
    assert [line.split() for line in lines[:3]] == [["queue", "inbox"], ["ready", "1"], ["leased", "0"]]


def test_there_is_no_limit_where_no_terminal_is(message: str, shown: Callable[..., list[str]]) -> None:
    for columns in ("", "0", "many"):
        _, row = shown(columns, "browse", URL, "inbox")
        assert message in row
        assert len(row) > 140


def test_a_terminal_has_its_own_width(message: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        termios.tcsetwinsize(theirs, (24, 118))
        command = [sys.executable, "-m", "qworker", "browse", URL, "inbox"]
        subprocess.run(command, cwd=tmp_path, env=environment(), stdout=theirs, check=True)
        row = os.read(ours, 4096).decode().splitlines()[1]
    finally:
        os.close(ours)
        os.close(theirs)
    assert message in row
    assert 110 < len(row) <= 118


def test_wide_characters_take_two_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    print_table(("name", "text"), [("日本", "日本語" * 20), ("ab", "x")], texts=("text",))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "日本  " + "日本語" * 3 + "日本…"
    assert lines[2] == "ab    x"
    assert re.fullmatch("name  text", lines[0])
