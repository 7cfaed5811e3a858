"""Log lines: one per event, and nothing in them draws on a terminal."""

import json

import pytest
import structlog

from qworker import logs
from qworker.errors import UsageError


@pytest.fixture(autouse=True)
def unconfigured():
    yield
    structlog.reset_defaults()


def test_json_lines_on_stderr_with_controls_stripped(capsys):
    logs.configure(json=True, level="info")
    structlog.get_logger().info("an_event", error="\x1b[31mred\nnew line", number=1)
    structlog.get_logger().debug("not_shown")
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    told = json.loads(line)
    assert (told["event"], told["level"], told["error"], told["number"]) == ("an_event", "info", "?[31mred?new line", 1)
    assert out == ""


def test_lines_for_people(capsys):
    logs.configure(json=False, level="debug")
    assert logs.debug_enabled()
    structlog.get_logger().debug("an_event", error="\x1b[31mred\nnew line")
    err = capsys.readouterr().err
    assert "an_event" in err
    assert "\x1b" not in err
    assert err.count("\n") == 1


def test_debug_is_off_until_asked_for():
    assert not logs.debug_enabled()
    logs.configure(level="info")
    assert not logs.debug_enabled()
    with pytest.raises(UsageError, match="debug, info"):
        logs.configure(level="loud")


def test_one_line_says_what_went_wrong():
    text = "Traceback (most recent call last):\n  File\nValueError: x\x07\nsee https://example.org\n\n"
    assert logs.one_line(text) == "ValueError: x?"
    assert logs.one_line("told to slow down\n\n" + text) == "told to slow down"
    assert logs.one_line("") == ""
