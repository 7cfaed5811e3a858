"""Each kind of public name has one table on one page that lists every such name, and no other."""

from __future__ import annotations

import re

from qworker import log_events as events
from qworker.cli.configured import OPTIONS
from qworker.history.event import KINDS, Event
from tests.support.reference import (
    ROOT,
    bound_fields,
    command_names,
    instruments,
    log_events,
    message_fields,
    metrics,
    settings,
    table,
    tables,
    url_options,
    variables,
    written_settings,
)

CONFIGURATION = "docs/reference/configuration.md"
EVENTS = "docs/reference/events.md"
# Schemes that the tables name by one of them.
FAMILIES = {
    "redis": {"redis", "rediss", "unix", "redis+sentinel", "redis+cluster"},
    "mq+http": {"mq+http", "mq+https"},
}


def name_of(cell: str) -> str:
    found = re.fullmatch(r"`([^`]+)`", cell)
    assert found is not None, f"{cell!r} is not a name"
    return found[1]


def test_the_table_of_url_options_has_every_option_of_every_scheme() -> None:
    listed: dict[str, set[str]] = {}
    for option, stores, default, meaning in table(CONFIGURATION, "URL options"):
        assert default, option
        assert meaning, option
        for store in stores.split(", "):
            scheme = name_of(store).removesuffix(":")
            for one in FAMILIES.get(scheme, {scheme}):
                listed.setdefault(one, set()).add(name_of(option))
    assert listed == url_options()


def test_the_tables_of_variables_have_every_variable() -> None:
    listed = [name_of(row[0]) for rows in tables(CONFIGURATION, "Environment variables") for row in rows]
    assert sorted(listed) == sorted(variables())


def test_the_table_of_settings_has_every_option_of_every_command() -> None:
    assert (ROOT / CONFIGURATION).read_text() == written_settings(), "write it again: python -m tests.support.reference"
    listed = {name_of(row[0]).replace("-", "_") for row in table(CONFIGURATION, "Settings in pyproject.toml")}
    assert listed == {*settings()} - {"url"}
    assert listed <= OPTIONS


def test_the_page_of_the_command_line_has_a_section_for_every_command() -> None:
    text = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert sorted(re.findall(r"^## `qworker ([^`]+)`$", text, re.MULTILINE)) == sorted(command_names())
    grouped = [
        name
        for row in tables("docs/reference/cli.md", "The command line")[-1]
        for name in re.findall(r"\[`(\S+)`\]", row[1])
    ]
    assert sorted(grouped) == sorted(name for name in command_names() if " " not in name)


def names_of(cell: str) -> list[str]:
    """The names in a list of names; no other words but those that stand for some."""
    return [name for one in cell.split(", ") for name in SEVERAL.get(one, [one.strip("`")])]


SEVERAL = {
    "message fields": sorted(message_fields()),
    "queue": ["messaging_system", "messaging_destination_name"],
    "task": ["messaging_operation_name", "qworker_task"],
    "none": [],
    "": [],
}


def test_the_table_of_history_events_has_every_event() -> None:
    assert {name_of(event) for event, _ in table(EVENTS, "History events")} == {*KINDS}


def test_the_table_of_the_fields_of_history_events_has_every_field() -> None:
    assert [name_of(field) for field, _ in table(EVENTS, "Fields of history events")] == [
        *Event.__struct_encode_fields__
    ]


def test_the_table_of_log_events_has_every_event_with_its_level_and_fields() -> None:
    logged = log_events()
    listed = {name_of(event): (level, fields) for event, level, fields, _ in table(EVENTS, "Log events")}
    assert sorted(listed) == sorted(logged)
    for event, (level, fields) in listed.items():
        assert set(names_of(fields)) == logged[event].fields, event
        levels = set(names_of(level))
        # One function logs some events, each at a level of its own.
        assert levels == logged[event].levels or (len(levels) == 1 and levels < logged[event].levels), event


def test_every_log_event_and_field_with_a_constant_is_logged() -> None:
    constants = {word for name, word in vars(events).items() if name.isupper()}
    fields = {field for event in log_events().values() for field in event.fields} | bound_fields()
    assert constants <= {*log_events()} | fields | {events.TRACE_ID, events.SPAN_ID}


def test_the_table_of_log_fields_has_every_field() -> None:
    fields = {field for event in log_events().values() for field in event.fields} | bound_fields()
    listed = {name_of(field) for field, _ in table(EVENTS, "Log fields")}
    assert listed == fields | {events.TRACE_ID, events.SPAN_ID}


def test_the_table_of_metrics_has_every_metric_with_its_labels() -> None:
    found = metrics()
    listed = {
        name_of(name): (name_of(kind), set(names_of(labels))) for name, kind, labels, _ in table(EVENTS, "Metrics")
    }
    assert listed == {name: (metric.type, metric.labels) for name, metric in found.items()}


def test_the_table_of_opentelemetry_metrics_has_every_instrument() -> None:
    listed = {name_of(name): name_of(kind) for name, kind, _, _ in table(EVENTS, "OpenTelemetry metrics")}
    assert listed == instruments()
