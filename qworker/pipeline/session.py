"""Start Spark sessions: quiet, on this machine by default, with Python workers that find qworker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qworker.errors import BackendUnavailable, MissingExtra, UsageError

if TYPE_CHECKING:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "QUIET_OPTION",
    "check_installation",
    "context_of",
    "hands_filters_down",
    "map_in_arrow",
    "own_interpreter",
    "parallelism",
    "register_data_source",
    "start_session",
]

_OLDEST_JAVA = 17
_VERSION = re.compile(r'version "(\d+)')
_QUIET = Path(__file__).with_name("quiet.properties")
# For the JVM of a driver: the configuration of its logs.
QUIET_OPTION = f"-Dlog4j2.configurationFile={_QUIET.as_uri()}"

# No ports that are not needed, and no output.
_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}
_LOCAL_DEFAULTS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "8",
}


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


def start_session(
    master: str | None = None, *, name: str = "qworker", options: Mapping[str, str] | None = None
) -> SparkSession:
    """Return the session of this process, with the data source registered. A new session prints nothing.

    Args:
        master: Where it runs. None: `local[*]`, or the master of spark-submit.
        name: The name of the application on a cluster.
        options: Spark's own configuration, which overrides the defaults here.

    Raises:
        MissingExtra: PySpark is not installed.
        UsageError: There is no Java, or it is too old.
        BackendUnavailable: Spark did not start.
    """
    check_installation()
    with _silence_about_pandas():
        return _started(master, name, options or {})


def _started(master: str | None, name: str, options: Mapping[str, str]) -> SparkSession:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    # If spark-submit or the caller has started a session, it is used.
    running = SparkContext._active_spark_context  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - no public way
    if running is None and "SPARK_REMOTE" not in os.environ:
        if "PYSPARK_GATEWAY_PORT" in os.environ:
            # Its JVM runs already, and knows what spark-submit was told: a configuration that is made without it does
            # not.
            SparkContext._ensure_initialized()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - no public way
        conf = _configuration(master, name, options)
        _start_quietly(conf)
    spark = SparkSession.builder.getOrCreate()
    register_data_source(spark)
    return spark


def _configuration(master: str | None, name: str, options: Mapping[str, str]) -> SparkConf:
    from pyspark import SparkConf

    conf = SparkConf()
    if master is not None:
        conf.setMaster(master)
    else:
        conf.setIfMissing("spark.master", "local[*]")
    where = conf.get("spark.master") or ""
    quiet = {"spark.driver.extraJavaOptions": QUIET_OPTION}
    defaults = {"spark.app.name": name, **_DEFAULTS, **quiet, **(_LOCAL_DEFAULTS if _is_local(where) else {})}
    for key, value in defaults.items():
        conf.setIfMissing(key, value)
    for key, value in options.items():
        conf.set(key, value)
    if _is_local(where) or not (conf.contains("spark.pyspark.python") or "PYSPARK_PYTHON" in os.environ):
        conf.set("spark.pyspark.python", sys.executable)
    return conf


def _is_local(master: str) -> bool:
    return master == "local" or master.startswith("local[")


def _start_quietly(conf: SparkConf) -> None:
    """Start the JVM with its standard error in a file, which is shown only if the start fails."""
    from pyspark import SparkContext
    from pyspark.errors import PySparkException
    from pyspark.java_gateway import launch_gateway  # pyright: ignore[reportUnknownVariableType] - has no types

    with tempfile.TemporaryFile("w+", prefix="qworker-spark-", errors="replace") as told:
        try:
            with _environment(PYSPARK_PYTHON=conf.get("spark.pyspark.python")):
                launch = cast("Callable[..., Any]", launch_gateway)
                known = SparkContext._gateway  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - no public way
                gateway = known or launch(conf, popen_kwargs={"stderr": told})
                SparkContext(conf=conf, gateway=gateway)
        except (PySparkException, OSError) as error:
            raise BackendUnavailable(f"Spark did not start: {_last_line(told) or error}") from error


@contextmanager
def _environment(**values: str | None) -> Generator[None]:
    """Set environment variables for the length of a block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: value for name, value in values.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _last_line(told: Any) -> str:
    told.seek(0)
    lines = [line.strip() for line in told if "Exception" in line or "rror" in line]
    return lines[0] if lines else ""


def register_data_source(spark: SparkSession) -> None:
    """Register the data source `qworker` in a session.

    On a local master its Python workers run on this interpreter, which has qworker; on a cluster, on the one that the
    session names (`spark.pyspark.python`), where qworker must be installed.
    """
    from qworker.pipeline.source.source import source_class

    with own_interpreter(spark):
        spark.dataSource.register(source_class(spark))


def context_of(spark: SparkSession) -> SparkContext | None:
    """Return the context of a session; None for a session of Spark Connect."""
    return getattr(spark, "sparkContext", None)


def parallelism(spark: SparkSession) -> int:
    """Return how many tasks a session runs at the same time, as far as it is known."""
    context = context_of(spark)
    return 8 if context is None else max(2, context.defaultParallelism)


def hands_filters_down(spark: SparkSession) -> bool:
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
def own_interpreter(spark: SparkSession) -> Generator[None]:
    """Run the functions of a local Spark on this interpreter, for the length of a block."""
    context = context_of(spark)
    if context is None or not _is_local(context.master or ""):
        yield
        return
    before = context.pythonExec
    context.pythonExec = sys.executable
    try:
        yield
    finally:
        context.pythonExec = before


def map_in_arrow(rows: DataFrame, work: Callable[[Any], Any], schema: str) -> DataFrame:
    """Return the frame that `work` makes of the rows' record batches."""
    with _silence_about_pandas():
        # Its types are unknown to strict checkers.
        untyped: Any = rows
        return cast("DataFrame", untyped.mapInArrow(work, schema))


@contextmanager
def _silence_about_pandas() -> Generator[None]:
    """Keep PySpark from warning about pandas 3 where it asks for its version: nothing here gives pandas any data."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
        yield
