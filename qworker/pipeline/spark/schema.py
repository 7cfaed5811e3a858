"""The tables of the data source and of the archive, in Spark's notation (docs/pipeline/data-source.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qworker.errors import UsageError

__all__ = ["EVENTS", "MESSAGES", "PLACE", "TABLES", "column_names", "columns", "selected"]

MESSAGES = (
    "id string, queue string, state string, task string, args string, kwargs string, body binary, tries int, "
    "priority int, key string, enqueued_at timestamp, due_at timestamp, expires_at timestamp, "
    "finished_at timestamp, holder string, error string, arguments array<string>, fields map<string,string>"
)
EVENTS = (
    "event string, at timestamp, queue string, id string, task string, tries int, worker string, token bigint, "
    "duration_s double, enqueued_at timestamp, error string"
)
# Columns that only the archive reads, and does not keep.
PLACE = "place"
_HIDDEN = {"messages": f"{PLACE} string", "events": "part string, position string"}
TABLES = {"messages": MESSAGES, "events": EVENTS}


def columns(table: str) -> dict[str, str]:
    """Return the Spark types of a table's columns, also of those that only the archive reads."""
    text = f"{TABLES[table]}, {_HIDDEN[table]}"
    return dict(column.split(" ", 1) for column in text.split(", "))


def column_names(table: str) -> list[str]:
    """Return the names of a table's columns, in order."""
    return [column.split(" ", 1)[0] for column in TABLES[table].split(", ")]


def selected(table: str, names: Iterable[str]) -> str:
    """Return some columns of a table, in Spark's notation.

    Raises:
        UsageError: A column does not exist.
    """
    known = columns(table)
    chosen = [name.strip() for name in names]
    _check(table, chosen)
    return ", ".join(f"{name} {known[name]}" for name in chosen)


def _check(table: str, names: Sequence[str]) -> None:
    for name in names:
        if name not in columns(table):
            raise UsageError(f"unknown column {name!r} in {table}. Columns: {', '.join(column_names(table))}")
