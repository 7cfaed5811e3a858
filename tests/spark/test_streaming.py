from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qworker.backend import Backend
from qworker.errors import UsageError
from qworker.message import State
from qworker.pipeline.source.options import ReadOptions
from qworker.pipeline.source.stream import ConsumingReader
from qworker.testing.wait_until import wait_until
from tests.spark.stores import ask, bodies, count, file_url, publish
from tests.spark.streams import run_to_end
from tests.support.servers import RedisServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# A JVM that starts beside other tests takes its time.
pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(180)]


class Sink:
    """What a stream's batches gave, by batch."""

    def __init__(self) -> None:
        self.batches: dict[int, list[bytes]] = {}

    def take(self, frame: DataFrame, batch: int) -> None:
        self.batches[batch] = [bytes(row.body) for row in frame.select("body").collect()]

    def fail(self, frame: DataFrame, batch: int) -> None:
        self.take(frame, batch)
        raise RuntimeError("the sink is broken")

    @property
    def rows(self) -> list[bytes]:
        return [body for batch in self.batches.values() for body in batch]


def stream(spark: SparkSession, url: str, sink: object, checkpoint: Path, **options: str) -> None:
    """Run a stream over what is there, to its end."""
    given = {"url": url, "queue": "jobs", "partitions": "2", **options}
    query = (
        spark.readStream.format("qworker")
        .options(**given)
        .load()
        .writeStream.foreachBatch(sink)
        .option("checkpointLocation", str(checkpoint))
    )
    run_to_end(query)


def test_a_log_is_followed_from_where_the_channel_stands_and_goes_on_at_the_checkpoint(
    spark: SparkSession, tmp_path: Path
) -> None:
    url = f"sq://{tmp_path}/store?channel=spark&sync=off"
    publish(url, [b"%d" % number for number in range(10)])
    sink = Sink()
    stream(spark, url, sink.take, tmp_path / "checkpoint", max_messages="4")
    assert [len(batch) for batch in sink.batches.values()] == [4, 4, 2]
    assert sink.rows == [b"%d" % number for number in range(10)]

    # The next query's first batch commits the last of the one before.
    publish(url, [b"more"])
    again = Sink()
    stream(spark, url, again.take, tmp_path / "checkpoint")
    assert again.rows == [b"more"]
    assert b"9" not in bodies(url, State.READY)


