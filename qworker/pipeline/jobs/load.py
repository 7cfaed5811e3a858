"""`load`: each row of a table becomes one enqueued call. Rejected rows go to a table of their own, with the reasons."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from qworker.bulk import LoadDone, check_load
from qworker.errors import UsageError
from qworker.names import check_existing_queue
from qworker.pipeline.source.call_encoder import CALL, CallMaker
from qworker.pipeline.source.row_reader import SOURCE
from qworker.pipeline.source.source import loading_class
from qworker.pipeline.source.write_partition import WriteOptions, bulk_writer
from qworker.pipeline.spark.error_text import raise_qworker_errors
from qworker.pipeline.spark.runtime import use_current_interpreter
from qworker.signature import Signature

if TYPE_CHECKING:
    from qworker.app import Tasks

__all__ = ["LoadResult", "load"]

# Columns that are not arguments.
_BESIDE = ("due_at", "priority", "key")


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a load, in all of its runs.

    Attributes:
        name: The name of the load.
        queue: The queue of the calls.
        task: The task of the calls.
        enqueued: The number of calls.
        rejected: The number of rejected rows.
        rejects: The table of the rejected rows; None if no row was rejected.
        already_loaded: True if an earlier run decided everything, so that this one read nothing.
    """

    name: str
    queue: str
    task: str
    enqueued: int
    rejected: int
    rejects: str | None
    already_loaded: bool


def load(  # noqa: PLR0913 - each argument is one option of a load
    spark: SparkSession,
    source_df: DataFrame,
    url: str,
    queue: str | None,
    task: str,
    args: Mapping[str, str] | None = None,
    *,
    app: Tasks | None = None,
    name: str,
    rejects: str | None = None,
    due_at: str | None = None,
    priority: str | None = None,
    unique_key: str | None = None,
    staging_dir: str | None = None,
    text: bool = False,
) -> LoadResult:
    """Enqueue one call of a task for each row.

    Args:
        spark: The session, with the data source registered.
        source_df: The rows.
        url: The backend.
        queue: The queue. None: the task's own queue.
        task: The name of the task.
        args: Maps a parameter to a column, or to an SQL expression over the columns. None: each parameter takes the
            column of its name. Without an app, each column is then an argument.
        app: The app that has the task. The rows are checked against the task's annotations. None: nothing is checked.
        name: The load's name. Running the same load again enqueues nothing twice, and completes an interrupted load.
        rejects: A directory or URI for a Parquet table of the rejected rows, with a column `reason`. None: the first
            rejected row fails the load.
        due_at: A column or SQL expression: the time from which the call can run, as a timestamp or Unix seconds.
        priority: A column or SQL expression: 0 to 9.
        unique_key: A column or SQL expression: while a call with this key is ready, delayed or leased, another one is
            not stored.
        staging_dir: A folder that all processes see, for stores that cannot keep staged messages themselves.
        text: Whether the columns are texts, as in CSV. With an app, numbers and booleans are then read from them.

    Raises:
        UsageError: The task, a parameter, a column or an option is wrong. Nothing is enqueued.
        InvalidArguments: A row is not valid, and there is no table for rejected rows. Nothing is enqueued.
        BackendError: The store failed. Run the load again.
    """
    found = None if app is None else app[task]
    queue = check_existing_queue(queue) if queue is not None else (found.queue if found is not None else _no_queue())
    signature = None if found is None else found.signature
    columns = _mapping(source_df, signature, args)
    if signature is not None:
        # This comes before Spark reads anything, because no row can correct these errors.
        signature.check((), dict.fromkeys(columns))
    if priority is None and found is not None and found.options.priority:
        priority = str(found.options.priority)
    given = zip(_BESIDE, (due_at, priority, unique_key), strict=True)
    beside = {name: text for name, text in given if text is not None}
    options = WriteOptions(url=url, queue=queue, load=check_load(name), staging_dir=staging_dir, rejects=rejects)
    with raise_qworker_errors(), use_current_interpreter(spark):
        # Spark reports wrong columns and SQL here, before the store is touched.
        rows = _rows(source_df, columns, beside, whole=rejects is not None)
        before = asyncio.run(_settled(options))
        made = _format(spark, CallMaker(task, signature, tuple(columns), text=text))
        rows.write.format(made).mode("append").options(**_texts(options)).save()
    done = asyncio.run(_done(options))
    return LoadResult(
        name=name,
        queue=queue,
        task=task,
        enqueued=done.rows,
        rejected=done.rejected,
        rejects=rejects if done.rejected else None,
        already_loaded=before,
    )


def _no_queue() -> str:
    raise UsageError("no queue is given: pass a queue, or an app whose task has one")


def _mapping(source: DataFrame, signature: Signature | None, args: Mapping[str, str] | None) -> dict[str, str]:
    """Map each parameter to an SQL expression."""
    if args is not None:
        return dict(args)
    names = source.columns if signature is None else [name for name in signature.parameters if name in source.columns]
    return {name: f"`{name.replace('`', '``')}`" for name in names}


def _rows(source: DataFrame, columns: Mapping[str, str], beside: Mapping[str, str], *, whole: bool) -> DataFrame:
    """Select the columns of the calls. With `whole`, also select the rows themselves, for the rejected ones."""
    chosen = [F.expr(text).alias(name) for name, text in beside.items()]
    if columns:
        chosen.append(F.struct(*[F.expr(text).alias(name) for name, text in columns.items()]).alias(CALL))
    if whole or not chosen:
        # Calls without arguments need a column, so that their rows are counted.
        chosen.append(F.struct(*[F.col(f"`{name.replace('`', '``')}`") for name in source.columns]).alias(SOURCE))
    return source.select(*chosen)


def _format(spark: SparkSession, maker: CallMaker) -> str:
    """Register a format that makes calls of rows in the tasks that stage them.

    This saves one process for each task, and one transfer of each row.
    """
    # One name for each thread: another thread may load with the same session.
    made = loading_class(f"qworker_load_{threading.get_ident()}", maker)
    spark.dataSource.register(made)
    return made.name()


async def _settled(options: WriteOptions) -> bool:
    async with bulk_writer(options, options.load or "") as writer:
        return await writer.done(0) is not None or await writer.sealed(0) is not None


async def _done(options: WriteOptions) -> LoadDone:
    async with bulk_writer(options, options.load or "") as writer:
        done = await writer.done(0)
    if done is None:
        raise AssertionError(f"the load {options.load} ended without a mark")
    return done


def _texts(options: WriteOptions) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(options).items() if value is not None}
