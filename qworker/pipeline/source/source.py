"""The data source `qworker` for Spark: `spark.read.format("qworker")`, `df.write`, `readStream` and `writeStream`.

Spark makes one `QworkerSource` for each query from its options. It pickles the source, its readers and its writers, and
sends them to the working processes. So they hold only plain values, and each process opens the store itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from qworker.pipeline.source.options import ReadOptions
from qworker.pipeline.source.sql_table import created_options, table_options, table_schema
from qworker.pipeline.spark.one_line import one_line_errors
from qworker.pipeline.spark.runtime import enable_filter_pushdown, parallelism
from qworker.pipeline.spark.structs import check_schema, struct

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from qworker.pipeline.source.call_encoder import CallMaker

__all__ = ["FORMAT", "QworkerSource", "loading_class", "source_class"]

FORMAT = "qworker"


@one_line_errors
class QworkerSource(DataSource):
    """The data source of one query."""

    # Set by `source_class`: the number of tasks that the session runs at the same time, and whether it pushes filters
    # down.
    parallelism = 2
    pushes_filters = False
    # Set by `loading_class`: makes the calls of the written rows.
    maker: CallMaker | None = None

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the columns of the table, or those of the option `columns`."""
        created = created_options(self.options)
        if created is not None:
            return table_schema(created, self.parallelism)
        return struct(ReadOptions.parse(self.options, self.parallelism).schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Make the reader of a batch."""
        from qworker.pipeline.source.reader import EventsReader, FilteredMessagesReader, MessagesReader

        options = self._read_options(schema)
        if options.table == "events":
            return EventsReader(options, schema.names)
        return (FilteredMessagesReader if self.pushes_filters else MessagesReader)(options, schema.names)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Make the reader of a stream, which follows a log and leases from other stores."""
        from qworker.pipeline.source.stream import stream_reader

        return stream_reader(self._read_options(schema), schema.names)

    def _read_options(self, schema: StructType) -> ReadOptions:
        given, _ = table_options(self.options, schema)
        options = ReadOptions.parse(given, self.parallelism)
        check_schema(options.table, schema)
        return options

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make the writer of a batch."""
        from qworker.pipeline.source.writer import batch_writer

        given, is_table = table_options(self.options, schema, write=True)
        return batch_writer(given, schema, overwrite, self.maker, is_table=is_table)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """Make the writer of a stream."""
        from qworker.pipeline.source.writer import stream_writer

        return stream_writer(dict(self.options), schema, overwrite)


def source_class(spark: SparkSession) -> type[QworkerSource]:
    """Return the class to register in a session."""
    values = {"parallelism": parallelism(spark), "pushes_filters": enable_filter_pushdown(spark)}
    # Made here, so that it is pickled as a whole, with these values: workers share nothing else with the session.
    return type(QworkerSource.__name__, (QworkerSource,), values)


def loading_class(name: str, maker: CallMaker) -> type[QworkerSource]:
    """Make a data source with another name, for batch writes of rows of which `maker` makes calls."""
    return type(QworkerSource.__name__, (QworkerSource,), {"name": classmethod(lambda _: name), "maker": maker})
