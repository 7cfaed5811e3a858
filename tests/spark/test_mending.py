"""`replay`, `dedupe` and `reconcile` on real queues: their choice, their effect, and the effect of a second run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.errors import UsageError
from qworker.message import Draft, Query, SettleAction, Settlement, State, StoredMessage
from qworker.pipeline.jobs import bulk_calls
from qworker.pipeline.jobs.dedupe import dedupe
from qworker.pipeline.jobs.match_keys import KeyMatch, parse_match
from qworker.pipeline.jobs.reconcile import reconcile
from qworker.pipeline.jobs.replay import replay
from qworker.pipeline.jobs.replay_plan import ReplayPlans
from tests.spark.stores import QUEUE, ask, file_url
from tests.spark.tables import write_archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]

START = 1_763_971_200.0


class Crash(BaseException):
    """The end of a process, as far as what runs in it can tell."""


def call(path: str, **more: Any) -> bytes:
    return json.dumps({"task": "index", "args": [], "kwargs": {"path": path, **more}}).encode()


def put(url: str, **drafts: bytes) -> None:
    """Messages by their ids."""
    ask(url, lambda backend: backend.publish(QUEUE, [Draft(body=body, id=name) for name, body in drafts.items()]))


def end(url: str, ids: set[str], how: SettleAction, error: str | None = None) -> None:
    """Lease everything, end some, and give the others back."""

    async def work(backend: Backend) -> None:
        leases = await backend.lease(QUEUE, 1000, 60.0)
        await backend.settle(
            [
                Settlement(lease=lease, action=how, error=error)
                if lease.message.id in ids
                else Settlement(lease=lease, action=SettleAction.RELEASE)
                for lease in leases
            ]
        )

    ask(url, work)


def stored(url: str, state: State) -> list[StoredMessage]:
    return ask(url, lambda backend: list_messages(backend, QUEUE, Query(state)))


def ids(url: str, state: State) -> set[str]:
    return {one.message.id for one in stored(url, state)}


def archived(name: str, state: str = "fail", error: str | None = "TimeoutError: 3 s", **more: Any) -> dict[str, Any]:
    body = call(f"/{name}")
    row = {"id": name, "queue": QUEUE, "state": state, "task": "index", "body": body, "tries": 5, "priority": 0}
    row |= {"args": "[]", "kwargs": json.dumps({"path": f"/{name}"})}
    return {**row, "enqueued_at": START, "finished_at": START + 9, "error": error, **more}


def event(name: str, kind: str, at: float) -> dict[str, Any]:
    return {"event": kind, "at": at, "queue": QUEUE, "id": name, "tries": 0, "worker": "w", "enqueued_at": START}


def test_a_predicate_chooses_which_failed_messages_are_requeued(spark: SparkSession, tmp_path: Path) -> None:
    url = file_url(tmp_path / "spool")
    put(url, a=call("/a"), b=call("/b"), c=call("/c", wide=True), d=call("/d"))
    end(url, {"a", "c"}, SettleAction.FAIL_PERM, "TimeoutError: 3 s\nTraceback ...")
    end(url, {"b"}, SettleAction.FAIL_PERM, "ValueError: no")
    where = "error like 'Timeout%' and get_json_object(kwargs, '$.wide') is null"

    planned = replay(spark, url, QUEUE, where, dry_run=True)
    assert (planned.matched, planned.requeued, ids(url, State.FAILED)) == (1, 1, {"a", "b", "c"})
    assert [(one.act, one.task, one.error, one.messages) for one in planned.chosen] == [
        ("requeue", "index", "TimeoutError: 3 s", 1)
    ]

    assert replay(spark, url, QUEUE, where).requeued == 1
    assert (ids(url, State.FAILED), ids(url, State.READY)) == ({"b", "c"}, {"a", "d"})
    assert replay(spark, url, QUEUE, where).matched == 0
    with pytest.raises(UsageError, match=r"is not valid: .*nothing"):
        replay(spark, url, QUEUE, "nothing = 1")


def test_a_replay_from_an_archive_that_dies_at_every_step_runs_each_message_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path / 'spool'}?sync=off"
    put(url, here=call("/here"), waits=call("/waits"))
    end(url, {"here"}, SettleAction.FAIL_PERM, "TimeoutError: 3 s")
    rows = [archived(name) for name in ("here", "waits", "gone", "lost", "mended", "other")]
    rows[-1]["error"] = "ValueError: no"
    events = [event("mended", "failed", START + 9), event("mended", "acked", START + 20)]
    archive = write_archive(spark, tmp_path / "archive", messages=rows, events=events)

    def again(**options: Any) -> Any:
        return replay(spark, url, QUEUE, "error like 'Timeout%'", archive=archive, **options)

    planned = again(dry_run=True)
    assert (planned.matched, planned.requeued, planned.enqueued, planned.skipped) == (5, 1, 2, 2)
    assert {one.act for one in planned.chosen} == {"requeue", "enqueue", "skip: pending", "skip: done since"}
    assert not (tmp_path / "archive" / "replays").exists()

    # After the plan, after what is requeued, and after what is enqueued.
    for place, name, after in (
        (bulk_calls, "requeue_ids", False),
        (bulk_calls, "requeue_ids", True),
        (ReplayPlans, "finish", False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, _dying(getattr(place, name), after=after))
            with pytest.raises(Crash):
                again()

    done = again()
    assert (done.requeued, done.enqueued) == (1, 2)
    assert ids(url, State.FAILED) == set()
    assert sorted(one.message.body for one in stored(url, State.READY)) == sorted(
        call(path) for path in ("/here", "/waits", "/gone", "/lost")
    )

    # Nothing keeps what is done, and still nobody replays it twice under this name.
    end(url, ids(url, State.READY), SettleAction.ACK)
    over = again()
    assert (over.matched, over.requeued, over.enqueued) == (5, 0, 0)
    assert ids(url, State.READY) == set()


def _dying(real: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    def die(*arguments: Any) -> None:
        if after:
            real(*arguments)
        raise Crash

    return die


def test_of_messages_for_the_same_work_the_oldest_stays(spark: SparkSession, tmp_path: Path) -> None:
    url = file_url(tmp_path / "spool")
    put(url, a1=call("/a"), a2=call("/a"), a3=call("/a", wide=True), b1=call("/b"), c1=call("/c"), c2=call("/c"))
    ask(url, lambda backend: backend.publish(QUEUE, [Draft(body=call("/b"), id="b2", delay=3600)]))
    # What is worked on stays, and so does what failed; done is done only when asked.
    end(url, {"c1"}, SettleAction.ACK)
    ask(url, lambda backend: backend.lease(QUEUE, 1, 600.0))

    found = dedupe(spark, url, QUEUE)
    assert (found.keys, found.surplus, found.removed) == (2, 2, 0)
    on = [KeyMatch("", "kwargs.path")]
    assert dedupe(spark, url, QUEUE, on=on).surplus == 3
    assert dedupe(spark, url, QUEUE, on=on, include_done=True).surplus == 4

    removed = dedupe(spark, url, QUEUE, on=on, include_done=True, delete=True)
    assert (removed.removed, {group.kept for group in removed.groups}) == (4, {"a1", "b1", None})
    assert (ids(url, State.LEASED), ids(url, State.READY), ids(url, State.DELAYED)) == ({"a1"}, {"b1"}, set())
    assert dedupe(spark, url, QUEUE, on=on, include_done=True, delete=True).surplus == 0


def test_a_table_and_a_queue_are_compared_key_by_key(spark: SparkSession, tmp_path: Path) -> None:
    url = file_url(tmp_path / "spool")
    put(
        url,
        done=call("/done"),
        waits=call("/waits"),
        bad=call("/bad"),
        x1=call("/twice"),
        x2=call("/twice"),
        u=call("/?"),
    )
    end(url, {"done"}, SettleAction.ACK)
    end(url, {"bad"}, SettleAction.FAIL_PERM, "no")
    # Long done, kept by the archive alone; and one that was being worked on when it was last heard of, and is nowhere.
    archive = write_archive(
        spark,
        tmp_path / "archive",
        messages=[archived("old", "done", None)],
        events=[event("old", "acked", START + 9), event("vanished", "leased", START + 5)],
    )
    paths = ["/done", "/waits", "/bad", "/twice", "/old", "/never", "/waits", None]
    source = spark.createDataFrame([(path,) for path in paths], "path string")

    verdicts = str(tmp_path / "verdicts")
    result = reconcile(spark, source, QUEUE, on=[parse_match("path")], url=url, archive=archive, output=verdicts)
    assert (result.keys, result.done, result.open, result.failed, result.lost) == (6, 2, 2, 1, 0)
    assert (result.never_enqueued, result.enqueued_twice, result.unknown) == (1, 1, 1)
    assert (result.rows_without_key, result.rows_twice) == (1, 1)
    assert (result.messages_without_key, result.lost_without_key, result.agrees) == (1, 1, False)
    assert {(row.key, row.verdict, tuple(row.ids)) for row in result.shown} == {
        ("/never", "never enqueued", ()),
        ("/twice", "open", ("x1", "x2")),
    }
    assert {row["key"]: row["verdict"] for row in spark.read.parquet(verdicts).collect()}["/?"] == "unknown"

    names = spark.createDataFrame([(name,) for name in ("done", "old", "vanished")], "name string")
    by_id = reconcile(spark, names, QUEUE, on=[parse_match("name=id")], url=url, archive=archive)
    assert (by_id.done, by_id.lost, by_id.never_enqueued, by_id.agrees) == (2, 1, 0, False)
    # Without the queue nobody can say that it is nowhere.
    alone = reconcile(spark, names, QUEUE, on=[parse_match("name=id")], archive=archive)
    assert (alone.done, alone.open, alone.lost, alone.never_enqueued) == (1, 1, 0, 1)


@pytest.mark.parametrize(
    ("words", "match"),
    [("path", ("path", "kwargs.path")), ("sku = args[0]", ("sku", "args[0]")), ("lower(a)=key", ("lower(a)", "key"))],
)
def test_what_makes_two_the_same_is_told_in_few_words(words: str, match: tuple[str, str]) -> None:
    assert tuple(parse_match(words)) == match


@pytest.mark.parametrize("words", ["", "=key", "path="])
def test_half_a_pair_is_refused(words: str) -> None:
    with pytest.raises(UsageError, match="COLUMN=WHERE"):
        parse_match(words)
