"""`load`: from any table to enqueued tasks, each row once, checked against the task's signature."""

from __future__ import annotations

import asyncio
import datetime
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from qworker import Tasks
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import InvalidArguments, QworkerError, UnknownTask, UsageError
from qworker.message import Query, State, StoredMessage
from qworker.pipeline.jobs.load import load
from qworker.worker import Worker, WorkerOptions
from tests.spark.killing import Killer, jvm
from tests.support.servers import RedisServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(180)]


class Size(msgspec.Struct):
    width: int
    height: int = 1


def make_app(url: str = "memory:") -> tuple[Tasks, list[tuple[Any, ...]]]:
    """Tasks that write down what they were called with."""
    tasks, calls = Tasks(url), []

    @tasks.task(queue="thumbs")
    async def thumb(path: str, width: int = 320, tags: list[str] | None = None) -> None:
        calls.append((path, width, tags))

    @tasks.task(queue="thumbs")
    async def typed(day: datetime.date, size: Size, share: float, note: str | None) -> None:
        calls.append((day, size, share, note))

    return tasks, calls


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/spool?sync=off"


async def _look(url: str) -> list[StoredMessage]:
    backend = open_backend(url)
    try:
        return [
            each
            for queue in await backend.queues()
            for state in (State.READY, State.DELAYED)
            for each in await list_messages(backend, queue, Query(state))
        ]
    finally:
        await backend.aclose()


def kwargs_in(url: str) -> list[dict[str, Any]]:
    return [json.loads(each.message.body)["kwargs"] for each in asyncio.run(_look(url))]


def work_off(tasks: Tasks) -> None:
    asyncio.run(Worker(tasks, WorkerOptions(burst=True)).run())


def rejected(spark: SparkSession, path: Path) -> list[Any]:
    return spark.read.parquet(str(path)).collect()


# -- what is enqueued --------------------------------------------------------------------------------------------------


def test_each_row_runs_once_in_a_worker_with_the_columns_of_its_parameters(spark: SparkSession, url: str) -> None:
    tasks, calls = make_app(url)
    df = spark.range(0, 120, 1, 3).selectExpr(
        "concat('f', id) as path",
        "if(id % 2 = 0, null, cast(id as int)) as width",
        "array('a', 'b') as tags",
        "id as unused",
    )
    result = load(spark, df, url, None, "thumb", app=tasks, name="first")
    assert (result.enqueued, result.rejected, result.queue, result.already_loaded) == (120, 0, "thumbs", False)
    work_off(tasks)
    # A null is left out where it cannot be the argument and there is a default.
    expected = [(f"f{n}", 320 if n % 2 == 0 else n, ["a", "b"]) for n in range(120)]
    assert sorted(calls) == sorted(expected)


def test_dates_structs_and_nulls_arrive_as_the_annotations_say(spark: SparkSession, url: str, tmp_path: Path) -> None:
    tasks, calls = make_app(url)
    df = spark.sql(
        "select date'2026-11-21' as day, named_struct('width', 640) as size, 0.5d as share,"
        " cast(null as string) as note"
    )
    assert load(spark, df, url, None, "typed", app=tasks, name="j").enqueued == 1
    work_off(tasks)
    assert calls == [(datetime.date(2026, 11, 21), Size(640), 0.5, None)]


