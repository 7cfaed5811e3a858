"""Spark SQL: `CREATE TABLE ... USING qworker`, `INSERT INTO` and `SELECT`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import InvalidArguments, NotSupported, QworkerError, UsageError
from qworker.message import Query, State
from qworker.pipeline.spark.error_text import raise_qworker_errors
from tests.spark.streams import run_to_end

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(180)]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/spool?sync=off"


@pytest.fixture
def table(spark: SparkSession) -> Iterator[str]:
    # The page about tables creates it in the same session.
    spark.sql("DROP TABLE IF EXISTS calls")
    yield "calls"
    spark.sql("DROP TABLE IF EXISTS calls")


def run(spark: SparkSession, query: str) -> list[Any]:
    with raise_qworker_errors():
        return spark.sql(query).collect()


async def _bodies(url: str, queue: str) -> list[bytes]:
    backend = open_backend(url)
    try:
        return [stored.message.body for stored in await list_messages(backend, queue, Query(State.READY))]
    finally:
        await backend.aclose()


def calls(url: str, queue: str = "q") -> list[Any]:
    return [msgspec.json.decode(body) for body in asyncio.run(_bodies(url, queue))]


def test_a_table_is_created_inserted_into_and_read_by_sql_alone(spark: SparkSession, url: str, table: str) -> None:
    columns = "task,args,kwargs,state,queue"
    run(spark, f"CREATE TABLE {table} USING qworker OPTIONS (url '{url}', queue 'q', columns '{columns}')")
    run(spark, f"INSERT INTO {table} VALUES ('resize', '[1]', '{{}}', NULL, NULL), ('crop', NULL, NULL, NULL, NULL)")
    run(spark, f"INSERT INTO {table} SELECT 'many', to_json(array(id)), NULL, NULL, NULL FROM range(20)")
    assert calls(url)[:2] == [{"task": "resize", "args": [1], "kwargs": {}}, {"task": "crop", "args": []}]
    found = run(spark, f"SELECT task, count(*) AS n FROM {table} WHERE state = 'ready' GROUP BY task ORDER BY task")
    assert [tuple(row) for row in found] == [("crop", 1), ("many", 20), ("resize", 1)]
    # What another program publishes is seen by the next query.
    run(spark, f"INSERT INTO {table} SELECT 'late', NULL, NULL, NULL, NULL")
    assert run(spark, f"SELECT count(*) AS n FROM {table}")[0].n == 23


def test_a_table_has_every_column_of_a_message_if_none_is_named(spark: SparkSession, url: str, table: str) -> None:
    run(spark, f"CREATE TABLE {table} USING qworker OPTIONS (url '{url}', queue 'q')")
    empty = {field.name: "NULL" for field in spark.table(table).schema.fields}
    values = ", ".join((empty | {"task": "'t'", "due_at": "timestamp '2090-01-01 00:00:00'"}).values())
    run(spark, f"INSERT INTO {table} VALUES ({values})")
    (row,) = run(spark, f"SELECT state, task, due_at, tries FROM {table}")
    assert (row.state, row.task, row.due_at.year, row.tries) == ("delayed", "t", 2090, 0)


def test_a_value_in_a_column_that_cannot_be_written_is_an_error_of_one_line(
    spark: SparkSession, url: str, table: str
) -> None:
    run(spark, f"CREATE TABLE {table} USING qworker OPTIONS (url '{url}', queue 'q', columns 'task,state')")
    with pytest.raises(InvalidArguments, match=r"^row 0 of partition 0 .*the column 'state' cannot be written[^\n]*$"):
        run(spark, f"INSERT INTO {table} VALUES ('t', 'fail')")
    run(spark, f"INSERT INTO {table} VALUES ('only this one', NULL)")
    assert [call["task"] for call in calls(url)] == ["only this one"]


def test_rows_of_a_table_go_to_the_store_that_a_write_names(spark: SparkSession, url: str, table: str) -> None:
    run(spark, f"CREATE TABLE {table} USING qworker OPTIONS (url '{url}', queue 'q', columns 'task,args,state')")
    run(spark, f"INSERT INTO {table} VALUES ('t', '[1]', NULL)")
    frame = spark.table(table).select("task", "args")
    frame.write.format("qworker").mode("append").option("url", url).option("queue", "other").save()
    assert calls(url, "other") == calls(url, "q") == [{"task": "t", "args": [1]}]


@pytest.mark.parametrize(
    ("query", "kind", "said"),
    [
        ("INSERT OVERWRITE {table} VALUES ('t')", NotSupported, "INSERT OVERWRITE cannot be used"),
        ("CREATE TABLE other USING qworker OPTIONS (url '{url}', quue 'q')", UsageError, "unknown option 'quue'"),
        ("CREATE TABLE other USING qworker OPTIONS (queue 'q')", UsageError, "needs a URL"),
        ("CREATE TABLE other USING qworker OPTIONS (url '{url}', load 'x')", UsageError, "a table has many"),
        ("CREATE TABLE other USING qworker OPTIONS (url 'redis://:secret@h/0')", UsageError, "QWORKER_REDIS_PASSWORD"),
        (
            "CREATE TABLE other USING qworker OPTIONS (url 'redis://u:secret@h/0')",
            UsageError,
            "leave it out of OPTIONS",
        ),
        ("CREATE TABLE other USING qworker OPTIONS (url 'mq+http://:secret@h')", UsageError, "QWORKER_HTTP_TOKEN"),
        ("CREATE TABLE other USING qworker OPTIONS (url '{url}') AS SELECT 't' AS task", UsageError, "without columns"),
    ],
)
def test_a_wrong_statement_is_said_in_one_line_and_stores_no_password(
    spark: SparkSession, url: str, table: str, query: str, kind: type[QworkerError], said: str
) -> None:
    run(spark, f"CREATE TABLE {table} USING qworker OPTIONS (url '{url}', queue 'q', columns 'task')")
    with pytest.raises(kind) as raised:
        run(spark, query.format(table=table, url=url))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)
    assert not spark.catalog.tableExists("other")


def test_a_table_can_be_streamed(spark: SparkSession, url: str, table: str, tmp_path: Path) -> None:
    run(spark, f"CREATE TABLE {table} USING qworker OPTIONS (url '{url}', queue 'q', columns 'task,args')")
    run(spark, f"INSERT INTO {table} VALUES ('t', '[1]'), ('t', '[2]')")
    stream = spark.readStream.table(table).writeStream.format("parquet").option("path", str(tmp_path / "rows"))
    run_to_end(stream.option("checkpointLocation", str(tmp_path / "checkpoint")))
    assert sorted(row.args for row in spark.read.parquet(str(tmp_path / "rows")).collect()) == ["[1]", "[2]"]
    assert calls(url) == []
