"""Log lines: one per event, and nothing in them draws on a terminal."""

import asyncio
import io
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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


@pytest.mark.parametrize(
    ("environment", "colored"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False)],
)
def test_colors_are_as_the_environment_says(capsys, monkeypatch, environment, colored):
    set_environment(monkeypatch, environment)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert in_colors(capsys) == colored


def test_colors_can_be_forced_where_there_is_no_terminal(capsys, monkeypatch):
    set_environment(monkeypatch, {})
    assert not in_colors(capsys)
    set_environment(monkeypatch, {"FORCE_COLOR": "1", "TERM": "dumb"})
    assert in_colors(capsys)


def set_environment(monkeypatch, environment):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def in_colors(capsys) -> bool:
    logs.configure(json=False)
    structlog.get_logger().info("an_event")
    return "\x1b[" in capsys.readouterr().err


def test_logging_survives_a_stderr_that_is_closed_or_is_none(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        logs.configure()
        assert structlog.get_logger().warning("an_event") is None


def test_a_workers_line_that_the_apps_own_logging_breaks_on_ends_nobody(capsys):
    def breaking(_logger, _method, _event):
        raise RuntimeError("broken processor")

    structlog.configure(processors=[breaking])
    log = logs.WorkerLog(structlog.get_logger()).bind(worker="w")
    for say in (log.debug, log.info, log.warning, log.error):
        say("an_event", number=1)
    assert (
        capsys.readouterr().err.splitlines()
        == ["qworker: a log line is lost (an_event): RuntimeError: broken processor"] * 4
    )


# -- the standard library's ------------------------------------------------------------------------------------------


@contextmanager
def fresh_root() -> Iterator[logging.Logger]:
    """The root logger as in a fresh process: pytest gives it handlers."""
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, ("asyncio", "watchfiles"))]
    before, handlers = [logger.level for logger in loggers], root.handlers
    root.handlers = []
    root.setLevel(logging.WARNING)
    for logger in loggers[1:]:
        logger.setLevel(logging.NOTSET)
    try:
        yield root
    finally:
        root.handlers = handlers
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def test_what_the_app_logs_with_the_standard_library_is_shown_at_the_chosen_level(capsys):
    with fresh_root():
        logs.show_standard_logging(json=True, level="info")
        shop = logging.getLogger("shop")
        shop.info("sold %s\x1b", "shoes", extra={"price": 3})
        shop.debug("not shown")
        logging.getLogger("asyncio").info("not shown either")
        try:
            int("no number")
        except ValueError:
            shop.exception("failed")
        logs.show_standard_logging(json=True, level="info")
        shop.info("once")
    sold, failed, once = map(json.loads, capsys.readouterr().err.splitlines())
    del sold["timestamp"]
    assert sold == {"event": "sold shoes?", "level": "info", "logger": "shop", "price": 3}
    assert (failed["event"], failed["level"], once["event"]) == ("failed", "error", "once")
    assert failed["exception"].endswith("ValueError: invalid literal for int() with base 10: 'no number'")


def test_an_app_that_has_set_up_logging_keeps_what_it_has(capsys):
    with fresh_root() as root:
        own = logging.StreamHandler(io.StringIO())
        root.addHandler(own)
        logs.show_standard_logging(json=True, level="debug")
        logging.getLogger("shop").warning("sold")
        assert (root.handlers, root.level) == ([own], logging.WARNING)
    assert own.stream.getvalue() == "sold\n"
    assert capsys.readouterr().err == ""


async def test_what_a_handler_logs_says_of_which_message_it_is(app, capsys):
    structlog_log, standard_log = structlog.get_logger(), logging.getLogger("shop")

    def both(where):
        structlog_log.info(where)
        standard_log.info(where)

    async def later():
        await over.wait()
        both("over")

    @app.task
    async def on_the_loop() -> None:
        both("async")
        await asyncio.create_task(asyncio.to_thread(both, "in a thread of its own"))
        background.append(asyncio.create_task(later()))

    @app.task
    def in_a_thread() -> None:
        both("thread")

    background, over = [], asyncio.Event()
    with fresh_root():
        logs.configure(json=True)
        logs.show_standard_logging(json=True)
        ids = {"async": (await on_the_loop.enqueue()).id, "thread": (await in_a_thread.enqueue()).id}
        ids["in a thread of its own"] = ids["async"]
        await app.burst()
        # A task that outlives its handler is of no message any more.
        over.set()
        await background[0]
        both("outside")
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    for where, message_id in ids.items():
        lines = [line for line in told if line["event"] == where]
        assert [line["message_id"] for line in lines] == [message_id] * 2
        assert {(line["queue"], line["tries"], line["token"]) for line in lines} == {("default", 0, 1)}
        assert {line["task"] for line in lines} == {"in_a_thread" if where == "thread" else "on_the_loop"}
    assert [line.get("message_id") for line in told if line["event"] in {"over", "outside", "worker_stopped"}] == [
        None
    ] * 5
