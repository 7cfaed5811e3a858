"""The report's figures against the same figures counted by hand, and its page in a real browser."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qworker.errors import UsageError
from qworker.pipeline.report import report
from tests.spark.tables import write_archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from qworker.pipeline.report import Report

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]

# A Monday morning; every message of the tests lives in the half hour after it.
START = 1_763_971_200.0
QUEUES = ("thumbs", "mails", "42")


class Life:
    """One message's life as a test made it up."""

    def __init__(self, draw: random.Random, number: int) -> None:
        self.id = f"m{number:04d}"
        self.queue = draw.choice(QUEUES)
        self.task = None if self.queue == "42" else f"{self.queue}-task"
        self.enqueued_at = START + draw.randrange(1_000_000) / 1000
        self.wait = draw.randrange(1, 60_000) / 1000
        self.runs = [draw.randrange(1, 9_000) / 1000 for _ in range(1 + (number % 7 == 0) + (number % 21 == 0))]
        self.outcome = "failed" if number % 10 == 3 else "open" if number % 25 == 4 else "done"
        self.worker = f"host-{number % 3}"
        self.begun_at = self.enqueued_at + self.wait
        self.ended_at = self.begun_at + sum(self.runs) + 1.0 * (len(self.runs) - 1)

    def error(self, nth: int) -> str:
        return f"TimeoutError: {self.id} took {nth}.5 s: 'https://host/{self.id}'"

    def events(self) -> list[dict[str, Any]]:
        same = {
            "queue": self.queue,
            "id": self.id,
            "task": self.task,
            "worker": self.worker,
            "enqueued_at": self.enqueued_at,
        }
        rows: list[dict[str, Any]] = [{**same, "event": "enqueued", "at": self.enqueued_at, "tries": 0}]
        at = self.begun_at
        for nth, run_s in enumerate(self.runs):
            rows.append({**same, "event": "leased", "at": at, "tries": nth, "token": nth + 1})
            at += run_s
            last = nth == len(self.runs) - 1
            if last and self.outcome == "open":
                break
            event = {"done": "acked", "failed": "failed"}[self.outcome] if last else "retried"
            error = None if event == "acked" else self.error(nth)
            rows.append({**same, "event": event, "at": at, "tries": nth, "duration_s": run_s, "error": error})
            at += 1.0
        return rows


@pytest.fixture(scope="module")
def lives() -> list[Life]:
    draw = random.Random(7)
    return [Life(draw, number) for number in range(400)]


@pytest.fixture(scope="module")
def archive(spark: SparkSession, lives: list[Life], tmp_path_factory: pytest.TempPathFactory) -> str:
    """An archive of all of them, with one part that was archived twice and one message that both tables have."""
    events = [event for life in lives for event in life.events()]
    kept = next(life for life in lives if life.outcome == "failed")
    message = {"queue": kept.queue, "id": kept.id, "state": "fail", "task": kept.task, "tries": 1, "priority": 0}
    message |= {
        "enqueued_at": kept.enqueued_at,
        "finished_at": kept.ended_at,
        "error": f"{kept.error(0)}\nTraceback ...",
    }
    folder = tmp_path_factory.mktemp("archive")
    return write_archive(spark, folder, events=events, messages=[message])


@pytest.fixture(scope="module")
def whole(spark: SparkSession, archive: str) -> Report:
    return report(spark, archive)


def test_counts_equal_those_made_by_hand(whole: Report, lives: list[Life]) -> None:
    for queue in QUEUES:
        mine = [life for life in lives if life.queue == queue]
        (totals,) = [one for one in whole.queues if one.queue == queue]
        outcomes = Counter(life.outcome for life in mine)
        assert (totals.enqueued, totals.done, totals.failed, totals.open) == (
            len(mine),
            outcomes["done"],
            outcomes["failed"],
            outcomes["open"],
        )
        assert totals.runs == sum(len(life.runs) - (life.outcome == "open") for life in mine)
        assert totals.retried == sum(len(life.runs) - 1 for life in mine)
        assert totals.per_second == pytest.approx(outcomes["done"] / whole.span_s)
    assert whole.since == min(life.enqueued_at for life in lives)
    assert sum(worker.runs for worker in whole.workers) == sum(totals.runs for totals in whole.queues)


