"""The pipeline of today reads archives, loads and stores that the pipeline of commit 31528ec has written."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qworker import Context, Tasks
from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.message import Query, State
from qworker.pipeline.jobs.archive import archive, read_archive
from qworker.pipeline.jobs.load import load
from qworker.pipeline.jobs.match_keys import parse_match
from qworker.pipeline.jobs.reconcile import reconcile
from qworker.pipeline.jobs.replay import replay
from qworker.pipeline.report import report
from qworker.worker import Worker
from qworker.worker.worker_options import WorkerOptions
from tests.spark.stores import ask, file_url
from tests.support.archives import unpack
from tests.support.depth import DEEP
from tests.support.written import FOLDER, KEEPS_DONE, KINDS, body_of, restored

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A JVM that starts beside other tests takes its time.
pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]


class Left:
    """What the pipeline has left: a store, its archive, one that was being written, and the table of a load."""

    def __init__(self, folder: Path) -> None:
        unpack(FOLDER / "archive.tar.gz", folder)
        self.url = file_url(folder / "spool")
        self.archive = str(folder / "archive")
        self.torn = str(folder / "torn")
        self.table = str(folder / "rows.jsonl")
        self.facts: dict[str, Any] = json.loads((FOLDER / "archive.json").read_text())
        # What is staged and not sealed is kept for 36 hours.
        for path in folder.glob("spool/*/tmp/staged/**/*"):
            os.utime(path, (time.time(), time.time()))

    def rows(self, *paths: str) -> list[dict[str, Any]]:
        """The archived messages of some paths."""
        return [row for row in self.facts["messages"] if json.loads(row["kwargs"])["path"] in paths]

    def bodies(self, queue: str, state: State = State.READY) -> list[dict[str, Any]]:
        """The arguments of the calls that wait."""

        async def found(backend: Backend) -> list[dict[str, Any]]:
            waiting = await list_messages(backend, queue, Query(state))
            return [json.loads(one.message.body)["kwargs"] for one in waiting]

        return ask(self.url, found)


@pytest.fixture
def left(tmp_path: Path) -> Left:
    return Left(tmp_path)


def row_of(row: Any) -> dict[str, Any]:
    """A row of a table in the words of archive.json."""
    found = {name: value for name, value in row.asDict().items() if value is not None and name not in {"body", "day"}}
    return {name: value.timestamp() if hasattr(value, "timestamp") else value for name, value in found.items()}


def messages_in(spark: SparkSession, target: str) -> list[dict[str, Any]]:
    return [row_of(row) for row in read_archive(spark, target).orderBy("id").collect()]


def events_in(spark: SparkSession, target: str) -> list[dict[str, Any]]:
    return sorted((row_of(row) for row in read_archive(spark, target, "events").collect()), key=named)


def named(event: dict[str, Any]) -> tuple[str, float, str]:
    return event["id"], event["at"], event["event"]


def test_written_by_31528ec_an_archive_is_read_and_reported(spark: SparkSession, left: Left) -> None:
    assert messages_in(spark, left.archive) == left.facts["messages"]
    assert events_in(spark, left.archive) == sorted(left.facts["events"], key=named)
    ended = Counter(row["state"] for row in left.facts["messages"])
    assert ended == {"done": 4, "fail": 4}
    (queue,) = report(spark, left.archive).queues
    assert (queue.queue, queue.done, queue.failed) == ("jobs", 4, 4)


def test_written_by_31528ec_an_archive_grows_by_what_is_new(spark: SparkSession, left: Left) -> None:
    tasks = Tasks(left.url)
    ran: list[str] = []

    @tasks.task(queue="jobs")
    async def index(ctx: Context, path: str) -> None:
        ran.append(path)

    async def work(_: Backend) -> None:
        await Worker(tasks, WorkerOptions(burst=True)).run()
        await tasks.aclose()

    again = archive(spark, left.url, left.archive)
    assert (again.messages, again.events, again.recovered) == (0, 0, False)
    ask(left.url, work)
    assert ran == ["/d"]
    new = archive(spark, left.url, left.archive, delete=True)
    assert (new.messages, new.events, new.removed) == (1, 3, 1)
    rows = messages_in(spark, left.archive)
    assert [row for row in rows if row["id"] != "replayed.1:0:0:0"] == left.facts["messages"]
    assert len(events_in(spark, left.archive)) == len(left.facts["events"]) + 3
    assert archive(spark, left.url, left.archive).messages == 0


def test_written_by_31528ec_a_run_that_died_between_two_moves_is_completed(spark: SparkSession, left: Left) -> None:
    done = archive(spark, left.url, left.torn)
    assert (done.recovered, done.messages) == (True, 0)
    # All but those of the second run.
    first = left.rows("/a", "/b", "/c", "/d", "/e", "/f")
    assert messages_in(spark, left.torn) == first
    ids = {row["id"] for row in first}
    assert events_in(spark, left.torn) == sorted((e for e in left.facts["events"] if e["id"] in ids), key=named)


def test_written_by_31528ec_a_replay_that_died_goes_on_and_one_that_is_over_does_not(
    spark: SparkSession, left: Left
) -> None:
    def run(which: str) -> tuple[int, int, int]:
        job = left.facts[which]
        done = replay(spark, left.url, "jobs", job["where"], archive=left.archive, name=job["job"])
        return done.requeued, done.enqueued, done.skipped

    assert run("replayed") == (0, 0, 1)
    assert left.bodies("jobs") == [{"path": "/d"}]
    # Its plan was written, and nothing was done.
    assert run("died") == (0, 2, 0)
    assert Counter(call["path"] for call in left.bodies("jobs")) == {"/d": 1, "/e": 1, "/f": 1}
    assert run("died") == (0, 0, 2)
    assert len(left.bodies("jobs")) == 3


def test_written_by_31528ec_a_table_is_compared_as_it_was(spark: SparkSession, left: Left) -> None:
    was = left.facts["reconciled"]
    verdicts = {row["key"]: row["verdict"] for row in spark.read.parquet(f"{left.archive}/verdicts").collect()}
    assert {key: verdicts[key] for key in ("/a", "/d", "/f", "/g", "/never")} == {
        "/a": "done",
        "/d": "open",
        "/f": "failed",
        "/g": "done",
        "/never": "never enqueued",
    }
    table = spark.createDataFrame([(path,) for path in ("/a", "/d", "/f", "/g", "/never")], "path string")
    found = reconcile(spark, table, "jobs", on=[parse_match("path")], url=left.url, archive=left.archive)
    counts = ("keys", "done", "open", "failed", "lost", "never_enqueued", "enqueued_twice", "unknown")
    assert {name: getattr(found, name) for name in counts} == {name: was[name] for name in counts}
    assert [(row.key, row.verdict, row.ids) for row in found.shown] == [
        (row["key"], row["verdict"], row["ids"]) for row in was["shown"]
    ]


def test_written_by_31528ec_a_load_that_was_killed_in_its_commit_is_completed(spark: SparkSession, left: Left) -> None:
    job = left.facts["load"]
    assert len(left.bodies(job["queue"])) == job["seen"] < job["rows"]
    for again in (True, True):
        # The seal counts, and not what this run reads.
        table = spark.read.json(left.table)
        done = load(spark, table, left.url, job["queue"], job["task"], name=job["job"])
        assert (done.enqueued, done.already_loaded) == (job["rows"], again)
        calls = left.bodies(job["queue"])
        assert sorted(calls, key=lambda call: call["size"]) == [{"path": f"/row/{n}", "size": n} for n in range(12)]


# The pipeline reads all stores by the same contract.
@pytest.mark.parametrize("kind", KINDS if DEEP else ("file", "redis"))
def test_written_by_31528ec_each_store_is_archived_and_replayed(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    with restored(kind, tmp_path) as written:
        finished = [one for queue in written.queues for one in written.messages(queue, "done", "fail")]
        assert (kind in KEEPS_DONE) == any(one["state"] == "done" for one in finished)
        # One of those in `fail` is replayed from there, and another one from the archive alone.
        assert replay(spark, written.url, "work", "error like '%ZeroDivisionError%'").requeued == 1
        finished = [one for one in finished if "ZeroDivisionError" not in one.get("error", "")]

        target = str(tmp_path / "target")
        done = archive(spark, written.url, target, delete=True)
        assert (done.messages, done.events) == (len(finished), len(written.facts["events"]))
        assert done.removed == len(finished)
        rows = read_archive(spark, target).collect()
        found = sorted((row.id, row.state, bytes(row.body), row.tries, row.error or "") for row in rows)
        assert found == sorted(
            (one["id"], one["state"], body_of(one), one["tries"], one.get("error", "")) for one in finished
        )
        assert in_state(written.url, State.FAILED) == in_state(written.url, State.DONE) == Counter()
        labels = ["traceback"]
        if kind != "rfq":
            # On a server that is others' too nothing can be staged.
            again = replay(spark, written.url, "work", "error like 'no such picture%'", archive=target)
            assert (again.requeued, again.enqueued) == (0, 1)
            labels.append("one line")
        wanted = Counter(f"{kind} {label}".encode() for label in labels)
        assert in_state(written.url, State.READY) & wanted == wanted


def in_state(url: str, state: State) -> Counter[bytes]:
    """The bodies of all messages that are in a state."""

    async def found(backend: Backend) -> Counter[bytes]:
        queues = await backend.queues()
        return Counter(
            [one.message.body for queue in queues for one in await list_messages(backend, queue, Query(state))]
        )

    return ask(url, found)
