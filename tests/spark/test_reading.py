from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import datasource
from pyspark.sql.datasource import InputPartition

from qworker.errors import MissingExtra, UsageError
from qworker.message import SettleAction
from qworker.pipeline.source.options import ReadOptions
from qworker.pipeline.source.reader import EventsReader, FilteredMessagesReader
from qworker.pipeline.spark.runtime import check_installation, map_in_arrow
from qworker.pipeline.spark.schema import MESSAGES, column_names
from tests.spark.stores import QUEUE, ask, file_url, finish, publish, work_off
from tests.support.exports import check_exports
from tests.support.missing_modules import output_without

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# A JVM that starts beside other tests takes its time.
pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(180)]


def read(spark: SparkSession, url: str, **options: str) -> DataFrame:
    return spark.read.format("qworker").options(url=url, **options).load()


@pytest.mark.parametrize("scheme", ["file", "sq", "vsqs", "mq"])
def test_every_message_of_every_state_is_one_row(spark: SparkSession, tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}://{tmp_path}/store"
    publish(url, [b"%d" % number for number in range(20)])
    finish(url, 4, SettleAction.FAIL_PERM, error="no good")
    if scheme != "mq":
        publish(url, [b"later"], delay=3600)

    rows = read(spark, url, columns="id,state,body,error", partitions="2").collect()

    found = sorted((row.state, bytes(row.body)) for row in rows)
    expected = [("fail", b"%d" % number) for number in range(4)] + [("ready", b"%d" % n) for n in range(4, 20)]
    expected += [("delayed", b"later")] if scheme != "mq" else []
    assert found == sorted(expected)
    assert len({row.id for row in rows}) == len(rows)
    assert {row.error for row in rows if row.state == "fail"} == {"no good"}


def test_a_row_says_what_is_known_of_a_message(spark: SparkSession, tmp_path: Path) -> None:
    url = file_url(tmp_path / "store")
    call = json.dumps({"task": "resize", "args": ["a.png", 3], "kwargs": {"width": 640}}).encode()
    (one, _) = publish(url, [call, b"\xff not an envelope"])
    ask(url, lambda backend: backend.lease(QUEUE, 1, 600.0))

    frame = read(spark, url, queue=QUEUE, state="leased,ready")
    leased, ready = sorted(frame.collect(), key=lambda row: row.state)

    assert frame.columns == column_names("messages")
    assert frame.schema == spark.createDataFrame([], MESSAGES).schema
    assert (leased.id, leased.state, leased.queue, leased.tries) == (one, "leased", QUEUE, 0)
    assert (leased.task, leased.args, leased.kwargs) == ("resize", '["a.png", 3]', '{"width": 640}')
    assert leased.holder
    assert leased.expires_at > leased.enqueued_at
    assert (ready.task, ready.args, bytes(ready.body)) == (None, None, b"\xff not an envelope")
    assert (ready.finished_at, ready.expires_at, ready.holder, ready.key) == (None, None, None, None)


def test_only_the_columns_that_a_schema_names_are_made(spark: SparkSession, tmp_path: Path) -> None:
    url = file_url(tmp_path / "store")
    publish(url, [b"x"])
    reader = spark.read.format("qworker").option("url", url)
    assert reader.schema("tries int, id string").load().columns == ["tries", "id"]
    assert reader.schema("tries int, id string").load().collect()[0].tries == 0


def test_every_queue_is_read_where_none_is_named(spark: SparkSession, tmp_path: Path) -> None:
    url = file_url(tmp_path / "store")
    for queue in ("a", "b"):
        publish(url, [b"x"] * 3, queue)
    rows = read(spark, url, columns="queue", state="ready").groupBy("queue").count().collect()
    assert {row["queue"]: row["count"] for row in rows} == {"a": 3, "b": 3}


def test_queries_of_one_frame_leave_no_trace_in_each_other(spark: SparkSession, tmp_path: Path) -> None:
    url = file_url(tmp_path / "store")
    for queue in ("a", "b"):
        publish(url, [b'{"task":"t%d"}' % (number % 3) for number in range(9)], queue)
    finish(url, 3, SettleAction.FAIL_PERM, "a", error="no")
    frame = read(spark, url)
    assert frame.where("state = 'fail' and queue in ('a', 'c') and error like 'n%'").count() == 3
    # Spark's releases up to 4.3 would give the rows of the query before, were filters handed down there.
    assert frame.where("task is null or queue = 'b'").count() == 9


