"""Start Spark sessions: quiet, on this machine by default, with Python workers that find qworker."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qworker.errors import BackendUnavailable
from qworker.pipeline.spark.runtime import check_installation, is_local, silence_about_pandas, use_current_interpreter

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

__all__ = [
    "QUIET_OPTION",
    "register_data_source",
    "start_session",
]

_QUIET = Path(__file__).with_name("quiet.properties")
# For the JVM of a driver: the configuration of its logs.
QUIET_OPTION = f"-Dlog4j2.configurationFile={_QUIET.as_uri()}"

# Only the ports that are needed, and no output.
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
    with silence_about_pandas():
        return _started(master, name, options or {})


def _started(master: str | None, name: str, options: Mapping[str, str]) -> SparkSession:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    # If spark-submit or the caller has started a session, it is used.
    running = SparkContext._active_spark_context  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - no public way
    if running is None and "SPARK_REMOTE" not in os.environ:
        if "PYSPARK_GATEWAY_PORT" in os.environ:
            # Its JVM runs already, and has the configuration of spark-submit. A configuration that is made without it
            # does not have that.
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
    defaults = {"spark.app.name": name, **_DEFAULTS, **quiet, **(_LOCAL_DEFAULTS if is_local(where) else {})}
    for key, value in defaults.items():
        conf.setIfMissing(key, value)
    for key, value in options.items():
        conf.set(key, value)
    if is_local(where) or not (conf.contains("spark.pyspark.python") or "PYSPARK_PYTHON" in os.environ):
        conf.set("spark.pyspark.python", sys.executable)
    return conf


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

    with use_current_interpreter(spark):
        spark.dataSource.register(source_class(spark))
