"""Convert columns in Spark's notation to Spark's types."""

from __future__ import annotations

from pyspark.sql import types
from pyspark.sql.types import DataType, StructField, StructType

__all__ = ["struct"]

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