# Spark 4.0 hands no filters down.
if hasattr(datasource, "EqualTo"):

    def test_filters_that_are_handed_down_decide_what_is_read(tmp_path: Path) -> None:
        from pyspark.sql import datasource as ds

        url = file_url(tmp_path / "store")
        for queue in ("a", "b"):
            publish(url, [b'{"task":"t%d"}' % (number % 3) for number in range(9)], queue)
        finish(url, 3, SettleAction.FAIL_PERM, "a", error="no")

        def rows(*filters: ds.Filter) -> tuple[int, set[tuple[str, str]], int]:
            """Return how many rows, which queues and states are read, and how many filters are left to Spark."""
            options = ReadOptions.parse({"url": url}, 2)
            one = FilteredMessagesReader(options, column_names("messages"))
            left = list(one.pushFilters(list(filters)))
            parts = one.partitions()
            found = sum(page.num_rows for part in parts for page in one.read(part))
            return found, {(part.queue, part.state.value) for part in parts}, len(left)

        failed = ds.EqualTo(("state",), "fail")
        assert rows(failed, ds.In(("queue",), ("a", "c"))) == (3, {("a", "fail")}, 0)
        assert rows(failed, ds.EqualTo(("state",), "ready")) == (0, set(), 0)
        assert rows(failed, ds.IsNull(("error",)))[0] == 0
        assert rows(failed, ds.IsNotNull(("error",)), ds.StringStartsWith(("error",), "n"))[0] == 3
        assert rows(ds.EqualTo(("task",), "t1"), ds.LessThan(("tries",), 1))[::2] == (6, 0)
        assert rows(ds.In(("task",), ("t1", "t2")), ds.GreaterThan(("priority",), 0))[0] == 0
        assert rows(ds.Not(failed), ds.EqualTo(("body",), b"x"))[::2] == (18, 2)


def test_events_are_rows_too(spark: SparkSession, tmp_path: Path) -> None:
    url = file_url(tmp_path / "store", history="1")
    work_off(url, 3)
    rows = read(spark, url, table="events").collect()
    assert sorted(row.event for row in rows) == ["acked"] * 3 + ["enqueued"] * 3 + ["leased"] * 3
    assert {(row.queue, row.task) for row in rows} == {(QUEUE, "noop")}
    assert all(row.at and row.worker for row in rows)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs a URL"),
        ({"url": "memory:"}, "exist only in the process"),
        ({"url": "nowhere:///x"}, "no backend is installed for 'nowhere:'"),
        ({"url": "file:///x", "state": "half"}, "'state' must be one of"),
        ({"url": "file:///x", "columns": "id,colour"}, "unknown column 'colour'"),
        ({"url": "file:///x", "partitions": "0"}, "at least 1"),
        ({"url": "file:///x", "quue": "a"}, "unknown option 'quue'"),
    ],
)
def test_a_wrong_option_is_said_in_one_line(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        _ = ReadOptions.parse(options, 2).schema
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_machine_without_java_is_told_so_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="needs Java 17 or newer, but none is found: install one"):
        check_installation()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="none is at JAVA_HOME="):
        check_installation()


def test_a_java_that_is_too_old_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"17 or newer, but .* is 11"):
        check_installation()


def test_a_history_without_parts_is_read_as_nothing() -> None:
    assert list(EventsReader(ReadOptions(url="file:///nowhere"), ["event"]).read(InputPartition(None))) == []


def test_pandas_3_makes_no_warning_where_no_pandas_is_used(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pandas.__version__", "3.0.0")
    frame = spark.range(3)
    assert map_in_arrow(frame, lambda batches: batches, "id bigint").count() == 3


def test_every_module_of_the_pipeline_says_what_it_exports() -> None:
    assert check_exports("qworker.pipeline") > 20


def test_a_package_without_the_extra_is_told_so_in_one_line() -> None:
    program = (
        "from qworker.errors import MissingExtra\n"
        "from qworker import pipeline\n"
        "try: pipeline.start_session()\n"
        "except MissingExtra as error: print(error)\n"
    )
    assert output_without(("pyspark",), program) == f"{MissingExtra('spark', 'the pipeline')}\n"


def test_python_workers_run_on_the_interpreter_that_started_the_session(spark: SparkSession) -> None:
    def interpreter(_: object) -> list[str]:
        return [sys.executable]

    assert spark.sparkContext.pythonExec == sys.executable
    assert spark.sparkContext.parallelize([0], 1).flatMap(interpreter).collect() == [sys.executable]
    assert "PYSPARK_PYTHON" not in os.environ