def test_percentiles_equal_those_made_by_hand(whole: Report, lives: list[Life]) -> None:
    assert {times.queue for times in whole.tasks} == set(QUEUES)
    for times in whole.tasks:
        mine = [life for life in lives if life.queue == times.queue]
        waits = [life.wait for life in mine]
        runs = [run for life in mine for run in (life.runs[:-1] if life.outcome == "open" else life.runs)]
        assert (times.task, times.begun, times.runs) == (mine[0].task, len(mine), len(runs))
        for found, values in ((times.wait, waits), (times.run, runs)):
            assert found is not None
            cuts = statistics.quantiles(values, n=100, method="inclusive")
            near = (max(values) - min(values)) / len(values) * 4
            assert (found.p50, found.p90, found.p99) == pytest.approx((cuts[49], cuts[89], cuts[98]), abs=near)
            assert found.max == pytest.approx(max(values), abs=1e-3)


def test_errors_that_differ_in_numbers_and_quotes_are_one_kind(whole: Report, lives: list[Life]) -> None:
    for queue in QUEUES:
        (kind,) = [one for one in whole.failures if one.queue == queue]
        mine = [life for life in lives if life.queue == queue]
        assert kind.failed == sum(life.outcome == "failed" for life in mine)
        assert kind.retried == sum(len(life.runs) - 1 for life in mine)
        assert kind.example.startswith("TimeoutError: m0")
        assert "m0" not in kind.error


def test_the_depth_at_each_step_is_what_was_open_then(whole: Report, lives: list[Life]) -> None:
    assert len(whole.moments) <= 121
    for depth in whole.depths:
        mine = [life for life in lives if life.queue == depth.queue]
        for moment, count in zip(whole.moments, depth.counts, strict=True):
            end = moment.at + whole.step_s
            opened = sum(life.enqueued_at < end for life in mine)
            ended = sum(life.outcome != "open" and life.ended_at < end for life in mine)
            assert count == opened - ended, (depth.queue, moment.at)
    assert sum(moment.done for moment in whole.moments) == sum(life.outcome == "done" for life in lives)


def test_a_period_of_a_report_counts_what_was_there_before_it_and_nothing_after_it(
    spark: SparkSession, archive: str, lives: list[Life]
) -> None:
    since, until = START + 300, START + 600
    found = report(spark, archive, queues=["thumbs"], since=since, until=until)
    mine = [life for life in lives if life.queue == "thumbs"]
    ended = [life for life in mine if life.outcome != "open"]
    (totals,) = found.queues
    assert totals.enqueued == sum(since <= life.enqueued_at < until for life in mine)
    assert totals.done == sum(since <= life.ended_at < until for life in ended if life.outcome == "done")
    assert totals.open == sum(life.enqueued_at < until for life in mine) - sum(life.ended_at < until for life in ended)
    assert found.depths[0].counts[-1] == totals.open
    with pytest.raises(UsageError, match="--since must be before --until"):
        report(spark, archive, since=until, until=since)


def test_messages_without_a_history_still_make_a_report(spark: SparkSession, tmp_path: Path) -> None:
    done = {"queue": "old", "state": "done", "enqueued_at": START, "finished_at": START + 5, "tries": 0, "priority": 0}
    failed = {**done, "id": "b", "state": "fail", "error": "ValueError: no", "finished_at": START + 9}
    found = report(spark, write_archive(spark, tmp_path, messages=[{**done, "id": "a"}, failed]))
    (totals,) = found.queues
    assert (totals.enqueued, totals.done, totals.failed, totals.open, totals.runs) == (2, 1, 1, 0, 0)
    assert [(one.error, one.failed) for one in found.failures] == [("ValueError: no", 1)]


def test_an_archive_of_nothing_makes_a_report_of_nothing(spark: SparkSession, tmp_path: Path) -> None:
    found = report(spark, str(tmp_path))
    assert (found.queues, found.tasks, found.failures, found.moments) == ([], [], [], [])
