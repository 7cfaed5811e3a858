"""Streams that end when they have read what is stored, on every release of Spark."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.streaming import DataStreamWriter

__all__ = ["run_to_end"]

# Before Spark 4.2 a query with this trigger reads one batch, and does not commit it.
_HAS_AVAILABLE_NOW = importlib.util.find_spec("pyspark.sql.streaming.datasource") is not None


def run_to_end(query: DataStreamWriter) -> None:
    """Run a query until it has read what is stored."""
    if _HAS_AVAILABLE_NOW:
        query.trigger(availableNow=True).start().awaitTermination()
        return
    running = query.start()
    try:
        running.processAllAvailable()
    finally:
        running.stop()
