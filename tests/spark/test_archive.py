from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.errors import QueueNotFound, UsageError
from qworker.history.event import Event
from qworker.message import Query, Selection, SettleAction, State
from qworker.pipeline.jobs import write_ahead
from qworker.pipeline.jobs.archive import ArchiveResult, archive, read_archive
from qworker.pipeline.spark.storage import HadoopStorage, LocalStorage
from tests.spark.stores import QUEUE, ask, bodies, count, file_url, finish, publish, work_off
from tests.support.servers import RedisServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A JVM that starts beside other tests takes its time.
pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(180)]


def archived(spark: SparkSession, target: Path) -> list[tuple[str, bytes]]:
    return sorted((row.state, bytes(row.body)) for row in read_archive(spark, str(target)).collect())


def run(spark: SparkSession, url: str, target: Path, **options: Any) -> ArchiveResult:
    return archive(spark, url, str(target), history=options.pop("history", False), **options)


def files(target: Path) -> list[Path]:
    return sorted((target / "messages").rglob("*.parquet"))


def test_runs_add_what_is_new_and_delete_only_what_the_tables_have(spark: SparkSession, tmp_path: Path) -> None:
    url, target = file_url(tmp_path / "store"), tmp_path / "target"
    publish(url, [b"%d" % number for number in range(30)])
    finish(url, 20, SettleAction.ACK)
    finish(url, 5, SettleAction.FAIL_PERM, error="no")

    first = run(spark, url, target)
    assert (first.messages, first.removed, first.files) == (25, 0, 1)
    assert count(url, State.DONE) == 20

    finish(url, 2, SettleAction.FAIL_PERM, error="no")
    second = run(spark, url, target, delete=True)
    assert (second.messages, second.removed) == (2, 27)
    assert (second.files, second.replaced) == (1, 1)
    assert len(files(target)) == 1

    rows = archived(spark, target)
    assert rows == sorted([("done", b"%d" % n) for n in range(20)] + [("fail", b"%d" % n) for n in range(20, 27)])
    assert bodies(url, State.READY) == [b"27", b"28", b"29"]
    assert (count(url, State.DONE), count(url, State.FAILED)) == (0, 0)
    assert run(spark, url, target, delete=True).messages == 0


