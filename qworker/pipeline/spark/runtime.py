"""Checks of an installed Spark and of a session, and calls that differ between kinds of sessions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from qworker.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "check_installation",
    "enable_filter_pushdown",
    "is_local",
    "map_in_arrow",
    "parallelism",
    "silence_about_pandas",
    "spark_context",
    "use_current_interpreter",
]

_OLDEST_JAVA = 17
_VERSION = re.compile(r'version "(\d+)')


def check_installation() -> None:
    """Check that Spark can start here.

    Raises:
        MissingExtra: PySpark is not installed.
        UsageError: There is no Java, or it is too old.
    """
    try:
        import pyarrow as _arrow
        import pyspark as _spark
    except ImportError as error:
        raise MissingExtra("spark", "the pipeline") from error
    del _arrow, _spark
    _check_java()


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    fix = f"install one (on Debian: apt-get install openjdk-{_OLDEST_JAVA}-jre-headless), or set JAVA_HOME"
    if java is None or not os.access(java, os.X_OK):
        where = f"none is at JAVA_HOME={home}" if home else "none is found"
        raise UsageError(f"Spark needs Java {_OLDEST_JAVA} or newer, but {where}: {fix}")
    told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = _VERSION.search(told)
    if found is not None and int(found[1]) < _OLDEST_JAVA:
        raise UsageError(f"Spark needs Java {_OLDEST_JAVA} or newer, but {java} is {found[1]}: {fix}")


def is_local(master: str) -> bool:
    """Return whether a master is this machine."""
    return master == "local" or master.startswith("local[")


def spark_context(spark: SparkSession) -> SparkContext | None:
    """Return the context of a session; None for a session of Spark Connect."""
    return getattr(spark, "sparkContext", None)


def parallelism(spark: SparkSession) -> int:
    """Return how many tasks a session runs at the same time, as far as it is known."""
    context = spark_context(spark)
    return 8 if context is None else max(2, context.defaultParallelism)


def enable_filter_pushdown(spark: SparkSession) -> bool:
    """Enable filter pushdown to data sources. Return False if Spark does it incorrectly.

    Spark 4.2 and 4.3 keep the filters of one query with its data frame, and the next query of that frame reads too
    little. The release that fixes this is the one in which readers are also given limits.
    """
    from pyspark.sql.datasource import DataSourceReader

    if not hasattr(DataSourceReader, "pushLimit"):
        return False
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    return True


@contextmanager
def use_current_interpreter(spark: SparkSession) -> Generator[None]:
    """Run the functions of a local Spark on this interpreter, for the length of a block."""
    context = spark_context(spark)
    if context is None or not is_local(context.master or ""):
        yield
        return
    before = context.pythonExec
    context.pythonExec = sys.executable
    try:
        yield
    finally:
        context.pythonExec = before


def map_in_arrow(rows: DataFrame, work: Callable[[Any], Any], schema: str) -> DataFrame:
    """Return the frame that `work` makes from the rows' record batches."""
    with silence_about_pandas():
        # Its types are unknown to strict checkers.
        untyped: Any = rows
        return cast("DataFrame", untyped.mapInArrow(work, schema))


@contextmanager
def silence_about_pandas() -> Generator[None]:
    """Keep PySpark from warning about pandas 3 when it checks its version: this code passes no data to pandas."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
        yield
