"""`load`: the rows of any table become enqueued tasks, each once; those that do not fit the task's signature are set aside, with reasons."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from qworker.bulk import LoadDone, check_load
from qworker.errors import InvalidArguments, UsageError
from qworker.names import check_queue
from qworker.pipeline.calls import CALL, CallMaker
from qworker.pipeline.drafts import SOURCE
from qworker.pipeline.partitions import WriteOptions, bulk_writer
from qworker.pipeline.session import own_interpreter
from qworker.pipeline.source import loading_class
from qworker.pipeline.told import plain
from qworker.signature import Signature

if TYPE_CHECKING:
    from qworker.app import Tasks

__all__ = ["LoadResult", "load"]

# Columns that go to the queue as they are, beside the arguments.
_BESIDE = ("due_at", "priority", "key")


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a load has put into the queue, with all attempts at it."""

    name: str
    queue: str
    task: str
    enqueued: int
    # Rows that do not fit the task, and where they are.
    rejected: int
    rejects: str | None
    # An earlier run of the load decided all of it, and this one read nothing.
    already_loaded: bool


def load(  # noqa: PLR0913 - each is one thing that a load is told
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
    key: str | None = None,
    staging_dir: str | None = None,
    text: bool = False,
) -> LoadResult:
    """Enqueue one call of a task per row.

    Args:
        spark: the session, which knows the data source.
        source_df: the rows.
        url: the backend.
        queue: where to; None: the task's own queue.
        task: the task's name.
        args: parameter -> column, or any SQL expression over the columns; None: each parameter takes the column of its name, and
            without an app each column is an argument.
        app: the app that has the task: its annotations are what the rows are checked against. None: nothing is checked.
        name: the load's name. Running the same load again enqueues nothing twice, and completes what was interrupted.
        rejects: a directory (or URI) for a Parquet table of the rows that do not fit, with a column `reason`; None: they fail the load.
        due_at: a column or SQL expression: when the call may run, a timestamp or Unix seconds.
        priority: likewise: 0 to 9.
        key: likewise: while a call with this key is pending, another is not stored.
        staging_dir: a folder that all processes see, for stores that cannot keep staged messages themselves.
        text: the columns are texts, as those of CSV are: with an app, numbers and truth values are read from them.

    Raises:
        UsageError: the task, a parameter, a column or an option is wrong; nothing is enqueued.
        InvalidArguments: a row does not fit and there is no table for such; nothing is enqueued.
        BackendError: the store failed; run the load again.
    """
    found = None if app is None else app[task]
    queue = check_queue(queue) if queue is not None else (found.queue if found is not None else _no_queue())
    signature = None if found is None else found.signature
    columns = _mapping(source_df, signature, args)
    if signature is not None:
        # Before Spark reads anything: what no row could fix.
        signature.check((), dict.fromkeys(columns))
    if priority is None and found is not None and found.options.priority:
        priority = str(found.options.priority)
    beside = {name: text for name, text in zip(_BESIDE, (due_at, priority, key), strict=True) if text is not None}
    options = WriteOptions(url=url, queue=queue, load=check_load(name), staging_dir=staging_dir, rejects=rejects)
    with plain(), own_interpreter(spark):
        # Spark finds wrong columns and SQL here, before the store is touched.
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
    """Parameter -> SQL expression."""
    if args is not None:
        return dict(args)
    names = source.columns if signature is None else [name for name in signature.parameters if name in source.columns]
    return {name: f"`{name.replace('`', '``')}`" for name in names}


def _rows(source: DataFrame, columns: Mapping[str, str], beside: Mapping[str, str], *, whole: bool) -> DataFrame:
    """What the calls are made of; with `whole` also the rows themselves, for those that are set aside."""
    chosen = [F.expr(text).alias(name) for name, text in beside.items()]
    if columns:
        chosen.append(F.struct(*[F.expr(text).alias(name) for name, text in columns.items()]).alias(CALL))
    if whole or not chosen:
        # A call without arguments needs its row to be counted.
        chosen.append(F.struct(*[F.col(f"`{name.replace('`', '``')}`") for name in source.columns]).alias(SOURCE))
    return source.select(*chosen)


def _format(spark: SparkSession, maker: CallMaker) -> str:
    """A format that makes calls of rows where it stages them: one process per task less, and one journey of every row."""
    # Of this thread's own: another one may load into another task with the same session.
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
        raise InvalidArguments(f"the load {options.load} ended without a mark")
    return done


def _texts(options: WriteOptions) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(options).items() if value is not None}
