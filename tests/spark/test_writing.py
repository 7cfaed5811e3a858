"""`df.write.format("qworker")`: every row once, whatever dies."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from pyspark.errors import PySparkException

from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import BackendError, InvalidArguments, NotSupported, QworkerError, UsageError
from qworker.message import Query, SettleAction, Settlement, State, StoredMessage
from qworker.pipeline.spark.error_text import raise_qworker_errors
from qworker.pipeline.spark.runtime import map_in_arrow
from tests.spark.killing import COMMIT, Killer, forked, jvm
from tests.support.servers import RedisServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path, server: RedisServer) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/spool?sync=off"
    with server.client() as client:
        client.flushall()
    return server.url


def write(df: DataFrame, url: str, **options: str) -> None:
    with raise_qworker_errors():
        df.write.format("qworker").mode("append").options(url=url, queue="q", **options).save()


def bodies(spark: SparkSession, rows: int, partitions: int = 4) -> DataFrame:
    """The numbers below `rows`, as raw bodies."""
    return spark.range(0, rows, 1, partitions).selectExpr("cast(cast(id as string) as binary) as body")


async def _look(url: str, state: State) -> list[StoredMessage]:
    backend = open_backend(url)
    try:
        return await list_messages(backend, "q", Query(state)) if "q" in await backend.queues() else []
    finally:
        await backend.aclose()


def stored(url: str, state: State = State.READY) -> list[StoredMessage]:
    return asyncio.run(_look(url, state))


async def _take(url: str) -> list[str]:
    backend = open_backend(url)
    taken: list[str] = []
    try:
        while leases := await backend.lease("q", 1000, 60.0):
            await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
            taken += [lease.message.body.decode() for lease in leases]
    finally:
        await backend.aclose()
    return taken


def take(url: str) -> list[str]:
    """Lease and ack everything."""
    return asyncio.run(_take(url))


def numbers(count: int) -> list[str]:
    return sorted(str(number) for number in range(count))


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_become_enqueued_tasks(spark: SparkSession, url: str) -> None:
    rows = [("resize", '["a.png"]', '{"width": 640}'), ("resize", None, None), ("größe", '[1, "ü"]', "{}")]
    write(spark.createDataFrame(rows, "task string, args string, kwargs string"), url)
    found = [msgspec.json.decode(each.message.body) for each in stored(url)]
    assert sorted(found, key=str) == sorted(
        [
            {"task": "resize", "args": ["a.png"], "kwargs": {"width": 640}},
            {"task": "resize", "args": []},
            {"task": "größe", "args": [1, "ü"], "kwargs": {}},
        ],
        key=str,
    )


def test_due_times_priorities_and_keys_are_kept(spark: SparkSession, server: RedisServer) -> None:
    with server.client() as client:
        client.flushall()
    rows = [
        (b"later", 4_000_000_000, 0, None),
        (b"low", None, 1, "k"),
        (b"high", None, 9, None),
        (b"again", None, None, "k"),
    ]
    df = spark.createDataFrame(rows, "body binary, due bigint, priority int, key string").coalesce(1)
    write(df.selectExpr("body", "timestamp_seconds(due) as due_at", "priority", "key"), server.url)
    assert [each.message.body for each in stored(server.url)] == [b"high", b"low"]
    delayed = stored(server.url, State.DELAYED)
    assert [(each.message.body, each.due_at) for each in delayed] == [(b"later", 4_000_000_000.0)]


def test_ids_tell_the_job_the_partition_and_the_row(spark: SparkSession, url: str) -> None:
    write(bodies(spark, 6, partitions=2), url, load="ids")
    assert [each.message.id for each in stored(url)] == [f"ids:0:{part}:{row}" for part in range(2) for row in range(3)]
    assert [each.message.body.decode() for each in stored(url)] == ["0", "1", "2", "3", "4", "5"]


def test_a_row_that_cannot_be_enqueued_leaves_nothing_and_is_named_in_one_line(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    df = spark.range(0, 400, 1, 4).selectExpr("'t' as task", "if(id = 250, '[1', '[1]') as args")
    with pytest.raises(
        InvalidArguments,
        match=r"^row 50 of partition 2 cannot be enqueued: the column 'args' must be an array in JSON [^\n]*\)$",
    ):
        write(df, url, load="bad")
    assert stored(url) == []
    assert not list(tmp_path.glob("spool/q/tmp/*"))


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ("id", "the column 'id' is not one of"),
        ("'[]' as args", "do not name a task"),
        ("'t' as task, 1 as args", r"the column 'args' must be string \(got int\)"),
    ],
)
def test_a_wrong_column_is_told_in_one_line_before_anything_runs(
    spark: SparkSession, tmp_path: Path, columns: str, problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        write(spark.range(1).selectExpr(*columns.split(", ")), f"file://{tmp_path}/spool")
    assert not (tmp_path / "spool").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"quue": "q"}, "unknown option 'quue'"),
        ({"load": "../x"}, "not a valid load name"),
        ({"url": "memory:"}, "exist only in the process"),
        ({"url": "file:///proc/nowhere"}, "cannot open /proc/nowhere"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(
    spark: SparkSession, tmp_path: Path, options: dict[str, str], problem: str
) -> None:
    given = {"url": f"file://{tmp_path}/spool", "queue": "q", "load": "j"} | options
    with pytest.raises(QworkerError, match=problem), raise_qworker_errors():
        bodies(spark, 1).write.format("qworker").mode("append").options(**given).save()


# A row, and what its error says.
MISTAKES = {
    "cast(NULL AS string) AS task": "the column 'task' must not be null or empty",
    "'' AS task": "the column 'task' must not be null or empty",
    "cast(NULL AS string) AS task, cast(NULL AS binary) AS body": "must not be null or empty if `body` is null",
    "'t' AS task, '[1' AS args": "the column 'args' must be an array in JSON",
    "'t' AS task, '[1]' AS kwargs": "the column 'kwargs' must be an object in JSON",
    "'t' AS task, 12 AS priority": "the column 'priority' must be from 0 to 9 (got 12)",
    "'t' AS task, '' AS key": "the column 'key' must have 1 to 255 bytes",
    "'t' AS task, double('NaN') AS due_at": "the column 'due_at' must be a time in Unix seconds, before the year 10000",
    "'t' AS task, 1e300 AS due_at": "(got 1e+300)",
    "'t' AS task, -1e300 AS due_at": "(got -1e+300)",
    "'t' AS task, double('Infinity') AS due_at": "(got inf)",
    "'t' AS task, -5 AS due_at": "(got -5)",
    # Milliseconds.
    "'t' AS task, 1764000000000 AS due_at": "(got 1764000000000)",
    "'t' AS task, 9223372036854775807 AS due_at": "must be a time",
    "'t' AS task, timestamp '+12345-01-01 00:00:00' AS due_at": "must be a time",
}


@pytest.mark.parametrize(("row", "said"), MISTAKES.items())
def test_spark_shows_the_error_of_a_row_as_one_line_that_names_the_column_the_row_and_what_to_do(
    spark: SparkSession, tmp_path: Path, row: str, said: str
) -> None:
    options = {"url": f"file://{tmp_path}/spool", "queue": "q"}
    with pytest.raises(PySparkException) as raised:
        # Without any help of qworker's: this is what a program of one's own prints.
        spark.sql(f"SELECT {row}").write.format("qworker").mode("append").options(**options).save()
    lines = [line for line in str(raised.value).splitlines() if "qworker" in line]
    assert len(lines) == 1, lines
    assert said in lines[0]
    assert "row 0 of partition 0 cannot be enqueued" in lines[0]
    assert "correct the row, or name a table for such rows (`rejects`)" in lines[0]
    assert "Traceback" not in str(raised.value)
    assert len(str(raised.value).splitlines()) <= 3


def test_a_row_that_is_no_message_becomes_a_reject_with_its_reason(spark: SparkSession, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/spool"
    rows = spark.sql(
        "SELECT 't' AS task, '[1' AS args, 1.0D AS due_at, 0 AS priority "
        "UNION ALL SELECT 't', '[1]', double('NaN'), 0 UNION ALL SELECT 't', '[1]', 1e300D, 0 "
        "UNION ALL SELECT 't', '[1]', 1.0D, 12 UNION ALL SELECT NULL, '[1]', 1.0D, 0 "
        "UNION ALL SELECT 't', '[1]', 1.0D, 0"
    )
    write(rows, url, rejects=str(tmp_path / "rejects"), load="l")
    reasons = sorted(row.reason for row in spark.read.parquet(str(tmp_path / "rejects")).collect())
    assert [reason.split("'")[1] for reason in reasons] == ["args", "due_at", "due_at", "priority", "task"]
    assert len(stored(url)) == 1


def test_a_path_is_refused_because_it_would_have_no_effect(spark: SparkSession, tmp_path: Path) -> None:
    options = {"url": f"file://{tmp_path}/spool", "queue": "q"}
    said = r"has no path \(got '/x/y'\): [^\n]*call \.{}\(\) without arguments$"
    with pytest.raises(UsageError, match=said.format("save")), raise_qworker_errors():
        bodies(spark, 1).write.format("qworker").mode("append").options(**options).save("/x/y")
    with pytest.raises(UsageError, match=said.format("load")), raise_qworker_errors():
        spark.read.format("qworker").options(**options).load("/x/y")


def test_a_queue_cannot_be_overwritten(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match=r"cannot be used: write with \.mode\(\"append\"\)"), raise_qworker_errors():
        bodies(spark, 1).write.format("qworker").mode("overwrite").options(url=f"file://{tmp_path}/s", queue="q").save()


def test_a_foreign_protocol_is_written_through_a_folder(spark: SparkSession, tmp_path: Path) -> None:
    url = f"vsqs://{tmp_path}/spool"
    for _ in range(2):
        write(bodies(spark, 150), url, load="once", staging_dir=str(tmp_path / "staging"))
    assert sorted(take(url)) == numbers(150)


# -- once --------------------------------------------------------------------------------------------------------------


def test_the_same_job_again_doubles_nothing_also_with_other_partitions(spark: SparkSession, url: str) -> None:
    write(bodies(spark, 500), url, load="once")
    taken = take(url)
    write(bodies(spark, 500, partitions=7), url, load="once")
    write(bodies(spark, 500), url, load="another")
    assert Counter(taken + take(url)) == Counter(dict.fromkeys(numbers(500), 2))


def test_writes_without_a_name_are_all_enqueued_and_leave_no_mark(spark: SparkSession, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/spool?sync=off"
    for _ in range(2):
        write(bodies(spark, 10), url)
    assert len(take(url)) == 20
    assert not [path.name for path in (tmp_path / "spool/q/names").iterdir()]


def test_a_task_that_is_tried_again_after_it_has_staged_everything_doubles_nothing(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    first = tmp_path / "first"

    def rows(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        try:
            first.touch(exist_ok=False)
        except FileExistsError:
            return
        # The writer has had all rows; its task fails all the same.
        os.kill(os.getpid(), signal.SIGKILL)

    df = bodies(spark, 2_000)
    write(map_in_arrow(df, rows, "body binary"), url, load="retried")
    assert first.exists()
    assert sorted(take(url)) == numbers(2_000)


def test_task_processes_that_are_killed_at_random_lose_and_double_nothing(spark: SparkSession, url: str) -> None:
    draw, killed, process = random.Random(5), 0, jvm(spark)
    count, turns = 4_000, 0
    df = spark.range(0, count, 1, 4).selectExpr("cast(concat(id, repeat(' ', 200)) as binary) as body")
    # Some writes are over before anybody is killed.
    while killed < 2 and turns < 20:
        job = f"killed-{turns}"
        turns += 1
        with Killer(process, draw, within=0.2) as killer:
            try:
                write(df, url, load=job)
            except QworkerError:
                # Once too often: the write was aborted.
                assert [each for each in stored(url) if each.message.id.startswith(f"{job}:")] == []
                write(df, url, load=job)
        killed += killer.killed
    found = Counter(each.message.body.decode().strip() for each in stored(url))
    assert found == Counter(dict.fromkeys(numbers(count), turns))
    assert killed == 2


def test_a_commit_that_is_killed_half_way_is_completed_by_the_same_job(spark: SparkSession, tmp_path: Path) -> None:
    # Only such a commit renames one message after another.
    df = bodies(spark, 10_000)
    # On a busy machine a commit can be over before it is killed: then there is another one.
    for turn in range(10):
        spool = tmp_path / str(turn)
        url = f"file://{spool}?sync=off&fsq=1"
        killed = _killed_half_way(df, url, spool / "q/queue", jvm(spark))
        taken = take(url)
        assert taken
        if killed and len(taken) < 10_000:
            break
    assert len(taken) < 10_000, "no commit was killed half-way"
    write(df.limit(3), url, load="half")
    assert sorted(taken + take(url)) == numbers(10_000)
    assert not list((spool / "q/tmp").iterdir())


def _killed_half_way(df: DataFrame, url: str, queue: Path, process: int) -> bool:
    """Write, and kill the commit when its first messages are there. Return whether the write has failed."""
    over = threading.Event()

    def die_half_way() -> None:
        while not over.is_set():
            if queue.exists() and len(os.listdir(queue)) > 100:
                for child in forked(process, COMMIT):
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                return

    killer = threading.Thread(target=die_half_way)
    killer.start()
    try:
        write(df, url, load="half")
    except BackendError:
        return True
    finally:
        over.set()
        killer.join()
    return False


# -- streams -----------------------------------------------------------------------------------------------------------


def stream(spark: SparkSession, source: Path, checkpoint: Path, url: str) -> None:
    """Run a stream over what is new in a folder of text files."""
    lines = spark.readStream.schema("value string").text(str(source))
    query = (
        lines.selectExpr("cast(value as binary) as body")
        .writeStream.format("qworker")
        .options(url=url, queue="q", load="stream", checkpointLocation=str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)


def test_a_micro_batch_that_spark_repeats_is_enqueued_once(spark: SparkSession, url: str, tmp_path: Path) -> None:
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    source.mkdir()
    (source / "1.txt").write_text("a\nb\n")
    stream(spark, source, checkpoint, url)
    (source / "2.txt").write_text("c\n")
    stream(spark, source, checkpoint, url)
    taken = take(url)
    # As if the driver had died between the commit of the batch and Spark's note of it.
    last = max(
        (path for path in (checkpoint / "commits").iterdir() if path.name.isdigit()), key=lambda path: int(path.name)
    )
    last.unlink()
    (last.parent / f".{last.name}.crc").unlink()
    stream(spark, source, checkpoint, url)
    assert sorted(taken + take(url)) == ["a", "b", "c"]
    # A stream that begins anew enqueues what it reads.
    shutil.rmtree(checkpoint)
    stream(spark, source, checkpoint, url)
    assert sorted(take(url)) == ["a", "b", "c"]
