"""The tables, in Spark's notation: what the data source gives, and what the archive keeps. docs/pipeline/data-source.md explains them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qworker.errors import UsageError

__all__ = ["EVENTS", "MESSAGES", "PLACE", "TABLES", "column_names", "columns", "selected"]

MESSAGES = (
    "id string, queue string, state string, task string, args string, kwargs string, body binary, tries int, priority int, "
    "key string, enqueued_at timestamp, due_at timestamp, expires_at timestamp, finished_at timestamp, holder string, "
    "error string, arguments array<string>, fields map<string,string>"
)
EVENTS = (
    "event string, at timestamp, queue string, id string, task string, tries int, worker string, token bigint, "
    "duration_s double, enqueued_at timestamp, error string"
)
# What the archive asks for beside the table, and does not keep.
PLACE = "place"
_HIDDEN = {"messages": f"{PLACE} string", "events": "part string, position string"}
TABLES = {"messages": MESSAGES, "events": EVENTS}


def columns(table: str) -> dict[str, str]:
    """The columns of a table by name, with their Spark types; also the ones that only the archive asks for."""
    text = f"{TABLES[table]}, {_HIDDEN[table]}"
    return dict(column.split(" ", 1) for column in text.split(", "))


def column_names(table: str) -> list[str]:
    """The names of a table's columns, in order."""
    return [column.split(" ", 1)[0] for column in TABLES[table].split(", ")]


def selected(table: str, names: Iterable[str]) -> str:
    """Some columns of a table, in Spark's notation.

    Raises:
        UsageError: there is no such column.
    """
    known = columns(table)
    chosen = [name.strip() for name in names]
    _check(table, chosen)
    return ", ".join(f"{name} {known[name]}" for name in chosen)


def _check(table: str, names: Sequence[str]) -> None:
    for name in names:
        if name not in columns(table):
            raise UsageError(f"unknown column {name!r} in {table}. Columns: {', '.join(column_names(table))}")
