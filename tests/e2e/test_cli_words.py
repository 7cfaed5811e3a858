"""Names that the command line does not know: one line with the name that may have been meant."""

from __future__ import annotations

import pytest

from qworker.cli.main import COMMANDS, cli, main


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
        ("beat", "no scheduler"),
        ("scheduler", "no scheduler"),
        ("enqeue", "enqueue"),
        ("sttas", "stats"),
    ],
)
def test_a_command_that_is_not_there_names_the_one_that_was_meant(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = said(capsys, word)
    assert f"there is no command qworker {word}: " in line
    assert meant in line


def test_a_command_like_no_other_leads_to_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "xyzzy") == "qworker: there is no command qworker xyzzy: see qworker --help\n"
    assert "did you mean report?" in said(capsys, "pipeline", "raport")
    assert "did you mean publish?" in said(capsys, "rfq", "publsh")


def test_no_word_of_other_programs_hides_a_command() -> None:
    assert not type(cli).synonyms.keys() & COMMANDS.keys()
