"""What moves and studies messages in bulk, on Spark: `local[*]` on one machine, or any cluster, with no other code.

Needs the extra `spark` and a Java of at least 17; nothing here imports them before they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qworker.pipeline.schema import EVENTS, MESSAGES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["EVENTS", "MESSAGES", "register_data_source", "start_session"]


def register_data_source(spark: SparkSession) -> None:
    """Make the data source `qworker` known to a session; see `qworker.pipeline.session.register_data_source`."""
    from qworker.pipeline.session import register_data_source as known

    known(spark)


def start_session(master: str | None = None, **options: str) -> SparkSession:
    """A quiet session that knows the data source; see `qworker.pipeline.session.start_session`."""
    from qworker.pipeline.session import start_session as started

    return started(master, options=options)
