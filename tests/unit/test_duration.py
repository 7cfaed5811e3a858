from __future__ import annotations

import time
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.backend.registry import open_backend
from qworker.cli.configured import walk
from qworker.cli.main import cli
from qworker.cli.run import command as run_command
from qworker.duration import LONGEST, format_duration, parse_duration, parse_moment
from qworker.errors import InvalidURL, UsageError
from qworker.pipeline.source.options import ReadOptions
from qworker_fsq.environment import Constants


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("90", 90.0),
        ("90s", 90.0),
        ("0.25", 0.25),
        ("500ms", 0.5),
        ("15m", 900.0),
        ("2h", 7200.0),
        ("1.5h", 5400.0),
        ("7d", 604_800.0),
        ("36500d", LONGEST),
    ],
)
def test_a_duration_is_a_number_and_a_unit_and_seconds_without_one(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "soon", "-1", "+1", "1e3", "nan", "inf", "7D", "7 d", "1w", "1h30m", ".5", "1.", "٣", "d", "1_0", "9" * 400],
)
def test_what_is_not_a_duration_is_refused_with_one_text(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_duration(text)
    assert str(caught.value) == f"{text!r} is not a valid duration: use seconds (90) or 15m, 2h, 7d"


def test_a_duration_out_of_range_is_refused_with_the_limit() -> None:
    with pytest.raises(UsageError, match=r"'10ms' is too short: use at least 0\.5s"):
        parse_duration("10ms", least=0.5)
    with pytest.raises(UsageError, match="'2h' is too long: use at most 1h"):
        parse_duration("2h", most=3600.0)
    with pytest.raises(UsageError, match="'36501d' is too long: use at most 36500d"):
        parse_duration("36501d")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (90.0, "90s"),
        (0.05, "0.05s"),
        (3600.0, "1h"),
        (36 * 3600.0, "36h"),
        (604_800.0, "7d"),
        (90.5, "90.5s"),
    ],
)
def test_a_duration_is_written_in_the_largest_unit_without_a_fraction(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(
    st.decimals(0, LONGEST / 86_400, places=9).map(lambda number: f"{number:f}") | st.integers(0, 36_500).map(str),
    st.sampled_from(["", "ms", "s", "m", "h", "d"]),
)
def test_what_is_written_reads_as_the_same_duration(number: str, unit: str) -> None:
    seconds = parse_duration(number + unit)
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    "url",
    [
        "file:///x?poll_interval=",
        "fsq:///x?ttl=",
        "mq:///x?delay=",
        "vsqs:///x?publish_timeout=",
        "redis://x?timeout=",
        "redis://x?retry_timeout=",
        "rfq://x?timeout=",
        "rfq://x?retry_timeout=",
    ],
)
def test_every_url_option_that_is_a_duration_reads_the_same(url: str) -> None:
    for text in ("90", "90s", "15m", "0.5h", "5000ms"):
        open_backend(url + text)
    with pytest.raises(InvalidURL) as caught:
        open_backend(url + "soon")
    name = url.partition("?")[2].rstrip("=")
    assert str(caught.value).endswith(f": {name}: 'soon' is not a valid duration: use seconds (90) or 15m, 2h, 7d")


def options() -> list[tuple[click.Command, click.Option]]:
    return [
        (command, param)
        for _, command in walk(cli)
        for param in command.params
        if isinstance(param, click.Option) and param.type.name == "duration"
    ]


@pytest.mark.parametrize(
    ("command", "option"), [pytest.param(*one, id=f"{one[0].name}-{one[1].name}") for one in options()]
)
def test_every_option_that_is_a_duration_reads_the_same(command: click.Command, option: click.Option) -> None:
    context = click.Context(command)
    assert option.type_cast_value(context, "15m") == option.type_cast_value(context, "900") == 900.0
    with pytest.raises(click.BadParameter, match="'soon' is not a valid duration: use seconds"):
        option.type_cast_value(context, "soon")


def test_no_option_has_a_parser_of_its_own_for_seconds() -> None:
    params = [(command.name, param) for _, command in walk(cli) for param in command.params]
    assert params
    assert [(command, param.name) for command, param in params if param.metavar == "SECONDS"] == []


def test_variables_and_settings_read_durations_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.qworker.run]\nshutdown-timeout = "2m"\nstall-timeout = 45\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QWORKER_VISIBILITY_TIMEOUT", "1.5m")
    context = run_command.make_context("run", ["app:tasks"])
    given = [context.params[name] for name in ("shutdown_timeout", "stall_timeout", "visibility_timeout")]
    assert given == [120.0, 45.0, 90.0]
    assert Constants.from_environment({"FSQ_TTL": "90"}).ttl == Constants.from_environment({"FSQ_TTL": "1.5m"}).ttl
    with pytest.raises(UsageError, match="FSQ_TTL: 'soon' is not a valid duration"):
        Constants.from_environment({"FSQ_TTL": "soon"})


def test_a_stream_of_spark_reads_durations_too() -> None:
    given = {"url": "file:///x", "queue": "q", "visibility": "2m"}
    assert ReadOptions.parse(given, 1).visibility == 120.0
    with pytest.raises(UsageError, match="'visibility': 'soon' is not a valid duration"):
        ReadOptions.parse({**given, "visibility": "soon"}, 1)


def test_a_report_begins_at_an_age_or_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_000_000_000.0)
    assert parse_moment("90") == parse_moment("1.5m") == 1_000_000_000.0 - 90
    assert parse_moment("20260101") == parse_moment("2026-01-01T00:00") == 1_767_225_600.0
    with pytest.raises(UsageError, match=r"'soon' is not a valid duration: .* or a time such as 2026-11-23T08:00"):
        parse_moment("soon")