def test_spark_s_own_names_of_the_options_of_a_stream_mean_the_same(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sq://{tmp_path}/store?channel=spark&sync=off"
    publish(url, [b"%d" % number for number in range(5)])
    sink = Sink()
    stream(spark, url, sink.take, tmp_path / "checkpoint", maxOffsetsPerTrigger="2", startingOffsets="earliest")
    assert [len(batch) for batch in sink.batches.values()] == [2, 2, 1]
    later = Sink()
    stream(spark, url, later.take, tmp_path / "later", startingOffsets="latest")
    assert later.rows == []
    # A queue that is consumed has the same limit.
    url = file_url(tmp_path / "queue", keep_done="none")
    publish(url, [b"%d" % number for number in range(5)])
    consumed = Sink()
    stream(spark, url, consumed.take, tmp_path / "consumed", maxOffsetsPerTrigger="3", failOnDataLoss="true")
    assert sorted(map(len, consumed.batches.values())) == [2, 3]
    with pytest.raises(UsageError, match="are the same option: pass one of them"):
        ReadOptions.parse({"url": url, "queue": "jobs", "maxOffsetsPerTrigger": "3", "max_messages": "2"}, 2)
    with pytest.raises(UsageError, match="must be one of true, false"):
        ReadOptions.parse({"url": url, "queue": "jobs", "failOnDataLoss": "maybe"}, 2)


def test_a_stream_whose_records_are_gone_fails_unless_it_is_told_to_go_on(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sq://{tmp_path}/store?channel=spark&sync=off&segment_size=4096"
    publish(url, [b"first"])
    stream(spark, url, Sink().take, tmp_path / "checkpoint")
    # Another reader of the channel moves it on, and the segments that it has passed are deleted.
    publish(url, [b"x" * 1000 for _ in range(40)])
    stream(spark, url, Sink().take, tmp_path / "other", starting_position="earliest")
    publish(url, [b"last"])
    stream(spark, url, Sink().take, tmp_path / "other")
    publish(url, [b"newest"])
    stream(spark, url, Sink().take, tmp_path / "other")
    sink = Sink()
    with pytest.raises(Exception, match="are gone: start the query with a new checkpoint") as raised:
        stream(spark, url, sink.take, tmp_path / "checkpoint")
    assert "Traceback" not in str(raised.value)
    assert sink.rows == []
    stream(spark, url, sink.take, tmp_path / "checkpoint", failOnDataLoss="false")
    assert sink.rows[-1] == b"newest"
    assert b"first" not in sink.rows


def test_a_batch_of_a_log_that_failed_is_the_same_batch_again(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sq://{tmp_path}/store?channel=spark&sync=off"
    publish(url, [b"1", b"2"])
    broken = Sink()
    with pytest.raises(Exception, match="the sink is broken"):
        stream(spark, url, broken.fail, tmp_path / "checkpoint")
    publish(url, [b"3"])
    sink = Sink()
    stream(spark, url, sink.take, tmp_path / "checkpoint")
    assert broken.batches == {0: [b"1", b"2"]}
    assert sink.batches == {0: [b"1", b"2"], 1: [b"3"]}


def test_a_queue_is_consumed_and_acked_when_its_batch_is_committed(spark: SparkSession, tmp_path: Path) -> None:
    url = file_url(tmp_path / "store", keep_done="none")
    publish(url, [b"%d" % number for number in range(7)])
    sink = Sink()
    stream(spark, url, sink.take, tmp_path / "checkpoint", max_messages="5")
    assert sorted(map(len, sink.batches.values())) == [2, 5]
    assert sorted(sink.rows) == [b"%d" % number for number in range(7)]
    assert (count(url, State.READY), count(url, State.LEASED)) == (0, 0)


async def ready_again(backend: Backend) -> bool:
    return (await backend.stats("jobs")).ready == 2


def test_what_a_failed_batch_had_is_given_back_and_comes_again(spark: SparkSession, tmp_path: Path) -> None:
    url = file_url(tmp_path / "store", keep_done="none")
    publish(url, [b"1", b"2"])
    broken = Sink()
    with pytest.raises(Exception, match="the sink is broken"):
        stream(spark, url, broken.fail, tmp_path / "checkpoint")
    assert sorted(broken.rows) == [b"1", b"2"]
    # Spark ends the query before the process of its reader.
    ask(url, lambda backend: wait_until(lambda: ready_again(backend)))
    assert bodies(url, State.READY) == [b"1", b"2"]

    sink = Sink()
    stream(spark, url, sink.take, tmp_path / "checkpoint")
    # Spark plans the failed batch again: it is empty, and its messages are in the next one.
    assert sorted(sink.rows) == [b"1", b"2"]
    assert (count(url, State.READY), count(url, State.LEASED)) == (0, 0)


def test_a_redis_is_consumed_and_a_failed_batch_comes_again(spark: SparkSession, tmp_path: Path) -> None:
    with RedisServer() as server:
        publish(server.url, [b"1", b"2"])
        broken = Sink()
        with pytest.raises(Exception, match="the sink is broken"):
            stream(spark, server.url, broken.fail, tmp_path / "checkpoint")
        assert sorted(broken.rows) == [b"1", b"2"]
        # Spark ends the query before the process of its reader.
        ask(server.url, lambda backend: wait_until(lambda: ready_again(backend)))
        publish(server.url, [b"3", b"4", b"5"])
        sink = Sink()
        stream(spark, server.url, sink.take, tmp_path / "checkpoint", max_messages="3")
        assert sorted(sink.rows) == [b"1", b"2", b"3", b"4", b"5"]
        assert max(map(len, sink.batches.values())) == 3
        assert (count(server.url, State.READY), count(server.url, State.LEASED)) == (0, 0)


# -- without Spark: its calls, in its order, and what comes between them -----------------------------------------------


def reader(url: str, **options: str) -> ConsumingReader:
    return ConsumingReader(ReadOptions.parse({"url": url, "queue": "jobs", **options}, 2), ["body"])


def batch(one: ConsumingReader, start: dict[str, int], end: dict[str, int]) -> list[bytes]:
    found: list[bytes] = []
    for part in one.partitions(start, end):
        for page in one.read(part):
            found += page.column("body").to_pylist()
    return sorted(found)


def test_a_reader_that_dies_between_a_batch_and_its_commit_loses_nothing(tmp_path: Path) -> None:
    url = file_url(tmp_path / "store", keep_done="none")
    publish(url, [b"1", b"2", b"3"])
    first = reader(url, max_messages="2")
    start = first.initialOffset()
    end = first.latestOffset(start)
    assert batch(first, start, end) == [b"1", b"2"]
    assert count(url, State.LEASED) == 2

    # The next process knows nothing of the leases: the same batch is empty, and its commit acks nothing.
    second = reader(url)
    second.partitions(start, start)
    assert batch(second, start, end) == []
    second.commit(end)
    assert count(url, State.LEASED) == 2
    first.stop()
    after = second.latestOffset(end)
    assert after["batch"] > end["batch"]
    assert batch(second, end, after) == [b"1", b"2", b"3"]
    second.commit(after)
    second.stop()
    assert (count(url, State.READY), count(url, State.LEASED)) == (0, 0)


def test_tasks_that_run_twice_read_the_same_messages(tmp_path: Path) -> None:
    url = file_url(tmp_path / "store", keep_done="none")
    publish(url, [b"1", b"2", b"3"])
    one = reader(url)
    start = one.initialOffset()
    end = one.latestOffset(start)
    assert batch(one, start, end) == batch(one, start, end) == [b"1", b"2", b"3"]
    one.stop()
    assert sorted(bodies(url, State.READY)) == [b"1", b"2", b"3"]


def test_an_offset_rises_only_with_messages(tmp_path: Path) -> None:
    url = file_url(tmp_path / "store", keep_done="none")
    publish(url, [b"1"])
    one = reader(url)
    start = one.initialOffset()
    end = one.latestOffset(start)
    assert one.latestOffset(end) == end
    assert one.latestOffset() == end
    one.stop()
    assert count(url, State.READY) == 0


def test_a_batch_that_spark_has_not_planned_is_never_acked(tmp_path: Path) -> None:
    url = file_url(tmp_path / "store", keep_done="none")
    publish(url, [b"1", b"2"])
    reader = ConsumingReader(ReadOptions.parse({"url": url, "queue": "jobs", "max_messages": "1"}, 2), ["body"])
    try:
        # As Spark 4.0 and 4.1 do it with availableNow.
        assert [reader.latestOffset() for _ in range(3)] == [{"batch": 1}] * 3
        assert (count(url, State.READY), count(url, State.LEASED)) == (1, 1)
        assert len(reader.partitions({"batch": 0}, {"batch": 1})) == 1
        assert reader.latestOffset() == {"batch": 2}
        assert (count(url, State.READY), count(url, State.LEASED)) == (0, 1)
    finally:
        reader.stop()
    assert bodies(url, State.READY) == [b"2"]


def test_leases_are_renewed_while_a_batch_runs(tmp_path: Path) -> None:
    url = file_url(tmp_path / "store", keep_done="none")
    publish(url, [b"1"])
    one = reader(url, visibility="1")
    end = one.latestOffset(one.initialOffset())
    expiries: set[float] = set()

    def extended() -> bool:
        found = one.partitions({"batch": 0}, end)[0].found
        expiries.add(found[0].expires_at)
        return len(expiries) > 2

    asyncio.run(wait_until(extended))
    one.commit(end)
    one.stop()
    assert count(url, State.READY) == 0
