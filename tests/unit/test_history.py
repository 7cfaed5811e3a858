"""The history: what workers tell survives them, costs no message anything, and is not kept for ever."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import structlog

from qworker import Context, Draft, Fail, Message, Tasks
from qworker.backend.registry import open_backend
from qworker.cli.main import main
from qworker.errors import InvalidURL, UsageError
from qworker.history import Event
from qworker.history.batch import EventBatch, decode_batch, encode_batch
from qworker.history.directory import DirectoryHistory
from qworker.history.memory import MemoryHistory
from qworker.history.query import EventFilter, follow, read_newest
from qworker.history.retention import prune
from qworker.history.store import HistoryOptions
from qworker.kit.segments.log import Log
from qworker.message import Selection
from qworker.testing import FakeClock
from qworker.testing.wait_until import wait_until
from qworker.tools.explain import explain
from qworker.url import BackendURL
from qworker.worker import Worker, WorkerOptions
from qworker_memory import MemoryBackend

QUEUE = "jobs"


def batch(number: int, *, size: int = 1, text: str = "") -> EventBatch:
    names = [f"m{number}-{row}" for row in range(size)]
    return EventBatch(kind="acked", queue=QUEUE, worker="w", at=float(number), id=names, error=text or None)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def history(tmp_path: Path, clock: FakeClock) -> AsyncIterator[DirectoryHistory]:
    opened = DirectoryHistory(str(tmp_path), HistoryOptions(), clock=clock)
    yield opened
    await opened.aclose()


async def read(history: DirectoryHistory | MemoryHistory, limit: int = 100_000) -> list[Event]:
    found: list[Event] = []
    for part in await history.logs():
        after: str | None = None
        while True:
            page, after = await history.read(part, after, limit)
            if not page:
                break
            found += page
    return found


async def test_the_end_of_a_log_is_found_without_reading_it(
    history: DirectoryHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(60):
        # More than one segment.
        history.append([batch(number, size=1, text="x" * 200_000)])
    (log,) = await history.logs()
    _, end = await history.read(log, None, 100)
    monkeypatch.setattr(Log, "read", None)
    assert await history.last_position(log) == end
    assert await history.last_position("nothing-here") is None


# -- batches -----------------------------------------------------------------------------------------------------------


def test_a_batch_tells_each_message_from_its_publish_to_its_end() -> None:
    told = EventBatch(
        kind="retried",
        queue=QUEUE,
        worker="w",
        at=[12.0, 13.0],
        id=["a", "b"],
        task="work",
        tries=[0, 2],
        token=[7, 8],
        enqueued_at=[10.0, 1.0],
        duration_us=[1_500_000, None],
        error=["late", None],
        begins=True,
        leased_at=11.0,
    )
    events = told.events()
    assert [(e.id, e.kind, e.at, e.token, e.duration_s, e.error) for e in events] == [
        ("a", "enqueued", 10.0, None, None, None),
        ("a", "leased", 11.0, 7, None, None),
        ("a", "retried", 12.0, 7, 1.5, "late"),
        ("b", "leased", 11.0, 8, None, None),
        ("b", "retried", 13.0, 8, None, None),
    ]
    assert {(e.task, e.worker, e.queue) for e in events} == {("work", "w", QUEUE)}
    assert decode_batch(encode_batch(told)) == told


def test_what_a_newer_release_adds_is_passed_over_and_what_is_no_record_is_nothing() -> None:
    newer = json.loads(encode_batch(batch(1))) | {"colour": "red"}
    assert decode_batch(json.dumps(newer).encode()) == batch(1)
    for other in (b"", b"\xff\xfe", b"[]", b'{"event": "teleported"}', b'{"event": "acked", "id": 3}'):
        assert decode_batch(other) is None


# -- what workers tell -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_renewals")
async def test_a_long_run_is_told_when_it_begins_and_each_time_its_lease_is_renewed(app) -> None:
    go = asyncio.Event()

    @app.task
    async def work() -> None:
        await go.wait()

    job = await work.enqueue()

    async def told() -> list[str]:
        return [event.kind for event in await app.store.history.for_message("default", job.id)]

    async def is_renewed() -> bool:
        return (await told())[:3] == ["enqueued", "leased", "extended"]

    async with app.working(visibility_timeout=60) as (worker, _):
        await wait_until(is_renewed)
        go.set()
        await wait_until(lambda: worker.counts.acked == 1)

        async def is_over() -> bool:
            return (await told())[-1:] == ["acked"]

        await wait_until(is_over)
    assert [event for event in await told() if event != "extended"] == ["enqueued", "leased", "acked"]


async def test_what_is_cancelled_at_the_end_is_told_as_released_and_a_lost_lease_as_lost(app) -> None:
    begun = asyncio.Event()

    @app.task
    async def forever() -> None:
        begun.set()
        await asyncio.Event().wait()

    @app.task(queue="other")
    async def removed(context: Context) -> None:
        await app.store.remove("other", Selection(ids=[context.message.id]))

    job, lost = await forever.enqueue(), await removed.enqueue()
    async with app.working() as (worker, _):
        await begun.wait()
        await wait_until(lambda: worker.counts.lost == 1)
    ends = {event.id: event for event in await read(app.store.history)}
    assert (ends[job.id].kind, ends[job.id].error) == ("released", None)
    assert (ends[lost.id].kind, ends[lost.id].error) == ("lost", "the store refused the outcome")


async def test_the_tasks_of_strangers_and_raw_messages_are_told_bounded(app) -> None:
    @app.task
    async def known() -> None:
        raise Fail("b" * 1000 + "\na" * 10_000)

    # What is released is not due again.
    app.store._clock = FakeClock()
    unknown = json.dumps({"task": "t" * 5000, "args": [], "kwargs": {}, "headers": {}}).encode()
    ids = await app.store.publish("default", [known.call().draft, Draft(body=unknown), Draft(body=b"raw")])
    async with app.working() as (worker, _):
        await wait_until(lambda: worker.counts.failed == 1 and worker.counts.released == 2)
    ends = {event.id: event for event in await read(app.store.history)}
    assert [ends[name].kind for name in ids] == ["failed", "released", "released"]
    assert [ends[name].task for name in ids] == ["known", "t" * 200, None]
    assert ends[ids[0]].error == "b" * 300


async def test_a_history_that_breaks_stops_no_worker(app) -> None:
    class Broken(MemoryHistory):
        def append(self, batches: object) -> None:
            raise RuntimeError("no")

    @app.task
    async def work() -> None: ...

    app.store.history = Broken()
    await app.enqueue_many(work.call() for _ in range(1000))
    with structlog.testing.capture_logs() as logs:
        worker = await app.burst()
    assert worker.counts.acked == 1000
    assert [line["event"] for line in logs].count("observer_failed") == 1


async def test_without_a_history_nothing_is_written(tmp_path: Path) -> None:
    tasks = Tasks(f"file://{tmp_path}/spool?history=0")

    @tasks.task
    async def work() -> None: ...

    await work.enqueue()
    await Worker(tasks, WorkerOptions(burst=True)).run()
    backend = await tasks.backend()
    assert not (tmp_path / "spool" / ".history").exists()
    assert await backend.history.logs() == []
    assert "history" in (await backend.stats("default")).retention
    await tasks.aclose()


async def test_explain_knows_what_became_of_a_message_that_is_gone(app) -> None:
    @app.task
    async def work(fails: bool) -> None:
        if fails:
            raise Fail("no such user")

    done, failed, purged = await app.enqueue_many(work.call(fails) for fails in (False, True, True))
    await app.burst()
    store = MemoryBackend(app.url.removeprefix("memory://"))
    await store.remove("default", Selection(ids=[done.id, failed.id]))
    found = await explain(store, "default", done.id)
    assert (found.state, [reason.code for reason in found.reasons]) == (None, ["done"])
    assert [event.kind for event in found.history] == ["enqueued", "leased", "acked"]
    found = await explain(store, "default", failed.id)
    assert (found.reasons[0].code, "no such user" in found.reasons[0].text) == ("failed", True)
    assert [event.kind for event in (await explain(store, "default", purged.id)).history][-1] == "failed"
    assert (await explain(store, "default", "never-here")).reasons[0].code == "not-found"


# -- logs in a directory -----------------------------------------------------------------------------------------------

WORKER = """
import asyncio, sys, time
from qworker import Tasks
from qworker.worker import Worker, WorkerOptions
tasks = Tasks(sys.argv[1])