def test_parameters_take_any_expression_and_calls_may_be_due_later(spark: SparkSession, url: str) -> None:
    tasks, _ = make_app()
    df = spark.range(4)
    args = {"path": "concat('/data/', id, '.png')", "width": "cast(id * 10 as int)"}
    load(spark, df, url, "other", "thumb", args, app=tasks, name="j", due_at="timestamp_seconds(4000000000 + id)")
    found = asyncio.run(_look(url))
    assert {each.message.queue for each in found} == {"other"}
    assert [each.due_at for each in found] == [4_000_000_000.0 + n for n in range(4)]
    assert kwargs_in(url) == [{"path": f"/data/{n}.png", "width": n * 10} for n in range(4)]


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_tables_of_every_kind_are_loaded_without_an_app_too(
    spark: SparkSession, url: str, tmp_path: Path, kind: str
) -> None:
    rows = [("a.png", 1), ('b, "ü".png', 2)]
    spark.createDataFrame(rows, "path string, width int").coalesce(1).write.format(kind).save(str(tmp_path / kind))
    source = spark.read.schema("path string, width int").format(kind).load(str(tmp_path / kind))
    assert load(spark, source, url, "q", "anything", name="j").enqueued == 2
    assert kwargs_in(url) == [{"path": path, "width": width} for path, width in rows]


# -- what is not -------------------------------------------------------------------------------------------------------


def mixed(spark: SparkSession, count: int, partitions: int = 3) -> DataFrame:
    """Of ten rows one has no path and one a width that is no number."""
    return spark.range(0, count, 1, partitions).selectExpr(
        "id", "if(id % 10 = 3, null, concat('f', id)) as path", "if(id % 10 = 7, 'wide', cast(id as string)) as width"
    )


def test_rows_that_do_not_fit_are_set_aside_as_they_are_with_the_reason(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    tasks, calls = make_app(url)
    rejects = tmp_path / "rejects"
    df = mixed(spark, 200).withColumnRenamed("width", "label")
    result = load(spark, df, url, None, "thumb", {"path": "path"}, app=tasks, name="j", rejects=str(rejects))
    assert (result.enqueued, result.rejected, result.rejects) == (180, 20, str(rejects))
    found = rejected(spark, rejects)
    assert sorted(row.id for row in found) == [n for n in range(200) if n % 10 == 3]
    assert {row.reason for row in found} == {"task 'thumb', argument path: expected str, got null"}
    assert {row.label for row in found} == {str(row.id) for row in found}
    work_off(tasks)
    assert len(calls) == 180


def test_a_type_that_no_row_can_have_is_told_for_each_row(spark: SparkSession, url: str, tmp_path: Path) -> None:
    tasks, _ = make_app()
    result = load(spark, mixed(spark, 30), url, None, "thumb", app=tasks, name="j", rejects=str(tmp_path / "rejects"))
    assert (result.enqueued, result.rejected) == (0, 30)
    reasons = Counter(row.reason for row in rejected(spark, tmp_path / "rejects"))
    assert reasons == {
        "task 'thumb', argument width: expected int, got str": 27,
        "task 'thumb', argument path: expected str, got null": 3,
    }


@pytest.mark.parametrize("scheme", ["file", "sq", "vsqs"])
def test_a_row_whose_body_is_larger_than_max_body_is_set_aside_with_its_size(
    spark: SparkSession, tmp_path: Path, scheme: str
) -> None:
    tasks, calls = make_app(url := f"{scheme}://{tmp_path}/spool?sync=off&max_body=1KiB")
    rejects = tmp_path / "rejects"
    df = spark.range(0, 20, 1, 2).selectExpr("id", "repeat('x', if(id % 10 = 3, 2000, 10)) as path")
    result = load(spark, df, url, None, "thumb", {"path": "path"}, app=tasks, name="j", rejects=str(rejects))
    assert (result.enqueued, result.rejected) == (18, 2)
    found = rejected(spark, rejects)
    assert sorted(row.id for row in found) == [3, 13]
    for row in found:
        assert re.fullmatch(r"the body has 20\d\d bytes, more than max_body=1KiB: .*", row.reason), row.reason
    work_off(tasks)
    assert [len(path) for path, _, _ in calls] == [10] * 18


def test_without_a_place_for_them_the_first_bad_row_fails_the_load_and_nothing_is_enqueued(
    spark: SparkSession, url: str
) -> None:
    tasks, _ = make_app()
    with pytest.raises(
        InvalidArguments, match=r"^row \d+ of partition \d cannot be enqueued: task 'thumb', argument [^\n]*$"
    ):
        load(spark, mixed(spark, 30), url, None, "thumb", {"path": "path"}, app=tasks, name="j")
    assert kwargs_in(url) == []


@pytest.mark.parametrize(
    ("task", "args", "problem"),
    [
        ("nothing", None, "nothing"),
        ("thumb", {"path": "path", "size": "id"}, "unexpected keyword argument 'size'"),
        ("thumb", {"width": "id"}, "missing a required argument: 'path'"),
        ("thumb", {"path": "nowhere"}, "`nowhere` cannot be resolved"),
        ("thumb", {"path": "concat(("}, "Syntax error"),
    ],
)
def test_a_wrong_task_parameter_or_column_is_told_in_one_line_before_anything_is_read(
    spark: SparkSession, url: str, tmp_path: Path, task: str, args: dict[str, str] | None, problem: str
) -> None:
    tasks, _ = make_app()
    with pytest.raises((UsageError, UnknownTask), match=problem) as raised:
        load(spark, mixed(spark, 3), url, None, task, args, app=tasks, name="j")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "spool").exists()


