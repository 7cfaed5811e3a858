"""A Spark session for one command: its options, its progress, and its errors as one line."""

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
    """`--master` and `--conf`."""
    master = click.option(
        "--master",
        metavar="URL",
        help="Master of Spark, such as local[4] or k8s://https://host:6443. Default: all processors of this machine.",
    )
    conf = click.option("--conf", multiple=True, metavar="KEY=VALUE", help="Configuration of Spark; repeatable.")
    return master(conf(function))


class Work(NamedTuple):
    """What a command works with."""

    spark: SparkSession
    # Shows what is being done, on a terminal.
    say: Callable[[str], None]


@contextmanager
def session(name: str, master: str | None, conf: Sequence[str]) -> Generator[Work]:
    """A session for the body, with the command's progress on a terminal.

    Raises:
        MissingExtra: PySpark is not installed.
        UsageError: there is no Java, `conf` cannot be read, or a Python worker says so.
        BackendError: Spark, or the store as its workers see it, failed.
    """
    from qworker.pipeline.session import start_session
    from qworker.pipeline.spark.runtime import check_installation

    options = dict(parse_pair(one) for one in conf)
    check_installation()
    _silence_logging()
    from pyspark.sql import SparkSession

    from qworker.pipeline.spark.error_text import raise_qworker_errors

    # A session that somebody else has started, as spark-submit or a test does, is not ours to stop.
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
    """Keep PySpark from printing an error, as JSON, beside raising it."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True


def parse_pair(words: str) -> tuple[str, str]:
    key, equals, value = words.partition("=")
    if not equals or not key.startswith("spark."):
        raise UsageError(f"--conf {words}: write KEY=VALUE, such as spark.executor.memory=4g")
    return key, value


def source_format(place: str, form: str | None) -> str:
    """The format of a table of rows: `form`, or what the ending of a file or a folder says.

    Raises:
        UsageError: nothing tells it.
    """
    stem = place.rstrip("/").removesuffix(".gz")
    found = form or next((kind for ending, kind in _FORMATS.items() if stem.endswith(ending)), None)
    if found not in {*_FORMATS.values(), "table"}:
        told = "the file extension does not name a format" if found is None else f"{found} is not a known format"
        raise UsageError(f"{place}: {told}: add --format parquet, csv, json, orc or table")
    return found


def read_source(spark: SparkSession, place: str, form: str, *, text: bool = False) -> DataFrame:
    """A table of rows: a file, a folder of them, or a table that the session knows.

    Args:
        spark: the session.
        place: its path, URL or name.
        form: see `source_format`.
        text: leave the columns of CSV as the texts that they are, whatever they look like.

    Raises:
        UsageError: there is nothing there.
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
    """What Spark is doing, on one line of a terminal; silent where standard error is none."""

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
        """Follow the stages of a session, if it tells of them: one of Spark Connect does not."""
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
        """Say what is being done from now on."""
        self._what = what

    def _say(self, what: str) -> None:
        print(
            f"\r\x1b[K{self._name}: {what}, {time.monotonic() - self._started:.0f} s",
            end="",
            file=ERROR_STREAM,
            flush=True,
        )

    def stop(self) -> None:
        """Clear the line; what the command prints comes after it."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._shown:
            self._shown = False
            print("\r\x1b[K", end="", file=ERROR_STREAM, flush=True)
