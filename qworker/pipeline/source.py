"""The data source `qworker` for Spark:

`spark.read.format("qworker")`, `df.write`, `spark.readStream` and `df.writeStream`.

Spark makes one `QworkerSource` per query from its options, and pickles it, and the readers and writers that it gives,
to the processes that work: so they hold only plain values, and each of them opens the store for itself.
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

from qworker.pipeline.options import ReadOptions
from qworker.pipeline.session import hands_filters_down, parallelism
from qworker.pipeline.structs import struct

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from qworker.pipeline.calls import CallMaker

__all__ = ["FORMAT", "QworkerSource", "loading_class", "source_class"]

FORMAT = "qworker"


class QworkerSource(DataSource):
    """One query's use of a store; see the module."""

    # Set by `source_class`: how many tasks the session runs at once, and whether it hands filters down.
    parallelism = 2
    pushes_filters = False
    # Set by `loading_class`: makes the calls of what is written.
    maker: CallMaker | None = None

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return FORMAT

    def schema(self) -> StructType:
        """The table's columns, or those that the option `columns` names."""
        return struct(ReadOptions.parse(self.options, self.parallelism).schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read."""
        from qworker.pipeline.reading import EventsReader, FilteredMessagesReader, MessagesReader

        options = ReadOptions.parse(self.options, self.parallelism)
        if options.table == "events":
            return EventsReader(options, schema.names)
        return (FilteredMessagesReader if self.pushes_filters else MessagesReader)(options, schema.names)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """A stream of messages: followed where the store is a log, else leased."""
        from qworker.pipeline.streaming import stream_reader

        return stream_reader(ReadOptions.parse(self.options, self.parallelism), schema.names)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch write."""
        from qworker.pipeline.writing import batch_writer

        return batch_writer(dict(self.options), schema, overwrite, self.maker)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """A write per micro-batch."""
        from qworker.pipeline.writing import stream_writer

        return stream_writer(dict(self.options), schema, overwrite)


def source_class(spark: SparkSession) -> type[QworkerSource]:
    """The data source as a session should know it."""
    values = {"parallelism": parallelism(spark), "pushes_filters": hands_filters_down(spark)}
    # Made here, so that it is pickled as a whole, with these values: workers share nothing else with the session.
    return type(QworkerSource.__name__, (QworkerSource,), values)


def loading_class(name: str, maker: CallMaker) -> type[QworkerSource]:
    """A data source of another name, for batch writes of rows that `maker` makes calls of."""
    return type(QworkerSource.__name__, (QworkerSource,), {"name": classmethod(lambda _: name), "maker": maker})
