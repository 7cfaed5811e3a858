"""Classes of PySpark that its older releases do not have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import datasource

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamWriterBase
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
    from pyspark.sql.types import StructType
else:
    # Spark 4.0 gives a writer of this class rows.
    StreamWriterBase = getattr(datasource, "DataSourceStreamArrowWriter", datasource.DataSourceStreamWriter)
    try:
        from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
    except ImportError:

        class SupportsTriggerAvailableNow:
            """A reader that Spark stops by itself: its first call for the newest offset is the last."""


__all__ = ["StreamWriterBase", "SupportsTriggerAvailableNow", "record_batches"]

# Rows in one record batch.
_ROWS = 10_000


def record_batches(given: Iterable[Any], schema: StructType) -> Iterator[pa.RecordBatch]:
    """Return the record batches that Spark gives a writer, or those of its rows."""
    if hasattr(datasource, "DataSourceStreamArrowWriter"):
        yield from given
        return
    from pyspark.sql.pandas.types import to_arrow_schema

    arrow = to_arrow_schema(schema)
    rows = iter(given)
    while some := [row.asDict(recursive=True) for row in islice(rows, _ROWS)]:
        yield pa.RecordBatch.from_pylist(some, arrow)