@tasks.task(queue="jobs")
async def forever() -> None:
    await asyncio.Event().wait()

asyncio.run(Worker(tasks, WorkerOptions()).run())
"""


async def test_a_worker_that_is_killed_leaves_what_it_was_at_and_its_log_is_removed_in_time(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/spool"
    tasks = Tasks(url)

    @tasks.task(queue=QUEUE)
    async def forever() -> None: ...

    job = await forever.enqueue()
    backend = await tasks.backend()
    process = subprocess.Popen([sys.executable, "-c", WORKER, url], stderr=subprocess.DEVNULL)
    try:

        async def told() -> list[Event]:
            return await backend.history.for_message(QUEUE, job.id)

        found = await wait_until(told)
        assert [event.kind for event in found] == ["enqueued", "leased"]
        root = os.open(tmp_path / "spool" / ".history", os.O_RDONLY)
        later = found[0].at + 1e6
        # As long as it lives the log that it writes stays, however old.
        assert await prune(root, 3600.0, 1 << 30, later) == 0
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert await told() == found
        assert await prune(root, 3600.0, 1 << 30, found[0].at) == 0
        assert await prune(root, 3600.0, 1 << 30, later) == 1
        assert os.listdir(root) == []
        os.close(root)
    finally:
        process.kill()
        process.wait()
        await tasks.aclose()


async def test_a_log_is_a_topic_that_any_sq_channel_follows(history: DirectoryHistory, tmp_path: Path) -> None:
    history.append([batch(1)])
    (part,) = await history.logs()
    topics = open_backend(f"sq://{tmp_path}/.history?channel=spark")
    assert await topics.queues() == [part]
    # A new channel gets what comes after it.
    assert await topics.lease(part, 10, 30.0) == []
    await topics.create(part)
    for number in (2, 3):
        history.append([batch(number)])
    leases = await topics.lease(part, 10, 30.0)
    assert [decode_batch(lease.message.body) for lease in leases] == [batch(2), batch(3)]
    await topics.aclose()
    assert [event.at for event in await read(history)] == [1.0, 2.0, 3.0]


async def test_while_another_program_has_the_topics_lock_events_wait(history: DirectoryHistory, tmp_path: Path) -> None:
    history.append([batch(1)])
    (part,) = await history.logs()
    with open(tmp_path / ".history" / part / ".qworker" / "lock", "rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        history.append([batch(2)])
        assert [event.at for event in await read(history)] == [1.0]
    history.append([batch(3)])
    assert [event.at for event in await read(history)] == [1.0, 2.0, 3.0]


async def test_segments_follow_one_another_and_are_read_in_pages_across_them(history: DirectoryHistory) -> None:
    for number in range(120):
        history.append([batch(number, size=100, text="x" * 90_000)])
    (part,) = await history.logs()
    found = await read(history)
    assert [event.at for event in found] == [float(number) for number in range(120) for _ in range(100)]
    assert await read(history, limit=777) == found
    assert len(list(Path(history._path, part).glob("*.q"))) == 3


async def test_what_is_forgotten_is_removed_by_segments(tmp_path: Path, clock: FakeClock) -> None:
    history = DirectoryHistory(str(tmp_path), HistoryOptions(), clock=clock)
    for number in range(60):
        clock.advance(1)
        history.append([batch(number, size=1, text="x" * 200_000)])
    (part,) = await history.logs()
    folder = tmp_path / ".history" / part
    before = sorted(folder.glob("*.q"))
    assert len(before) == 3
    _, half = await history.read(part, None, 30)
    assert half is not None
    await history.delete_before(part, half)
    assert sorted(folder.glob("*.q")) == before[1:]
    assert (await history.read(part, half, 100))[0][0].at == 30.0
    _, end = await history.read(part, half, 100)
    assert end is not None
    # All of it was read, but its process lives.
    await history.delete_before(part, end)
    assert sorted(folder.glob("*.q")) == before[2:]
    await history.aclose()
    await history.delete_before(part, end)
    assert await history.logs() == []
    assert await history.read(part, half, 10) == ([], half)


async def test_old_segments_and_the_oldest_beyond_the_size_are_removed_in_the_background(
    tmp_path: Path, clock: FakeClock
) -> None:
    history = DirectoryHistory(str(tmp_path), HistoryOptions(size=9 << 20), clock=clock)
    for number in range(60):
        clock.advance(0.1)
        history.append([batch(number, size=1, text="x" * 200_000)])
    (part,) = await history.logs()
    folder = tmp_path / ".history" / part
    assert len(list(folder.glob("*.q"))) == 3
    clock.advance(61)
    history.append([batch(60)])
    await wait_until(lambda: len(list(folder.glob("*.q"))) == 2)
    assert [event.at for event in await read(history)][-1] == 60.0
    clock.advance(8 * 86400)
    history.append([batch(61)])
    await wait_until(lambda: len(list(folder.glob("*.q"))) == 1)
    await history.aclose()


async def test_damage_costs_the_damaged_records_and_no_others(history: DirectoryHistory, tmp_path: Path) -> None:
    for number in range(200):
        history.append([batch(number)])
    (part,) = await history.logs()
    await history.aclose()
    (segment,) = (tmp_path / ".history" / part).glob("*.q")
    intact = segment.read_bytes()
    draw = random.Random(7)
    for _ in range(60):
        place = draw.randrange(32, len(intact.rstrip(b"\0")))
        segment.write_bytes(intact[:place] + bytes([intact[place] ^ 1 << draw.randrange(8)]) + intact[place + 1 :])
        found = [event.at for event in await read(history)]
        assert len(found) >= 198
        assert set(found) <= {float(number) for number in range(200)}
        assert found == sorted(found)
    # A tail that the power took.
    segment.write_bytes(intact[:2000] + bytes(len(intact) - 2000))
    assert [event.at for event in await read(history)] == [float(number) for number in range(len(await read(history)))]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(mount)], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.mark.serial
async def test_a_full_disk_is_told_once_and_costs_no_message(small_disk: Path, clock: FakeClock) -> None:
    history = DirectoryHistory(str(small_disk), HistoryOptions(), clock=clock)
    with structlog.testing.capture_logs() as logs:
        for number in range(300):
            history.append([batch(number, text="x" * 1000)])
            clock.advance(1)
        kept = [event.at for event in await read(history)]
        assert 50 < len(kept) < 300
        assert kept == [float(number) for number in range(len(kept))]
        for old in await history.logs():
            await history.delete_before(old, "9" * 19 + "-0000000000-000000")
        clock.advance(31)
        history.append([batch(1000)])
    assert [line["event"] for line in logs] == ["history_paused", "history_resumed"]
    assert [event.at for event in await read(history)] == [1000.0]
    await history.aclose()


async def test_where_no_log_can_be_made_workers_work(tmp_path: Path) -> None:
    tasks = Tasks(f"file://{tmp_path}/spool")

    @tasks.task
    async def work() -> None: ...

    @tasks.raw_handler(queue="default")
    async def raw(message: Message) -> None: ...

    await tasks.enqueue_many(work.call() for _ in range(600))
    (tmp_path / "spool" / ".history").write_text("in the way")
    worker = Worker(tasks, WorkerOptions(burst=True))
    with structlog.testing.capture_logs() as logs:
        assert await worker.run()
    assert worker.counts.acked == 600
    assert [line["event"] for line in logs].count("history_paused") == 1
    await tasks.aclose()


# -- looking -----------------------------------------------------------------------------------------------------------


async def test_the_newest_events_of_all_parts_are_shown_in_order_and_followed(clock: FakeClock, tmp_path: Path) -> None:
    first, second = (open_backend(f"file://{tmp_path}/spool", clock=clock) for _ in range(2))
    await first.open()
    for number in range(10):
        (first if number % 2 else second).history.append([batch(number)])
    assert len(await first.history.logs()) == 2
    found, ends = await read_newest(first.history, EventFilter(queue=QUEUE), 4)
    assert [event.at for event in found] == [6.0, 7.0, 8.0, 9.0]
    following = follow(first.history, EventFilter(since=3.0), ends)
    assert await anext(following) == []
    third = open_backend(f"file://{tmp_path}/spool", clock=clock)
    for number, backend in ((12, first), (11, second), (13, third), (2, third)):
        backend.history.append([batch(number)])
    assert [event.at for event in await anext(following)] == [11.0, 12.0, 13.0]
    assert (await read_newest(first.history, EventFilter(id="m11-0"), 10))[0][0].at == 11.0
    assert (await read_newest(first.history, EventFilter(kinds=frozenset({"failed"})), 10))[0] == []
    for backend in (first, second, third):
        await backend.aclose()


async def test_memory_keeps_the_newest() -> None:
    history = MemoryHistory(most=100)
    for number in range(50):
        history.append([batch(number, size=10)])
    found = await read(history)
    assert len(found) == 100
    assert found[-1].at == 49.0


@pytest.mark.parametrize("text", ["0d", "7", "d", "7w", "-1d", "7d;1M", "1.5G"])
def test_a_retention_that_makes_no_sense_is_one_line(text: str) -> None:
    with pytest.raises(InvalidURL, match="is not valid: use an age such as 7d"):
        HistoryOptions.from_url(BackendURL.parse(f"file:///tmp/x?keep_history={text}"), default=True)


def test_a_retention_is_an_age_a_size_or_both() -> None:
    def words(text: str) -> str:
        url = BackendURL.parse(f"file:///tmp/x?{text}")
        return HistoryOptions.from_url(url, default=True).describe_retention()

    assert words("") == "kept for 7d, at most 512M"
    assert words("keep_history=36h") == "kept for 36h, at most 512M"
    assert words("keep_history=2048M,14d") == "kept for 14d, at most 2G"
    assert words("history=0") == "not kept"


async def test_a_position_that_is_none_is_a_mistake_in_one_line(history: DirectoryHistory) -> None:
    history.append([batch(1)])
    (part,) = await history.logs()
    with pytest.raises(UsageError, match="not a position"):
        await history.read(part, "yesterday", 10)
    with pytest.raises(UsageError):
        await history.read("../../etc", None, 10)


async def test_workers_that_come_and_go_leave_one_log_and_a_tail_that_one_has_left_is_taken_over(
    tmp_path: Path, clock: FakeClock
) -> None:
    for number in range(5):
        history = DirectoryHistory(str(tmp_path), HistoryOptions(), clock=clock)
        history.append([batch(number)])
        await history.aclose()
    (part,) = await history.logs()
    folder = tmp_path / ".history" / part
    # As after a death between the records and the write position, and after one in the middle of a record.
    (segment,) = folder.glob("*.q")
    state = (folder / "state").read_bytes()
    history.append([batch(5), batch(6)])
    await history.aclose()
    (folder / "state").write_bytes(state)
    assert [event.at for event in await read(history)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    written = segment.read_bytes()
    end = len(written.rstrip(b"\0"))
    segment.write_bytes(written[: end - 5] + bytes(len(written) - end + 5))
    history.append([batch(7)])
    assert [event.at for event in await read(history)] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0]
    # While that one is being written, another process has its own.
    other = DirectoryHistory(str(tmp_path), HistoryOptions(), clock=clock)
    other.append([batch(8)])
    assert len(await history.logs()) == 2
    await other.aclose()
    await history.aclose()


async def test_a_log_of_another_boot_is_left_alone(tmp_path: Path, clock: FakeClock) -> None:
    history = DirectoryHistory(str(tmp_path), HistoryOptions(), clock=clock)
    history.append([batch(1)])
    await history.aclose()
    (part,) = await history.logs()
    (tmp_path / ".history" / part / ".qworker" / "writer").write_text("another boot")
    history.append([batch(2)])
    assert len(await history.logs()) == 2
    await history.aclose()


async def test_a_worker_on_several_queues_tells_each_message_with_its_own_queue_and_task(app) -> None:
    @app.task(queue="one")
    async def first() -> None: ...

    @app.task(queue="two")
    async def second() -> None: ...

    @app.task(queue="two")
    async def third() -> None: ...

    given: dict[str, tuple[str, str]] = {}
    for number in range(300):
        task = (first, second, third)[number % 3]
        job = await task.enqueue()
        given[job.id] = (task.queue, task.name)
    await app.burst(concurrency=40)
    found = await read(app.store.history)
    assert len(found) == 900
    assert {event.id: (event.queue, event.task) for event in found} == given
    for name in given:
        assert [event.kind for event in found if event.id == name] == ["enqueued", "leased", "acked"]


def test_the_command_prints_the_newest_as_lines_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/spool"

    async def tell() -> None:
        backend = open_backend(url)
        await backend.open()
        for number in range(5):
            backend.history.append([batch(number, text="\x1b[31mred" if number == 4 else "")])
        await backend.aclose()

    asyncio.run(tell())
    assert main(["history", url, QUEUE, "-n", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2:5] for line in lines] == [["acked", QUEUE, "m3-0"], ["acked", QUEUE, "m4-0"]]
    assert "\x1b" not in lines[1]
    assert main(["history", url, "--id", "m1-0", "--json"]) == 0
    (event,) = json.loads(capsys.readouterr().out)
    assert (event["id"], event["at"], event["worker"]) == ("m1-0", 1.0, "w")
    assert main(["history", url, "--since", "1h", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["history", url, "--since", "yesterday"]) == 2
    assert "is not a valid duration" in capsys.readouterr().err


def test_renewals_are_shown_only_where_they_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/spool"

    def extended(number: int) -> EventBatch:
        return EventBatch(kind="extended", queue=QUEUE, worker="w", at=float(number), id=[f"m{number}"])

    async def tell() -> None:
        backend = open_backend(url)
        await backend.open()
        backend.history.append([batch(1), *(extended(number) for number in range(2, 100)), batch(100)])
        await backend.aclose()

    asyncio.run(tell())

    def shown(*arguments: str) -> list[str]:
        assert main(["history", url, *arguments, "--json"]) == 0
        return [event["event"] for event in json.loads(capsys.readouterr().out)]

    # Those that are not shown do not count for -n either.
    assert shown("-n", "2") == ["acked", "acked"]
    assert shown("--all", "-n", "3") == ["extended", "extended", "acked"]
    assert shown("--event", "extended") == ["extended"] * 50


def test_the_command_follows_what_happens(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/spool"
    # A machine's own queue is named by the environment of whoever runs the tests.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QWORKER_")}
    command = [sys.executable, "-m", "qworker", "history", url, "-f", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None

    async def tell(number: int) -> None:
        backend = open_backend(url)
        await backend.open()
        backend.history.append([batch(number)])
        await backend.aclose()

    try:
        for number in range(2):
            asyncio.run(tell(number))
            assert json.loads(process.stdout.readline())["at"] == float(number)
        process.send_signal(signal.SIGINT)
        process.wait(20)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("scheme", ["file", "vsqs", "sq", "mq", "fsq"])
async def test_what_others_record_is_read_by_who_records_nothing(tmp_path: Path, scheme: str) -> None:
    writer = open_backend(f"{scheme}://{tmp_path}/spool?history=1")
    await writer.create(QUEUE)
    writer.history.append([batch(1)])
    reader = open_backend(f"{scheme}://{tmp_path}/spool" + ("?history=0" if scheme == "file" else ""))
    assert not reader.history.enabled
    reader.history.append([batch(2)])
    assert [event.kind for event in await reader.history.for_message(QUEUE, "m1-0")] == ["acked"]
    assert await reader.history.for_message(QUEUE, "m2-0") == []
    assert await reader.queues() == [QUEUE]
    assert "history" in (await writer.stats(QUEUE)).retention
    await reader.aclose()
    await writer.aclose()


async def test_a_log_that_cannot_be_written_any_more_is_left_for_a_new_one(tmp_path: Path, clock: FakeClock) -> None:
    history = DirectoryHistory(str(tmp_path), HistoryOptions(), clock=clock)
    history.append([batch(1)])
    (part,) = await history.logs()
    (segment,) = (tmp_path / ".history" / part).glob("*.q")
    await history.aclose()
    # What a damaged file system may make of a file.
    segment.unlink()
    segment.mkdir()
    with structlog.testing.capture_logs() as logs:
        history.append([batch(2)])
        clock.advance(31)
        history.append([batch(3)])
    assert len(await history.logs()) == 2
    assert [line["event"] for line in logs] in ([], ["history_paused", "history_resumed"])
    (other,) = set(await history.logs()) - {part}
    assert (await history.read(other, None, 10))[0][-1].at == 3.0
    backend = open_backend(f"file://{tmp_path}", clock=clock)
    (message_id,) = await backend.publish(QUEUE, [Draft(body=b"")])
    found = await explain(backend, QUEUE, message_id, clock=clock)
    assert [reason.code for reason in found.reasons] == ["ready", "no-history"]
    await backend.aclose()
    await history.aclose()
