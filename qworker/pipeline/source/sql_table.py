"""Tables of Spark SQL: `CREATE TABLE t USING qworker OPTIONS (...)`.

Spark gives a data source in Python the OPTIONS only when it creates a table. For each query it gives only the columns
of the table. So the options are in the metadata of each column, which the catalog keeps with the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from qworker.errors import UsageError
from qworker.pipeline.source.options import ReadOptions
from qworker.pipeline.source.write_partition import WriteOptions
from qworker.pipeline.spark.structs import struct
from qworker.url import mask

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["created_options", "table_options", "table_schema"]

# The key in the metadata of a column.
_STORED = "qworker"
# The properties of a table that is created: its OPTIONS have this prefix, and it has a `provider`.
_OPTION = "option."
_WRITE_ONLY = frozenset({"staging_dir", "rejects"})


def created_options(given: Mapping[str, str]) -> dict[str, str] | None:
    """Return the OPTIONS of a table that is being created. None: the options are those of one query."""
    texts = {name.lower(): value for name, value in given.items()}
    if "provider" not in texts:
        return None
    return {name.removeprefix(_OPTION): value for name, value in texts.items() if name.startswith(_OPTION)}


def table_schema(options: Mapping[str, str], parallelism: int) -> StructType:
    """Return the columns of a new table, with its options.

    Raises:
        UsageError: An option is unknown, missing or not valid, or would store a password in the catalog.
    """
    if mask(url := options.get("url", "")) != url:
        raise UsageError(
            f"{mask(url)}: the catalog would keep the password: leave it out of OPTIONS, and set "
            "QWORKER_REDIS_PASSWORD (mq+http: QWORKER_HTTP_TOKEN) in the environment of the driver and the executors"
        )
    if "load" in options:
        raise UsageError("load names one write, and a table has many: leave it out of OPTIONS")
    columns = struct(ReadOptions.parse(_readable(options), parallelism).schema)
    stored = msgspec.json.encode(dict(options)).decode()
    for field in columns.fields:
        field.metadata = {_STORED: stored}
    return columns


def table_options(given: Mapping[str, str], schema: StructType, *, write: bool = False) -> tuple[dict[str, str], bool]:
    """Return the options of a query, and whether they are those of a table.

    Args:
        given: The options that the query has.
        schema: Its columns.
        write: Whether it writes.
    """
    texts = {name.lower(): str(value) for name, value in given.items()}
    stored = {field.metadata.get(_STORED) for field in schema.fields}
    (found,) = stored if len(stored) == 1 else (None,)
    # The rows of a table can also be written elsewhere, with options of their own.
    if found is None or "url" in texts:
        return texts, False
    options = msgspec.json.decode(found, type=dict[str, str])
    return (_writable if write else _readable)(options) | texts, True


def _readable(options: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in options.items() if name not in _WRITE_ONLY}


def _writable(options: Mapping[str, str]) -> dict[str, str]:
    if options.get("table", "messages") != "messages":
        raise UsageError("a table of events cannot be written: insert into a table of messages")
    return {name: text for name, text in options.items() if name in WriteOptions.__struct_fields__}
