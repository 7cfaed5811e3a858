"""Schedules of an app: what is registered, put, synchronized and listed, and what the worker makes of it."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from qworker import Context, Schedule, Tasks, Unique
from qworker.cell import Cell, CellOp
from qworker.cli.main import main
from qworker.envelope import CallOptions, Envelope, open_envelope
from qworker.errors import BackendUnavailable, MissingExtra, NotSupported, UsageError
from qworker.message import ReapResult
from qworker.schedules.records import GROUP
from qworker.schedules.schedule import definition_of
from qworker.schedules.store import ScheduleStatus, read_schedules, remove_schedule
from qworker.testing import FakeClock
from qworker.testing.helpers import enqueued_calls, in_memory, run_until_idle
from qworker.testing.plugin import qworker_clock, qworker_memory
from qworker.worker import Worker, WorkerOptions
from qworker.worker.metrics import merge_counts
from qworker.worker.store_clock import StoreClock
from tests.support.apps import close_app
from tests.support.servers import RedisServer
from tests.support.waiting import PATIENCE, let_pass

__all__ = ["qworker_clock", "qworker_memory"]

_names = itertools.count()
# A quarter past an hour in Berlin: 2026-11-23 10:15 UTC.
START = datetime(2026, 11, 23, 10, 15, tzinfo=UTC).timestamp()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer(databases="500") as server:
        yield server


def url_of(kind: str, folder: Path, redis: RedisServer) -> str:
    if kind == "redis":
        return f"{redis.url}?db={next(_names)}"
    return f"memory://schedules-{next(_names)}" if kind == "memory" else f"file://{folder}/root?sync=off"


@pytest_asyncio.fixture(params=["memory", "file", "redis"])
async def tasks(request: pytest.FixtureRequest, tmp_path: Path, redis: RedisServer) -> AsyncIterator[Tasks]:
    tasks = Tasks(url_of(request.param, tmp_path, redis))
    yield tasks
    await close_app(tasks)


class App:
    """An app on a store whose time is a test's, with a record of what its handlers got."""

    def __init__(self, url: str, clock: FakeClock, define: Callable[[Tasks, Any], None] | None = None) -> None:
        self.tasks = Tasks(url)
        self.tasks.clock = self.clock = clock
        self.got: list[tuple[str, datetime | None]] = []

        @self.tasks.task(queue="q")
        async def note(ctx: Context, kind: str = "short") -> None:
            self.got.append((kind, ctx.tick))

        self.note = note
        if define is not None:
            define(self.tasks, note)

    async def run(self, **options: Any) -> list[tuple[str, datetime | None]]:
        """Run a worker until nothing is left, and return what ran."""
        await Worker(self.tasks, WorkerOptions(burst=True, **options)).run()
        found, self.got = self.got, []
        return found

    async def ticks(self, **options: Any) -> list[str]:
        """Run a worker, and return the ticks that ran, as UTC times."""
        return [f"{tick.astimezone(UTC):%H:%M:%S}" for _, tick in await self.run(**options) if tick is not None]

    async def cells(self, *ops: CellOp) -> Any:
        return await (await self.tasks.backend()).cells("q", ops)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kind = request.param
    return f"memory://ticks-{next(_names)}" if kind == "memory" else f"file://{tmp_path}/root?sync=off"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START)


def every_minute(tasks: Tasks, note: Any) -> None:
    tasks.every(60)(note)


# -- in code -----------------------------------------------------------------------------------------------------------


def app_with(decorate: Callable[[Tasks], Any], handler: Callable[..., Any] | None = None) -> Tasks:
    tasks = Tasks()

    def daily(path: str = "x") -> None: ...

    decorate(tasks)(tasks.task(handler or daily))
    return tasks


def needs_path(path: str) -> None: ...


def takes_number(number: int) -> None: ...


def needs_path_not() -> None: ...


def takes_number_or_none() -> None: ...


@pytest.mark.parametrize(
    ("decorate", "handler", "text"),
    [
        (
            lambda tasks: tasks.cron("30 25 * * *", name="daily"),
            None,
            "schedule 'daily': '30 25 * * *' is not a valid cron expression: hour must be between 0 and 23 (got 25)",
        ),
        (
            lambda tasks: tasks.cron("0 7 * * *", tz="Europe/Berln"),
            None,
            "schedule 'daily': unknown time zone 'Europe/Berln'",
        ),
        (
            lambda tasks: tasks.every(60, name="daily"),
            needs_path,
            "schedule 'daily': parameter 'path' has no value: give it a default or use args=",
        ),
        (
            lambda tasks: tasks.every(60, args=("x",)),
            takes_number,
            "schedule 'takes_number': task 'takes_number', argument 1 (number): expected int, got str",
        ),
        (
            lambda tasks: tasks.every(60, args=("x", "y")),
            None,
            "schedule 'daily': task 'daily': too many positional arguments; it takes (path: ",
        ),
        (
            lambda tasks: tasks.every(0.5),
            None,
            "schedule 'daily': every must be a whole number of seconds, at least 1 (got 0.5)",
        ),
        (
            lambda tasks: tasks.every(60, catch_up="some"),
            None,
            "schedule 'daily': catch_up must be one of latest, all, none (got 'some')",
        ),
        (lambda tasks: tasks.every(60, overlap=True), None, "schedule 'daily': overlap must be one of allow, skip"),
    ],
)
def test_a_schedule_that_is_not_valid_is_refused_at_import(decorate: Any, handler: Any, text: str) -> None:
    with pytest.raises(UsageError) as refused:
        app_with(decorate, handler)
    assert str(refused.value).startswith(text)


