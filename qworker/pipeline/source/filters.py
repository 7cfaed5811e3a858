"""Filters that Spark pushes down to a read. Those on `state` and `queue` limit what is read, and others drop rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

# The stubs of pyarrow leave the types of elements open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

__all__ = ["Condition", "condition", "filter_rows", "selected_values"]

# Spark's classes by name: its first releases do not have them.
_HOW = {
    "EqualTo": "=",
    "In": "in",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "IsNull": "null",
    "IsNotNull": "not null",
    "StringStartsWith": "starts",
}
_COMPARISONS = {
    "=": pc.equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "<": pc.less,
    "<=": pc.less_equal,
}
# Columns of plain texts and numbers. Times are left to Spark, which knows its time zone.
_COLUMNS = frozenset({"id", "queue", "state", "task", "args", "kwargs", "tries", "priority", "key", "holder", "error"})


class Condition(msgspec.Struct, frozen=True):
    """One filter. A row for which it is null is dropped, as in SQL."""

    column: str
    how: str
    values: tuple[Any, ...] = ()


def condition(given: object) -> Condition | None:
    """Convert a filter of Spark. Return None if Spark must apply it itself."""
    how = _HOW.get(type(given).__name__)
    path: Sequence[str] = getattr(given, "attribute", ())
    if how is None or len(path) != 1 or path[0] not in _COLUMNS:
        return None
    value: Any = getattr(given, "value", None)
    values = tuple(value) if how == "in" else (value,)
    if how not in {"null", "not null"} and not all(isinstance(one, str | int) for one in values):
        return None
    return Condition(path[0], how, values)


def selected_values(conditions: Iterable[Condition], column: str, names: Iterable[str]) -> list[str]:
    """Return the values of `state` or `queue` that pass the conditions."""
    left = list(names)
    for one in conditions:
        if one.column == column and one.how in {"=", "in"}:
            left = [name for name in left if name in one.values]
    return left


def filter_rows(batch: pa.RecordBatch, conditions: Iterable[Condition]) -> pa.RecordBatch:
    """Return the rows that pass the conditions."""
    for one in conditions:
        batch = batch.filter(_mask(batch.column(one.column), one))
    return batch


def _mask(column: pa.Array[Any], one: Condition) -> Any:
    if one.how == "null":
        return pc.is_null(column)
    if one.how == "not null":
        return pc.is_valid(column)
    if one.how == "in":
        return pc.is_in(column, value_set=pa.array(one.values, column.type))
    if one.how == "starts":
        return pc.starts_with(column, pattern=one.values[0])
    return _COMPARISONS[one.how](column, pa.scalar(one.values[0], column.type))
