"""Convert columns in Spark's notation to Spark's types."""

from __future__ import annotations

from pyspark.sql import types
from pyspark.sql.types import DataType, StructField, StructType

from qworker.errors import UsageError
from qworker.pipeline.spark.schema import columns, selected

__all__ = ["check_schema", "struct"]

_TEXT = types.StringType()
_TYPES: dict[str, DataType] = {
    "string": _TEXT,
    "binary": types.BinaryType(),
    "int": types.IntegerType(),
    "bigint": types.LongType(),
    "double": types.DoubleType(),
    "timestamp": types.TimestampType(),
    "date": types.DateType(),
    "array<string>": types.ArrayType(_TEXT),
    "map<string,string>": types.MapType(_TEXT, _TEXT),
}


def struct(text: str) -> StructType:
    """Convert the columns of `schema.py`. Spark's own parser needs a second for the first text of a session."""
    fields = (column.split(" ", 1) for column in text.split(", "))
    return StructType([StructField(name, _TYPES[kind]) for name, kind in fields])


def check_schema(table: str, schema: StructType) -> None:
    """Check the columns that a caller named with `.schema(...)`.

    Raises:
        UsageError: A column does not exist, or has another type.
    """
    known = columns(table)
    # It refuses unknown names.
    selected(table, schema.names)
    for field in schema.fields:
        found = field.dataType.simpleString()
        if found != known[field.name]:
            raise UsageError(
                f"the column {field.name!r} has the type {known[field.name]}: correct the schema (got {found})"
            )