def test_a_unique_key_that_a_schedule_cannot_have_is_refused_at_import() -> None:
    tasks = Tasks()

    @tasks.task(unique=Unique(key="k", again="error"))
    def daily() -> None: ...

    @tasks.task(unique=Unique(key="k"))
    def hourly() -> None: ...

    nobody = """the call of a schedule cannot have again="error", since no caller gets it: use again="keep"$"""
    with pytest.raises(UsageError, match=f"^schedule 'daily': {nobody}"):
        tasks.every(60)(daily)
    with pytest.raises(UsageError, match=f"^{nobody}"):
        definition_of("x", Schedule(daily.call(), every=60))
    with pytest.raises(UsageError, match=r"""^schedule 'hourly': overlap="skip" sets a unique key: leave"""):
        tasks.every(60, overlap="skip")(hourly)
    tasks.every(60)(hourly)


def test_two_schedules_with_one_name_are_refused() -> None:
    tasks = Tasks()

    @tasks.every(60)
    @tasks.task
    def daily() -> None: ...

    with pytest.raises(UsageError, match=r"^the schedule name 'daily' is already used: give one of them another name"):
        tasks.cron("0 7 * * *")(daily)
    tasks.cron("0 7 * * *", name="morning")(daily)
    assert sorted(tasks.schedules.in_code) == ["daily", "morning"]


async def test_the_schedules_of_an_app_that_is_included_tick_in_the_other_app(
    qworker_memory: Callable[[Tasks], Tasks], qworker_clock: FakeClock
) -> None:
    library, app = Tasks(), Tasks("file:./spool")
    got: list[str] = []

    @library.every(60, name="other", args=("b",))
    @library.every(60)
    @library.task
    def note(kind: str = "a") -> None:
        got.append(kind)

    app.include(library, prefix="lib.", queue="q")
    library.every(60, name="late", args=("c",))(note)
    assert library.schedules is app.schedules
    assert sorted(app.schedules.in_code) == ["lib.late", "lib.note", "lib.other"]
    qworker_memory(app)
    await run_until_idle(app)
    qworker_clock.advance(60)
    await run_until_idle(app)
    assert sorted(got) == ["a", "b", "c"]
    assert {(row.name, row.queue, row.task) for row in await library.schedules.list()} == {
        (name, "q", "lib.note") for name in ("lib.late", "lib.note", "lib.other")
    }


def test_an_app_whose_schedule_has_a_name_that_is_used_is_not_included() -> None:
    library, app = Tasks(), Tasks()
    library.every(60, name="a")(library.task(needs_path_not))
    app.every(60, name="a")(app.task(takes_number_or_none))
    with pytest.raises(UsageError, match=r"^the schedule name 'a' is already used"):
        app.include(library)
    assert list(library.registered_tasks) == ["needs_path_not"]


def test_a_schedule_below_the_task_is_refused() -> None:
    tasks = Tasks()

    def daily() -> None: ...

    with pytest.raises(UsageError, match=r"^@tasks.every belongs above @tasks.task: it takes a task"):
        tasks.every(60)(daily)  # type: ignore[type-var]


@pytest.mark.parametrize("scheme", ["fsq", "vsqs", "sq", "rfq"])
def test_a_store_without_cells_refuses_schedules_at_import(scheme: str) -> None:
    tasks = Tasks(f"{scheme}://./spool")

    @tasks.task
    def daily() -> None: ...

    with pytest.raises(NotSupported) as refused:
        tasks.every(60)(daily)
    assert str(refused.value) == f"{scheme}: does not support schedules: use file: or redis:"


async def test_a_store_without_cells_refuses_schedules_at_the_start_of_a_worker(tmp_path: Path) -> None:
    tasks = Tasks()

    @tasks.every(60)
    @tasks.task
    def daily() -> None: ...

    tasks.url = f"fsq://{tmp_path}/spool"
    with pytest.raises(NotSupported, match=r"^fsq: does not support schedules: use file: or redis:$"):
        await Worker(tasks, WorkerOptions(burst=True)).run()
    with pytest.raises(NotSupported, match=r"^fsq: does not support schedules"):
        await tasks.schedules.put("x", daily.call(), every=60)
    await Worker(tasks, WorkerOptions(burst=True, schedules=False)).run()
    await tasks.aclose()