def test_a_redis_and_a_log_are_archived_too(spark: SparkSession, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with RedisServer() as server:
        url = f"{server.url}?keep_done=all"
        publish(url, [b"%d" % number for number in range(6)])
        finish(url, 3, SettleAction.ACK)
        finish(url, 2, SettleAction.FAIL_PERM, error="no")
        first = run(spark, url, target, delete=True)
        assert (first.messages, first.removed) == (5, 5)
        assert (count(url, State.DONE), count(url, State.FAILED), count(url, State.READY)) == (0, 0, 1)
    url = f"sq://{tmp_path}/store?sync=off"
    publish(url, [b"6", b"7"])
    finish(url, 1, SettleAction.FAIL_PERM, error="no")
    second = run(spark, url, target, delete=True)
    assert (second.messages, second.removed, count(url, State.FAILED)) == (1, 1, 0)
    rows = [("done", b"0"), ("done", b"1"), ("done", b"2"), ("fail", b"3"), ("fail", b"4"), ("fail", b"6")]
    assert archived(spark, target) == rows


def test_a_message_that_fails_again_is_another_row_and_what_is_live_is_never_deleted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, target = file_url(tmp_path / "store"), tmp_path / "target"
    publish(url, [b"a", b"b", b"c"])
    finish(url, 3, SettleAction.FAIL_PERM, error="first")
    apply = write_ahead.apply

    def requeued_meanwhile(folder: LocalStorage, intent: write_ahead.PendingChange) -> None:
        apply(folder, intent)
        # Between the archiving and the deletion somebody mends two of them, and one fails anew.
        ids = [
            stored.message.id for stored in ask(url, lambda backend: list_messages(backend, QUEUE, Query(State.FAILED)))
        ]
        ask(url, lambda backend: backend.requeue(QUEUE, Selection(ids=ids[:2])))
        finish(url, 1, SettleAction.FAIL_PERM, error="second")

    monkeypatch.setattr("qworker.pipeline.jobs.archive.apply", requeued_meanwhile)
    assert run(spark, url, target, delete=True).removed == 1
    assert (count(url, State.READY), count(url, State.FAILED)) == (1, 1)
    monkeypatch.undo()

    run(spark, url, target, delete=True)
    errors = sorted((row.id, row.error) for row in read_archive(spark, str(target)).collect())
    assert [error for _, error in errors].count("first") == 3
    assert [error for _, error in errors].count("second") == 1
    assert len({message_id for message_id, _ in errors}) == 3


def test_a_run_with_nothing_new_reads_no_message_and_one_with_a_new_message_only_that(
    spark: SparkSession, tmp_path: Path
) -> None:
    url, target = file_url(tmp_path / "store"), tmp_path / "target"
    publish(url, [b"%d" % number for number in range(40)])
    finish(url, 20, SettleAction.ACK)
    finish(url, 10, SettleAction.FAIL_PERM, error="no")
    assert run(spark, url, target).messages == 30
    done = tmp_path / "store" / QUEUE / "done"
    # What is archived is not opened again: the bodies change, and the times and the tables do not.
    for path in [*done.iterdir(), *(tmp_path / "store" / QUEUE / "fail").iterdir()]:
        status = path.stat()
        path.write_bytes(b"changed")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    finish(url, 1, SettleAction.ACK)
    second = run(spark, url, target)
    assert second.messages == 1
    assert sorted(body for _, body in archived(spark, target)) == sorted(b"%d" % number for number in range(31))
    # Its lists are old enough now to be compared, and the next run does not even list them.
    for directory in (done, done.parent / "fail"):
        os.utime(directory, (1, 1))
    assert run(spark, url, target).messages == 0
    os.rename(next(done.iterdir()), tmp_path / "aside")
    os.utime(done, (1, 1))
    staged = Staged()
    assert run(spark, url, target, say=staged).messages == 0
    assert "writing messages" not in staged.steps
    # A change of the directory is noticed.
    os.rename(tmp_path / "aside", done / (tmp_path / "aside").name)
    assert run(spark, url, target).messages == 1
    # What is kept can still be removed.
    assert run(spark, url, target, delete=True).removed == 31
    assert (count(url, State.DONE), count(url, State.FAILED)) == (0, 0)


class Staged:
    """The steps that a run has reported."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def __call__(self, step: str) -> None:
        self.steps.append(step)


def test_a_message_that_finished_after_it_was_listed_is_not_removed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, target = file_url(tmp_path / "store"), tmp_path / "target"
    publish(url, [b"a", b"b", b"c"])
    finish(url, 1, SettleAction.ACK)
    apply = write_ahead.apply

    def finished_meanwhile(folder: LocalStorage, intent: write_ahead.PendingChange) -> None:
        apply(folder, intent)
        finish(url, 1, SettleAction.ACK)

    monkeypatch.setattr("qworker.pipeline.jobs.archive.apply", finished_meanwhile)
    # The first run lists what it removes after the tables are durable, and the second one before.
    assert run(spark, url, target, delete=True).removed == 1
    assert run(spark, url, target, delete=True).removed == 1
    assert count(url, State.DONE) == 1
    assert len(archived(spark, target)) == 2


class Crash(BaseException):
    """As if the process had died."""


# Every change that a run makes to the target, and the deletion.
STEPS = ("sync", "write", "move", "remove", "discard")


def test_a_crash_at_any_step_loses_nothing_and_doubles_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, target = file_url(tmp_path / "store"), tmp_path / "target"
    expected: list[tuple[str, bytes]] = []
    crashes = 0
    steps = 0
    crash_at = 1
    while True:
        body = b"round %d" % crash_at
        publish(url, [body])
        finish(url, 1, SettleAction.ACK)
        expected.append(("done", body))
        steps = 0

        def step(original: object, limit: int = crash_at) -> object:
            def stepped(*arguments: object, **named: object) -> object:
                nonlocal steps
                steps += 1
                if steps == limit:
                    raise Crash
                return original(*arguments, **named)  # type: ignore[operator]

            return stepped

        with monkeypatch.context() as patch:
            for name in STEPS[:-1]:
                patch.setattr(LocalStorage, name, step(getattr(LocalStorage, name)))
            patch.setattr("qworker.pipeline.jobs.delete_archived.discard_rows", step(_discard_rows()))
            try:
                run(spark, url, target, delete=True)
            except Crash:
                crashes += 1
            else:
                break
        crash_at += 1
    assert crashes >= 7
    assert archived(spark, target) == sorted(expected)
    assert count(url, State.DONE) == 0
    assert len(files(target)) == 1


def _discard_rows() -> object:
    from qworker.pipeline.jobs.delete_archived import discard_rows

    return discard_rows


def test_the_history_is_archived_once_and_then_forgotten(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, target = file_url(tmp_path / "store", keep_done="none", history="1"), tmp_path / "target"
    work_off(url, 3)
    assert run(spark, url, target, history=True).events == 9

    work_off(url, 2)
    with monkeypatch.context() as patch:
        # The run dies after its files are in place, and before it has written down how far it has read.
        patch.setattr("qworker.pipeline.jobs.write_ahead.positions", _crash)
        with pytest.raises(Crash):
            run(spark, url, target, history=True)
    last = run(spark, url, target, history=True, delete=True)
    assert (last.events, last.recovered) == (0, True)

    rows = read_archive(spark, str(target), "events").collect()
    assert sorted(row.event for row in rows) == ["acked"] * 5 + ["enqueued"] * 5 + ["leased"] * 5
    assert len({(row.id, row.event) for row in rows}) == 15
    assert ask(url, _history) == []


def _crash(*_: object) -> None:
    raise Crash


async def _history(backend: Backend) -> list[Event]:
    found: list[Event] = []
    for part in await backend.history.logs():
        found += (await backend.history.read(part, None, 1000))[0]
    return found


def test_a_second_run_at_the_same_time_is_refused_in_one_line(spark: SparkSession, tmp_path: Path) -> None:
    url, target = file_url(tmp_path / "store"), tmp_path / "target"
    publish(url, [b"x"])
    with LocalStorage(str(target)).locked(), pytest.raises(UsageError, match="another run is using"):
        run(spark, url, target)


def test_a_mistake_is_told_in_one_line(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exist only in the process") as caught:
        archive(spark, "memory:", str(tmp_path / "target"))
    assert "\n" not in str(caught.value)
    with pytest.raises(QueueNotFound, match="queue 'absent' does not exist"):
        archive(spark, file_url(tmp_path / "store"), str(tmp_path / "target"), queues=["absent"])
    with pytest.raises(UsageError, match="only finished messages are archived"):
        archive(spark, file_url(tmp_path / "store"), str(tmp_path / "target"), states=["ready"])


def test_a_folder_of_hadoop_keeps_the_same_contract(spark: SparkSession, tmp_path: Path) -> None:
    for folder in (LocalStorage(str(tmp_path / "local")), HadoopStorage(spark, f"file://{tmp_path}/hadoop")):
        assert folder.read("a/b") is None
        assert folder.names("a") == []
        for content in (b"one", b"two"):
            folder.write("a/b", content)
            assert folder.read("a/b") == content
        assert folder.size("a/b") == 3
        for _ in range(2):
            folder.move("a/b", "c/d/e")
        folder.sync(["c/d/e"])
        assert (folder.names("a"), folder.names("c/d")) == ([], ["e"])
        for _ in range(2):
            folder.remove("c")
        assert folder.names("c") == []
    assert os.listdir(tmp_path / "hadoop") == ["a"]
