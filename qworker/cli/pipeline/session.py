"""The Spark session of a command, with its options, its progress, and its errors on one line."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import click

from qworker.cli.output import has_escapes
from qworker.errors import UsageError
from qworker.streams import ERROR_STREAM

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Work", "read_source", "session", "source_format", "spark_options"]

F = TypeVar("F", bound=Callable[..., Any])

_FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".orc": "orc"}


def spark_options(function: F) -> F:
    """Add the options `--master` and `--conf`."""
    master = click.option(
        "--master",
        metavar="URL",
        help="Master of Spark, such as local[4] or k8s://https://host:6443. Default: all processors of this machine.",
    )
    conf = click.option("--conf", multiple=True, metavar="KEY=VALUE", help="Configuration of Spark; repeatable.")
    return master(conf(function))


class Work(NamedTuple):
    """The session of a command and a function that shows its current step."""

    spark: SparkSession
    # This function shows the current step on a terminal.
    say: Callable[[str], None]


@contextmanager
def session(name: str, master: str | None, conf: Sequence[str]) -> Generator[Work]:
    """Yield a session inside the block, and show the progress of the command on a terminal.

    Raises:
        MissingExtra: PySpark is not installed.
        UsageError: Java is missing, `conf` is not valid, or a Python worker of Spark raised it.
        BackendError: Spark failed, or its workers cannot use the store.
    """
    from qworker.pipeline.session import start_session
    from qworker.pipeline.spark.runtime import check_installation

    options = dict(parse_pair(one) for one in conf)
    check_installation()
    _silence_logging()
    from pyspark.sql import SparkSession

    from qworker.pipeline.spark.error_text import raise_qworker_errors

    # If spark-submit or a test has started the session, this command must not stop it.
    borrowed = SparkSession.getActiveSession() is not None
    with _Progress(name) as progress:
        spark = start_session(master, name=f"qworker {name}", options=options)
        progress.watch(spark)
        try:
            with raise_qworker_errors():
                yield Work(spark, progress.tell)
        finally:
            progress.stop()
            if not borrowed:
                spark.stop()


def _silence_logging() -> None:
    """Prevent PySpark from printing an error as JSON in addition to raising it."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True


def parse_pair(words: str) -> tuple[str, str]:
    key, equals, value = words.partition("=")
    if not equals or not key.startswith("spark."):
        raise UsageError(f"--conf {words}: write KEY=VALUE, such as spark.executor.memory=4g")
    return key, value


def source_format(place: str, form: str | None) -> str:
    """Return the format of a table: `form`, or the format of the file extension.

    Raises:
        UsageError: The format is not known.
    """
    stem = place.rstrip("/").removesuffix(".gz")
    found = form or next((kind for ending, kind in _FORMATS.items() if stem.endswith(ending)), None)
    if found not in {*_FORMATS.values(), "table"}:
        told = "the file extension does not name a format" if found is None else f"{found} is not a known format"
        raise UsageError(f"{place}: {told}: add --format parquet, csv, json, orc or table")
    return found


def read_source(spark: SparkSession, place: str, form: str, *, text: bool = False) -> DataFrame:
    """Return the rows of a file, a folder of files, or a table that the session knows.

    Args:
        spark: The session.
        place: The path, the URL or the name of the table.
        form: The format. See `source_format`.
        text: Whether to keep all columns of CSV as texts.

    Raises:
        UsageError: The table does not exist.
    """
    from qworker.pipeline.spark.error_text import raise_qworker_errors
    from qworker.pipeline.spark.paths import absolute_path

    with raise_qworker_errors():
        if form == "table":
            return spark.read.table(place)
        reader = spark.read.format(form)
        if form == "csv":
            reader = reader.options(header=True, inferSchema=not text, multiLine=True, escape='"')
        return reader.load(absolute_path(place))


class _Progress:
    """The progress of Spark on one line. If standard error is not a terminal, nothing is shown."""

    _EVERY_S = 0.3

    def __init__(self, name: str) -> None:
        self._name = name
        self._what = "working"
        self._shown = has_escapes(sys.stderr)
        self._started = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._shown:
            self._say("starting Spark")
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def watch(self, spark: SparkSession) -> None:
        """Show the stages of a session. Sessions of Spark Connect do not report them."""
        context: Any = getattr(spark, "sparkContext", None)
        if self._shown and context is not None:
            self._thread = threading.Thread(target=self._follow, args=(context.statusTracker(),), daemon=True)
            self._thread.start()

    def _follow(self, tracker: Any) -> None:
        while not self._ended.wait(self._EVERY_S):
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            tasks = sum(stage.numTasks for stage in stages if stage)
            done = sum(stage.numCompletedTasks for stage in stages if stage)
            self._say(f"{self._what}, {done:,} of {tasks:,} tasks" if tasks else self._what)

    def tell(self, what: str) -> None:
        """Show another step from now on."""
        self._what = what

    def _say(self, what: str) -> None:
        print(
            f"\r\x1b[K{self._name}: {what}, {time.monotonic() - self._started:.0f} s",
            end="",
            file=ERROR_STREAM,
            flush=True,
        )

    def stop(self) -> None:
        """Clear the line, before the command prints its result."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._shown:
            self._shown = False
            print("\r\x1b[K", end="", file=ERROR_STREAM, flush=True)
