"""An index of the Python installation that runs this program.

Spark lists the files and enqueues a call for each. Workers parse them. Spark archives the results and reports on them.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import os
import signal
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from qworker import Fail, Tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Acked messages are kept as done until they are archived.
tasks = Tasks("file://./spool?keep_done=all")

ARCHIVE = "archive"
PAGE = Path("report.html")
# As on a cluster, a Spark task that fails has two more attempts. With `local[*]` it would have only one attempt.
MASTER = os.environ.get("QWORKER_EXAMPLE_MASTER", "local[*,3]")
_COUNTS = "path string, functions bigint, classes bigint, lines bigint"


class Counts(NamedTuple):
    """The counts of one file, or of several."""

    functions: int
    classes: int
    lines: int


class Totals(NamedTuple):
    """The counts of all files."""

    files: int
    broken: int
    functions: int
    classes: int
    lines: int


# -- the tasks --------------------------------------------------------------------------------------------------------


@tasks.task(queue="files", max_tries=20)
def index(path: str) -> None:
    """Count one file, and enqueue its counts.

    If a worker is killed before the message is acked, the file is counted again. The id of the second message is made
    from the path, so it is not stored twice.
    """
    counts = count(Path(path))
    if counts is None:
        raise Fail("not the Python of this interpreter")
    name = hashlib.sha256(path.encode()).hexdigest()[:32]
    counted.using(id=name).enqueue_sync(path=path, **counts._asdict())


@tasks.task(queue="counts")
def counted(path: str, functions: int, classes: int, lines: int) -> None:
    """Do nothing: this call is a row of the index, which Spark reads from the queue. No worker runs it."""


def count(path: Path) -> Counts | None:
    """Parse a file and return its counts. None: it cannot be parsed, as some test files of Python cannot."""
    source = path.read_bytes()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    functions = classes = 0
    for node in ast.walk(tree):
        functions += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        classes += isinstance(node, ast.ClassDef)
    return Counts(functions, classes, source.count(b"\n"))


# -- the files --------------------------------------------------------------------------------------------------------


def roots() -> list[Path]:
    """Return the folders of the standard library and of installed packages, without those inside another one."""
    found = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return sorted(path for path in found if not any(other in path.parents for other in found))


def modules(place: str) -> Iterator[str]:
    """Yield the `.py` files of the sample under `place`, a folder or a file. Their order is always the same."""
    if not os.path.isdir(place):
        if place.endswith(".py") and os.path.isfile(place) and sampled(place):
            yield place
        return
    with os.scandir(place) as entries:
        names = sorted(entry.path for entry in entries if not (entry.is_symlink() and entry.is_dir()))
    for name in names:
        yield from modules(name)


def sampled(path: str) -> bool:
    """Return whether a file is in the sample: about $QWORKER_EXAMPLE_FILES of each 10,000, or all."""
    limit = os.environ.get("QWORKER_EXAMPLE_FILES")
    return limit is None or zlib.crc32(path.encode()) % 10_000 < int(limit)


def listed(spark: SparkSession) -> DataFrame:
    """Return a table with the column `path` of all files. Each of Spark's workers lists some folders."""
    places = [(str(place),) for root in roots() for place in sorted(root.iterdir())]
    frames: Any = spark  # PySpark's types are not strict here.
    return cast(
        "DataFrame", frames.createDataFrame(places, "place string").repartition(4).mapInArrow(_list, "path string")
    )


def _list(batches: Iterator[Any]) -> Iterator[Any]:
    arrow: Any = importlib.import_module("pyarrow")
    for batch in batches:
        yield arrow.RecordBatch.from_pydict(
            {"path": [p for place in batch.column(0).to_pylist() for p in modules(place)]}
        )
        _die_where_asked()


def _die_where_asked() -> None:
    """Kill the process that lists one part of the files, once, if QWORKER_EXAMPLE_KILL=FILE is set. Create FILE."""
    from pyspark import TaskContext

    mark, context = os.environ.get("QWORKER_EXAMPLE_KILL"), TaskContext.get()
    if mark is None or context is None or context.partitionId() != 1 or context.attemptNumber() > 0:
        return
    Path(mark).touch()
    os.kill(os.getpid(), signal.SIGKILL)


# -- the steps --------------------------------------------------------------------------------------------------------


def load_files(spark: SparkSession) -> str:
    """Enqueue a call for each file exactly once, even if tasks of Spark fail meanwhile."""
    from qworker.pipeline.jobs.load import load

    result = load(spark, listed(spark), tasks.url, "files", "index", {"path": "path"}, app=tasks, name="index")
    return f"{result.enqueued} files enqueued"


def study(spark: SparkSession) -> str:
    """Archive the finished messages, and write a report."""
    from qworker.pipeline.jobs.archive import archive
    from qworker.pipeline.report import page, report

    archive(spark, tasks.url, ARCHIVE, queues=["files"], delete=True)
    found = report(spark, ARCHIVE, queues=["files"])
    PAGE.write_text(page(found))
    (totals,) = found.queues
    return f"{totals.done} done, {totals.failed} failed, {totals.runs} runs; see {PAGE}"


def check(spark: SparkSession) -> str:
    """Compare the result of the pipeline with a sequential pass over the files.

    Raises:
        SystemExit: The results differ.
    """
    from qworker.pipeline.jobs.match_keys import parse_match
    from qworker.pipeline.jobs.reconcile import reconcile

    wanted, found = sequential(), indexed(spark)
    compared = reconcile(spark, listed(spark), "files", on=[parse_match("path")], archive=ARCHIVE, url=tasks.url)
    told = (
        f"one after another: {wanted}\nby the pipeline:   {found}\n"
        f"never enqueued {compared.never_enqueued}, twice {compared.enqueued_twice}, lost {compared.lost}"
    )
    if wanted != found or not compared.agrees:
        sys.exit(f"{told}\nthey differ")
    return told


def indexed(spark: SparkSession) -> Totals:
    """Return the totals from the archive and from the counts in their queue."""
    from pyspark.sql import functions as F  # noqa: N812

    from qworker.pipeline.jobs.archive import read_archive

    ended = read_archive(spark, ARCHIVE).agg(
        *(F.count_if(F.col("state") == name).alias(name) for name in ("done", "fail"))
    )
    counts = spark.read.format("qworker").options(url=tasks.url, queue="counts", columns="kwargs").load()
    each = counts.select(F.from_json("kwargs", _COUNTS).alias("c"))
    sums = each.agg(*(F.sum(f"c.{name}").alias(name) for name in Counts._fields))
    row = ended.crossJoin(sums).collect()[0]
    return Totals(row["done"], row["fail"], row["functions"], row["classes"], row["lines"])


def sequential() -> Totals:
    """Return the totals of a pass without a queue and without Spark."""
    rows = [count(Path(path)) for root in roots() for path in modules(str(root))]
    good = [counts for counts in rows if counts is not None]
    return Totals(len(good), len(rows) - len(good), *(sum(column) for column in zip(*good, strict=True)))


def main() -> None:
    """Run the steps that the command line names."""
    from qworker.pipeline import start_session

    steps = {"load": load_files, "study": study, "check": check}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="+", choices=list(steps))
    chosen: list[str] = parser.parse_args().steps
    spark = start_session(MASTER)
    try:
        for step in chosen:
            print(steps[step](spark))
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
