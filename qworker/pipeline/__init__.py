"""Move and analyze messages in bulk with Spark: `local[*]` on one machine, or any cluster, with the same code.

It needs the extra `spark` and Java 17 or newer. Both are imported only when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qworker.pipeline.spark.schema import EVENTS, MESSAGES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["EVENTS", "MESSAGES", "register_data_source", "start_session"]


def register_data_source(spark: SparkSession) -> None:
    """Register the data source `qworker` in a session; see `qworker.pipeline.session.register_data_source`."""
    from qworker.pipeline.session import register_data_source as known

    known(spark)


def start_session(master: str | None = None, **options: str) -> SparkSession:
    """Start a quiet session with the data source `qworker`; see `qworker.pipeline.session.start_session`."""
    from qworker.pipeline.session import start_session as started

    return started(master, options=options)