def test_an_app_without_cron_expressions_loads_neither_cronsim_nor_time_zones() -> None:
    program = (
        "import asyncio, sys\nfrom qworker import Tasks\nfrom qworker.testing import run_until_idle\n"
        "tasks = Tasks('memory:')\n@tasks.task\ndef f(): ...\nasyncio.run(run_until_idle(tasks))\n"
        "print({'cronsim', 'zoneinfo'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_without_cronsim_a_cron_schedule_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from qworker.schedules.timetable import timetable_of

    timetable_of.cache_clear()
    monkeypatch.setitem(sys.modules, "cronsim", None)
    monkeypatch.delitem(sys.modules, "qworker.schedules.cron", raising=False)
    with pytest.raises(MissingExtra, match=r"^a cron schedule needs the extra 'cron': "):
        app_with(lambda tasks: tasks.cron("0 7 * * *"))
    timetable_of.cache_clear()


# -- put, remove, sync, list -------------------------------------------------------------------------------------------


def registered(tasks: Tasks) -> Any:
    @tasks.every(3600, name="hourly")
    @tasks.task(queue="q")
    async def note(kind: str = "short") -> None: ...

    return note


async def names(tasks: Tasks) -> list[str]:
    return [row.name for row in await tasks.schedules.list()]


async def test_a_schedule_that_was_put_is_listed_until_it_is_removed(tasks: Tasks) -> None:
    note = registered(tasks)
    await tasks.schedules.put("acme", note.call(kind="long"), cron="0 6 * * *", tz="Europe/Berlin", overlap="skip")
    (row,) = await tasks.schedules.list()
    assert isinstance(row, ScheduleStatus)
    assert (row.name, row.queue, row.task, row.definition) == ("acme", "q", "note", "0 6 * * * (Europe/Berlin)")
    assert (row.last, row.outcome, row.paused, row.in_code, row.overlap) == (None, None, False, False, "skip")
    assert row.next is not None
    assert (row.next.hour, str(row.next.tzinfo)) == (6, "Europe/Berlin")
    await tasks.schedules.put("acme", note.call(), every=timedelta(minutes=5))
    assert [row.definition for row in await tasks.schedules.list()] == ["every 300 s"]
    assert await tasks.schedules.remove("acme") is True
    assert await tasks.schedules.remove("acme") is False
    assert await tasks.schedules.list() == []


async def test_a_removal_whose_answer_was_lost_leaves_nothing(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    note = registered(tasks)
    await tasks.schedules.put("acme", note.call(), every=60)
    await tasks.schedules.pause("acme")
    backend = await tasks.backend()
    plain = backend.cells

    async def repeated(queue: str, ops: Any) -> Any:
        if len(ops) == 1 and ops[0].do == "delete":
            await plain(queue, ops)
        return await plain(queue, ops)

    monkeypatch.setattr(backend, "cells", repeated)
    assert await tasks.schedules.remove("acme") is True
    (left,) = await plain("q", [CellOp("list", Cell("schedules", ""))])
    assert left.cells == []


async def test_a_removal_that_died_in_the_middle_is_completed_by_the_next_one(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = registered(tasks)
    await tasks.schedules.put("acme", note.call(), every=60)
    backend = await tasks.backend()
    (stored,) = await read_schedules(backend, "q", 0.0)
    await backend.cells("q", [CellOp("delete", stored.cell)])
    assert await remove_schedule(backend, stored) is True
    (left,) = await backend.cells("q", [CellOp("list", Cell("schedules", ""))])
    assert left.cells == []


async def test_a_schedule_is_put_at_the_time_of_the_store(tasks: Tasks) -> None:
    """The clock of the caller is an hour ahead: the schedule would wait that long for its first tick."""
    note = registered(tasks)
    tasks.clock = FakeClock(time.time() + 3600)
    backend = await tasks.backend()
    await tasks.schedules.put("acme", note.call(), every=60)
    now = (await backend.reap("q")).now
    (stored,) = await read_schedules(backend, "q", now)
    assert stored.last is not None
    assert abs(stored.last.at - now) < 60
    assert abs(stored.cell.rank / 1000 - now) < 60


async def test_the_command_line_puts_a_schedule_at_the_time_of_the_store(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of("redis", tmp_path, redis)
    monkeypatch.setattr("qworker.cli.schedules.SYSTEM_CLOCK", FakeClock(time.time() + 3600))
    assert await asyncio.to_thread(main, ["schedules", url, "put", "acme", "--task", "report", "--every", "60"]) == 0
    tasks = Tasks(url)
    (stored,) = await read_schedules(await tasks.backend(), "default", time.time())
    await close_app(tasks)
    assert stored.last is not None
    assert abs(stored.last.at - time.time()) < 60


async def test_a_schedule_whose_call_gets_another_queue_is_one_schedule(tasks: Tasks) -> None:
    note = registered(tasks)

    @tasks.task(queue="other")
    async def more() -> None: ...

    await tasks.schedules.put("acme", note.call(), every=60)
    await tasks.schedules.put("acme", more.call(), every=60)
    assert [(row.name, row.queue) for row in await tasks.schedules.list()] == [("acme", "other")]
    await tasks.schedules.remove("acme")
    assert await names(tasks) == []


async def test_sync_removes_only_what_a_sync_of_its_set_has_put(tasks: Tasks) -> None:
    note = registered(tasks)
    entry = Schedule(note.call(), every=60)
    await tasks.schedules.put("single", note.call(), every=60)
    await tasks.schedules.sync({"a": entry, "b": entry}, set="one")
    await tasks.schedules.sync({"c": entry}, set="two")
    assert await names(tasks) == ["a", "b", "c", "single"]
    await tasks.schedules.sync({"b": Schedule(note.call("long"), cron="0 6 * * *")}, set="one")
    assert await names(tasks) == ["b", "c", "single"]
    assert (await tasks.schedules.list())[0].definition == "0 6 * * * (UTC)"
    await tasks.schedules.sync({}, set="one")
    await tasks.schedules.sync({}, set="two")
    assert await names(tasks) == ["single"]


@pytest.mark.parametrize("step", range(6))
async def test_a_sync_that_dies_at_any_step_leaves_nothing_out_and_is_completed_by_the_next_one(
    tasks: Tasks, step: int
) -> None:
    note = registered(tasks)
    await tasks.schedules.sync({name: Schedule(note.call(), every=60) for name in ("kept", "gone")})
    wanted = {name: Schedule(note.call("long"), every=120) for name in ("kept", "new")}
    backend: Any = await tasks.backend()
    whole, left = backend.cells, step

    async def dying(queue: str, ops: Any) -> Any:
        nonlocal left
        if any(op.do in {"put", "delete"} for op in ops):
            if left == 0:
                raise BackendUnavailable("it dies here")
            left -= 1
        return await whole(queue, ops)

    backend.cells = dying
    try:
        await tasks.schedules.sync(wanted)
        assert left >= 0
    except BackendUnavailable:
        pass
    backend.cells = whole
    # Whatever has happened, no schedule that both sets have is missing.
    assert "kept" in await names(tasks)
    await tasks.schedules.sync(wanted)
    assert [(row.name, row.every) for row in await tasks.schedules.list()] == [("kept", 120), ("new", 120)]


async def test_a_sync_of_equal_schedules_changes_nothing(tasks: Tasks) -> None:
    note = registered(tasks)
    entries = {"a": Schedule(note.call("long"), cron="0 6 * * *")}
    await tasks.schedules.sync(entries)
    backend = await tasks.backend()
    look = [CellOp("list", Cell(GROUP, ""))]
    before = await backend.cells("q", look)
    await tasks.schedules.sync(entries)
    assert [cell.version for cell in (await backend.cells("q", look))[0].cells] == [
        cell.version for cell in before[0].cells
    ]


async def test_the_name_of_a_schedule_in_code_is_refused(tasks: Tasks) -> None:
    note = registered(tasks)
    text = r"^schedule 'hourly' is defined in code: use another name$"
    with pytest.raises(UsageError, match=text):
        await tasks.schedules.put("hourly", note.call(), every=60)
    with pytest.raises(UsageError, match=text):
        await tasks.schedules.sync({"hourly": Schedule(note.call(), every=60)})
    with pytest.raises(UsageError, match=r"^schedule 'hourly' is defined in code: remove it there, or pause it$"):
        await tasks.schedules.remove("hourly")


async def test_calls_that_a_schedule_cannot_have_are_refused(tasks: Tasks) -> None:
    note = registered(tasks)
    put = tasks.schedules.put
    with pytest.raises(UsageError, match=r"^schedule 'a': a schedule has exactly one of cron= and every=$"):
        await put("a", note.call())
    with pytest.raises(UsageError, match=r"^schedule 'a': the call of a schedule cannot have id=: each tick sets"):
        await put("a", note.using(id="x").call(), every=60)
    with pytest.raises(UsageError, match=r"^schedule 'a': no task of this app has the queue 'else'"):
        await put("a", note.using(queue="else").call(), every=60)
    with pytest.raises(UsageError, match=r"^schedule 'a': the call is too large"):
        await put("a", note.call("x" * 70_000), every=60)
    with pytest.raises(UsageError, match=r"^there is no schedule 'a'"):
        await tasks.schedules.pause("a")


@pytest.mark.parametrize("field", ["tries", "argv", "fields", "original_id", "enqueued_at", "hold"])
def test_a_field_of_a_message_that_no_definition_keeps_is_refused(field: str) -> None:
    tasks = Tasks(f"memory://fields-{next(_names)}")
    call = registered(tasks).call()
    values = {"argv": ("x",), "fields": {"a": "b"}, "original_id": "x"}
    given = msgspec.structs.replace(call, draft=msgspec.structs.replace(call.draft, **{field: values.get(field, 1)}))
    with pytest.raises(UsageError, match=f"^schedule 'a': the call of a schedule cannot have {field}="):
        tasks.schedules.put_sync("a", given, every=60)


@pytest.mark.parametrize("kept", [600.0, None])
async def test_the_options_of_a_call_travel_with_the_calls_of_its_schedule(tasks: Tasks, kept: float | None) -> None:
    @tasks.task(queue="q", result=60)
    def size() -> int:
        return 1

    call = size.using(result=kept).call()
    await tasks.schedules.put("acme", call, every=3600)
    job = await tasks.schedules.run("acme")
    (stored,) = await (await tasks.backend()).find("q", [job.id])
    opened = open_envelope(stored.message.body)
    assert isinstance(opened, Envelope)
    assert opened.options == CallOptions(result=kept)


async def test_the_job_of_a_run_out_of_turn_gives_its_result(url: str) -> None:
    tasks = Tasks(url)

    @tasks.task(queue="q", result=60)
    def size() -> int:
        return 7

    await tasks.schedules.put("acme", size.call(), every=3600)
    job = await tasks.schedules.run("acme")
    await Worker(tasks, WorkerOptions(burst=True)).run()
    assert await job.result(timeout=10) == 7
    await tasks.aclose()


def test_the_twins_work_without_an_event_loop() -> None:
    tasks = Tasks(f"memory://twins-{next(_names)}")
    note = registered(tasks)
    tasks.schedules.put_sync("a", note.call(), every=5.0)
    tasks.schedules.sync_sync({"b": Schedule(note.call(), every=5.0)})
    tasks.schedules.pause_sync("a")
    assert [(row.name, row.paused) for row in tasks.schedules.list_sync()] == [("a", True), ("b", False)]
    tasks.schedules.resume_sync("a")
    assert tasks.schedules.run_sync("a").queue == "q"
    assert tasks.schedules.remove_sync("a") is True


async def test_a_run_out_of_turn_is_enqueued_and_changes_no_tick(tasks: Tasks) -> None:
    note = registered(tasks)
    await tasks.schedules.put("acme", note.call("long"), every=3600)
    await tasks.schedules.run("acme")
    await tasks.schedules.run("hourly")
    calls = await enqueued_calls(tasks)
    assert [(call.args, "qworker-tick" in call.headers) for call in calls] == [(("long",), False), ((), False)]
    assert [row.last for row in await tasks.schedules.list()] == [None]


# -- ticks -------------------------------------------------------------------------------------------------------------


async def test_ticks_follow_the_clock_of_a_test(
    qworker_memory: Callable[[Tasks], Tasks], qworker_clock: FakeClock
) -> None:
    app = App("file:./spool", qworker_clock, lambda tasks, note: tasks.every(60, args=("long",))(note))
    qworker_memory(app.tasks)
    assert await app.run() == []
    qworker_clock.advance(60)
    ((kind, tick),) = await app.run()
    assert kind == "long"
    assert tick is not None
    assert tick.timestamp() == qworker_clock.time() // 60 * 60
    assert await app.run() == []


async def test_a_test_can_advance_its_clock_before_the_first_worker(
    qworker_memory: Callable[[Tasks], Tasks], qworker_clock: FakeClock
) -> None:
    app = App("file:./spool", qworker_clock, every_minute)
    qworker_memory(app.tasks)
    qworker_clock.advance(60)
    assert len(await app.run()) == 1


async def test_a_tick_is_in_the_time_zone_of_its_schedule(url: str, clock: FakeClock) -> None:
    app = App(url, clock, lambda tasks, note: tasks.cron("30 11 * * mon", tz="Europe/Berlin", name="a b")(note))
    await app.run()
    clock.advance(15 * 60)
    ((_, tick),) = await app.run()
    assert tick is not None
    assert f"{tick:%Y-%m-%d %H:%M %Z}" == "2026-11-23 11:30 CET"


@pytest.mark.parametrize(
    ("catch_up", "expected"), [("latest", ["10:25:00"]), ("all", [f"10:{16 + n}:00" for n in range(10)]), ("none", [])]
)
async def test_ticks_that_no_worker_was_there_for_run_by_the_policy(
    url: str, clock: FakeClock, catch_up: Any, expected: list[str]
) -> None:
    app = App(url, clock, lambda tasks, note: tasks.every(60, catch_up=catch_up)(note))
    await app.run()
    clock.advance(630)
    assert sorted(await app.ticks()) == expected
    assert await app.ticks() == []


async def test_a_second_worker_enqueues_no_tick_again(url: str, clock: FakeClock) -> None:
    app, other = App(url, clock, every_minute), App(url, clock, every_minute)
    await app.run()
    clock.advance(60)
    assert await app.ticks() + await other.ticks() == ["10:16:00"]


async def test_a_tick_is_counted_once_however_many_workers_enqueue_it(url: str, clock: FakeClock) -> None:
    apps = [App(url, clock, every_minute) for _ in range(3)]
    workers = [Worker(app.tasks, WorkerOptions(burst=True)) for app in apps]
    await asyncio.gather(*(worker.run() for worker in workers))
    for _ in range(2):
        clock.advance(180)
        rounds = [Worker(app.tasks, WorkerOptions(burst=True)) for app in apps]
        await asyncio.gather(*(worker.run() for worker in rounds))
        workers += rounds
    counts = merge_counts(one for worker in workers for one in worker.features.counts())
    # By the default policy, the latest of three ticks runs.
    assert [(one.queue, one.task, one.features) for one in counts] == [
        ("q", "", {"ticks": {"enqueued": 2, "missed": 4}})
    ]


async def test_a_tick_that_was_enqueued_before_its_worker_died_runs_once(url: str, clock: FakeClock) -> None:
    app = App(url, clock, every_minute)
    await app.run()
    before = (await app.cells(CellOp("get", Cell(GROUP, "tick:note"))))[0].cell
    clock.advance(60)
    assert await app.ticks() == ["10:16:00"]
    # As if the worker had died before it stored the last tick: the id is held, although the message is done.
    await app.cells(CellOp("delete", before), CellOp("put", before))
    assert await app.ticks() == []


async def test_a_damaged_last_tick_repeats_nothing(url: str, clock: FakeClock) -> None:
    app = App(url, clock, lambda tasks, note: tasks.every(60, catch_up="all")(note))
    await app.run()
    clock.advance(120)
    assert await app.ticks() == ["10:16:00", "10:17:00"]
    for damage in (b"x", b"{}", b'{"at": 5}'):
        await app.cells(CellOp("put", Cell(GROUP, "tick:note", damage, rank=int(clock.time()) + 10_000_000)))
        clock.advance(60)
        # Those before the first run of the schedule are new; those that have run are not.
        found = await app.ticks()
        assert f"{datetime.fromtimestamp(clock.time() // 60 * 60, UTC):%H:%M:%S}" in found
        assert not {"10:16:00", "10:17:00"} & set(found)


async def test_a_paused_schedule_and_a_paused_queue_get_no_ticks_until_they_are_resumed(
    url: str, clock: FakeClock
) -> None:
    app = App(url, clock, every_minute)
    backend = await app.tasks.backend()
    await app.run()
    for pause, resume, name in (
        (app.tasks.schedules.pause, app.tasks.schedules.resume, "note"),
        (backend.pause, backend.resume, "q"),
    ):
        await pause(name)
        clock.advance(180)
        assert await app.ticks() == []
        assert not await enqueued_calls(app.tasks)
        await resume(name)
        assert await app.ticks() == [f"{datetime.fromtimestamp(clock.time(), UTC):%H:%M:%S}"]


async def test_a_tick_is_skipped_while_the_call_of_an_earlier_one_waits(url: str, clock: FakeClock) -> None:
    app = App(url, clock, lambda tasks, note: tasks.every(60, overlap="skip")(note))
    await app.run()

    async def tick_without_running() -> list[str]:
        clock.advance(60)
        await app.run(queues=("elsewhere",))
        return [call.id for call in await enqueued_calls(app.tasks)]

    first = await tick_without_running()
    assert len(first) == 1
    assert await tick_without_running() == first
    (row,) = await app.tasks.schedules.list()
    assert row.outcome == "skipped"
    assert len(await app.run()) == 1
    clock.advance(60)
    assert await app.ticks() == ["10:18:00"]
    (row,) = await app.tasks.schedules.list()
    assert row.outcome == "done"


async def test_a_step_of_the_clock_back_repeats_no_tick(url: str, clock: FakeClock) -> None:
    app = App(url, clock, lambda tasks, note: tasks.every(60, catch_up="all")(note))
    await app.run()
    clock.advance(60)
    assert await app.ticks() == ["10:16:00"]
    clock.step(-3600)
    clock.advance(120)
    assert await app.ticks() == []
    clock.step(3600)
    assert await app.ticks() == ["10:17:00", "10:18:00"]


async def running(app: App, options: WorkerOptions = WorkerOptions()) -> tuple[Worker, asyncio.Task[bool]]:  # noqa: B008
    worker = Worker(app.tasks, options)
    task = asyncio.create_task(worker.run())
    await until(lambda: worker._loops is not None and worker._loops.scheduler is not None)
    assert worker._loops is not None
    assert worker._loops.scheduler is not None
    await worker._loops.scheduler.begun.wait()
    return worker, task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await let_pass(0.01)


async def test_a_running_worker_takes_a_step_ahead_for_missed_ticks(url: str, clock: FakeClock) -> None:
    app = App(url, clock, every_minute)
    worker, task = await running(app)
    clock.step(3600)
    await until(lambda: bool(app.got))
    clock.step(-3600)
    clock.advance(61)
    clock.step(3600)
    await until(lambda: len(app.got) > 1)
    worker.drain()
    await task
    assert [f"{tick:%H:%M}" for _, tick in app.got if tick] == ["11:15", "11:16"]


async def test_a_host_whose_clock_is_ahead_ticks_by_the_time_of_the_store(
    url: str, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App(url, clock, every_minute)
    behind = 3600.0
    backend = await app.tasks.backend()
    reap = backend.reap

    async def reap_behind(queue: str) -> ReapResult:
        result = await reap(queue)
        return msgspec.structs.replace(result, now=result.now - behind)

    monkeypatch.setattr(backend, "reap", reap_behind)
    await app.run()
    clock.advance(60)
    assert await app.ticks() == ["09:16:00"]


async def test_nothing_ticks_before_the_time_of_the_store_is_known(
    url: str, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App(url, clock, every_minute)
    await app.run()
    clock.advance(60)
    backend = await app.tasks.backend()
    reap = backend.reap
    refused = 0

    async def refuse(_: str) -> ReapResult:
        nonlocal refused
        refused += 1
        raise BackendUnavailable("down")

    monkeypatch.setattr(backend, "reap", refuse)
    worker = Worker(app.tasks)
    task = asyncio.create_task(worker.run())
    await until(lambda: refused > 0)
    assert worker._loops is not None
    assert worker._loops.scheduler is not None
    assert not worker._loops.scheduler.begun.is_set()
    assert app.got == []
    monkeypatch.setattr(backend, "reap", reap)
    await until(lambda: bool(app.got))
    worker.drain()
    await task


async def test_a_burst_that_waits_for_the_time_of_the_store_ends_when_it_is_drained(
    url: str, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App(url, clock, every_minute)
    backend = await app.tasks.backend()
    refused = 0

    async def refuse(_: str) -> ReapResult:
        nonlocal refused
        refused += 1
        raise BackendUnavailable("down")

    monkeypatch.setattr(backend, "reap", refuse)
    worker = Worker(app.tasks, WorkerOptions(burst=True))
    task = asyncio.create_task(worker.run())
    await until(lambda: refused > 0)
    worker.drain()
    async with asyncio.timeout(PATIENCE):
        await task
    assert app.got == []


def test_an_answer_that_took_long_is_no_step_of_the_clock(clock: FakeClock) -> None:
    store = StoreClock(clock)
    store.take(1000.0)
    clock.advance(30)
    store.take(1005.0, took=25.0)
    assert store.time() == 1030.0
    store.take(1005.0, took=20.0)
    assert store.time() == 1025.0
    store.take(5000.0, took=1.0)
    assert store.time() == 5000.0


async def test_a_schedule_that_is_put_while_a_worker_runs_ticks(
    url: str, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qworker.worker.scheduler._LOOK_EVERY", 0.05)
    app = App(url, clock)
    worker, task = await running(app)
    await app.tasks.schedules.put("acme", app.note.call("long"), every=60)
    scheduler: Any = worker._loops.scheduler if worker._loops else None
    await until(lambda: "acme" in scheduler._entries)
    clock.advance(61)
    await until(lambda: bool(app.got))
    await app.tasks.schedules.remove("acme")
    await until(lambda: "acme" not in scheduler._entries)
    worker.drain()
    await task
    assert [kind for kind, _ in app.got] == ["long"]


async def test_a_worker_ticks_for_queues_that_it_does_not_work_on(url: str, clock: FakeClock) -> None:
    app = App(url, clock, every_minute)
    await app.run(queues=("elsewhere",))
    clock.advance(60)
    await app.run(queues=("elsewhere",))
    assert [call.id for call in await enqueued_calls(app.tasks)] == [f"cron:note:{int(START) + 60}"]


async def test_a_worker_without_schedules_enqueues_none(url: str, clock: FakeClock) -> None:
    app = App(url, clock, every_minute)
    await app.run()
    clock.advance(60)
    assert await app.ticks(schedules=False) == []
    assert await app.ticks() == ["10:16:00"]


async def test_a_schedule_whose_times_change_has_missed_nothing(url: str, clock: FakeClock) -> None:
    app, changed = App(url, clock, at(16)), App(url, clock, at(17))
    await app.run()
    clock.advance(60)
    assert [kind for kind, _ in await app.run()] == ["16"]
    clock.advance(120)
    assert await changed.run() == []
    clock.advance(3600)
    assert [f"{tick:%H:%M}" for _, tick in await changed.run() if tick] == ["11:17"]


async def test_a_schedule_that_is_put_with_other_times_counts_from_the_put_on(url: str, clock: FakeClock) -> None:
    """No worker runs between the put and the ticks: those after it are caught up, and those before it were others."""
    app = App(url, clock)
    put = app.tasks.schedules.put
    await put("acme", app.note.call(), cron="16 * * * *")
    clock.advance(60)
    assert await app.ticks() == ["10:16:00"]
    clock.advance(600)
    await put("acme", app.note.call(), cron="17-50 * * * *", catch_up="all")
    clock.advance(120)
    assert await app.ticks() == ["10:27:00", "10:28:00"]
    # Other arguments change no times: the last tick stays.
    clock.advance(60)
    await put("acme", app.note.call("long"), cron="17-50 * * * *", catch_up="all")
    clock.advance(60)
    assert await app.ticks() == ["10:29:00", "10:30:00"]


# -- two definitions ---------------------------------------------------------------------------------------------------


def at(minute: int) -> Callable[[Tasks, Any], None]:
    return lambda tasks, note: tasks.cron(f"{minute} * * * *", args=(str(minute),))(note)


async def test_of_two_definitions_the_one_of_the_newer_command_ticks(url: str, clock: FakeClock) -> None:
    old, new = App(url, clock, at(20)), App(url, clock, at(30))
    begun = clock.monotonic()
    await old.run(started=begun)
    clock.advance(60)
    released = clock.monotonic()
    await new.run(started=released)
    with capture_logs() as logs:
        # Also if the old command starts a worker again.
        await old.run(started=begun)
        clock.advance(5 * 60)
        assert await old.run(started=begun) == []
    assert [log["ticks_by"] for log in logs if log["event"] == "schedule_superseded"] == ["30 * * * * (UTC)"] * 2
    await new.run(started=released)
    clock.advance(9 * 60)
    # The old worker ticks by the new definition, with its arguments.
    ((kind, tick),) = await old.run(started=begun)
    assert (kind, f"{tick:%H:%M}") == ("30", "10:30")
    assert await new.run(started=released) == []


async def test_a_rollback_is_a_newer_command(url: str, clock: FakeClock) -> None:
    old, new = App(url, clock, at(20)), App(url, clock, at(30))
    await old.run(started=clock.monotonic())
    clock.advance(60)
    await new.run(started=clock.monotonic())
    clock.advance(60)
    await old.run(started=clock.monotonic())
    clock.advance(4 * 60)
    assert [kind for kind, _ in await old.run()] == ["20"]


async def test_a_definition_of_commands_that_are_gone_expires(url: str, clock: FakeClock) -> None:
    old, new = App(url, clock, at(20)), App(url, clock, at(30))
    begun = clock.monotonic()
    clock.advance(60)
    await new.run(started=clock.monotonic())
    clock.advance(601)
    # None of the newer command's workers has refreshed it, so any worker registers its own.
    assert await old.run(started=begun) == []
    (row,) = await old.tasks.schedules.list()
    assert row.cron == "20 * * * *"


async def test_a_schedule_whose_task_moves_to_another_queue_ticks_there_only(url: str, clock: FakeClock) -> None:
    def define(queue: str) -> Callable[[Tasks, Any], None]:
        def defined(tasks: Tasks, _note: Any) -> None:
            @tasks.every(60, name="moved")
            @tasks.task(queue=queue, name=f"moved-{queue}")
            async def moved() -> None: ...

        return defined

    old, new = App(url, clock, define("q")), App(url, clock, define("r"))
    begun = clock.monotonic()
    await old.run(started=begun)
    clock.advance(60)
    await new.run(started=clock.monotonic())
    clock.advance(60)
    await old.run(started=begun, queues=("elsewhere",))
    await new.run(queues=("elsewhere",))
    calls = await enqueued_calls(new.tasks)
    assert [(call.queue, call.id) for call in calls if call.id.endswith(str(int(START) + 120))] == [
        ("r", f"cron:moved:{int(START) + 120}")
    ]


async def test_an_error_of_the_store_delays_a_tick_and_loses_none(url: str, clock: FakeClock) -> None:
    app = App(url, clock, every_minute)
    await app.run()
    backend: Any = await app.tasks.backend()
    publish, failures = backend.publish, 3

    async def failing(queue: str, drafts: Any) -> Any:
        nonlocal failures
        failures -= 1
        if failures > 0:
            raise BackendUnavailable("no answer")
        return await publish(queue, drafts)

    backend.publish = failing
    worker, task = await running(app)
    clock.advance(60)
    async with asyncio.timeout(30):
        while not app.got:
            clock.advance(1)
            await let_pass(0.1)
    worker.drain()
    await task
    assert next(f"{tick:%H:%M:%S}" for _, tick in app.got if tick) == "10:16:00"


async def test_run_until_idle_in_memory_uses_the_clock_that_it_gets() -> None:
    clock = FakeClock(START)
    app = App("file:./spool", clock, every_minute)
    with in_memory(app.tasks, clock):
        clock.advance(60)
        counts = await run_until_idle(app.tasks)
    assert counts.acked == 1