# -- once --------------------------------------------------------------------------------------------------------------


def test_the_same_load_again_doubles_nothing_and_says_so(spark: SparkSession, url: str, tmp_path: Path) -> None:
    tasks, _ = make_app()
    rejects = tmp_path / "rejects"
    results = [
        load(
            spark,
            mixed(spark, 100, partitions),
            url,
            None,
            "thumb",
            {"path": "path"},
            app=tasks,
            name="j",
            rejects=str(rejects),
        )
        for partitions in (2, 5)
    ]
    assert [(each.enqueued, each.rejected, each.already_loaded) for each in results] == [
        (90, 10, False),
        (90, 10, True),
    ]
    assert len(kwargs_in(url)) == 90
    assert len(rejected(spark, rejects)) == 10
    assert not list(rejects.glob(".staged*"))


def test_a_redis_has_each_row_of_a_load_once_and_a_worker_runs_it(spark: SparkSession, tmp_path: Path) -> None:
    with RedisServer() as server:
        tasks, calls = make_app(server.url)
        for partitions, loaded in ((3, False), (2, True)):
            rows, rejects = mixed(spark, 60, partitions), str(tmp_path / "rejects")
            result = load(
                spark, rows, server.url, None, "thumb", {"path": "path"}, app=tasks, name="j", rejects=rejects
            )
            assert (result.enqueued, result.rejected, result.already_loaded) == (54, 6, loaded)
        work_off(tasks)
    assert sorted(path for path, _, _ in calls) == sorted(f"f{n}" for n in range(60) if n % 10 != 3)


def test_a_load_whose_task_processes_are_killed_is_exact_in_the_queue_and_in_the_rejects(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    tasks, _ = make_app()
    draw, process, killed, turns = random.Random(3), jvm(spark), 0, 0
    df = mixed(spark, 4_000, 4)
    # Some loads are over before anybody is killed.
    while not killed and turns < 10:
        turns += 1
        rejects = str(tmp_path / f"rejects-{turns}")

        def run(job: str = f"j{turns}", rejects: str = rejects) -> tuple[int, int]:
            done = load(spark, df, url, None, "thumb", {"path": "path"}, app=tasks, name=job, rejects=rejects)
            return done.enqueued, done.rejected

        with Killer(process, draw, within=0.3) as killer:
            try:
                counts = run()
            except QworkerError:
                counts = run()
        killed += killer.killed
        assert counts == (3_600, 400)
        ids = [row.id for row in rejected(spark, Path(rejects))]
        assert sorted(ids) == [n for n in range(4_000) if n % 10 == 3]
    assert killed
    expected = [f"f{n}" for n in range(4_000) if n % 10 != 3]
    assert Counter(kwargs["path"] for kwargs in kwargs_in(url)) == Counter(dict.fromkeys(expected, turns))
