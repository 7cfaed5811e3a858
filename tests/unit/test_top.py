"""`qworker top`: what a look shows, on the screen by Textual's own pilot, and without a terminal or its extra."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from textual.widgets import DataTable, Static

from qworker import Fail, Tasks
from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.cli.main import main
from qworker.cli.top.sampler import Row, Sample, Sampler
from qworker.cli.top.screen import TopScreen
from qworker.cli.top.table import COLUMNS, cells
from qworker.errors import BackendUnavailable, QueueNotFound
from qworker.health.answers import HealthAnswers
from qworker.health.server import HealthServer
from qworker.health.worker_report import WorkerReport
from qworker.message import Draft, Message, QueueStats, SettleAction, Settlement
from qworker.testing.clock import FakeClock
from qworker.testing.wait_until import wait_until
from qworker.worker import Worker, WorkerOptions
from qworker.worker.metrics import TaskCounts
from tests.support.processes import environment
from tests.support.waiting import PATIENCE


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/spool?sync=off"


@pytest_asyncio.fixture
async def backend(url: str) -> AsyncIterator[Backend]:
    backend = open_backend(url)
    await backend.publish("busy", [Draft(body=b"x") for _ in range(5)])
    await backend.create("idle")
    yield backend
    await backend.aclose()


class Counts:
    """A worker's health port, with counts that a test sets."""

    def __init__(self) -> None:
        self.cell = TaskCounts("busy", "t")
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self._server = HealthServer(listener, HealthAnswers(lambda: [self._report()], stall_timeout=60.0))

    def _report(self) -> WorkerReport:
        queues = [QueueStats(queue="busy")]
        return WorkerReport(
            life="1",
            pid=1,
            state="working",
            running=3,
            concurrency=10,
            counts=[self.cell],
            queues=queues,
            looked_at=1.0,
        )

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    # Longer than the machine stands still: otherwise a look is without what the port tells.
    monkeypatch.setattr("qworker.cli.top.sampler._HEALTH_PATIENCE_S", PATIENCE)
    found = Counts()
    yield found
    found.close()


async def test_a_look_has_states_workers_and_rates(backend: Backend, counts: Counts) -> None:
    clock = FakeClock()
    sampler = Sampler(backend, health=[counts.address], clock=clock)
    first = await sampler.sample()
    assert [row.queue for row in first.rows] == ["busy", "idle"]
    assert (first.rows[0].ready, first.rows[0].backlog_rate, first.rows[0].acked_rate) == (5, None, None)
    one, two = await backend.lease("busy", 2, 60.0)
    assert await backend.settle([Settlement(lease=one, action=SettleAction.ACK)]) == []
    assert await backend.settle([Settlement(lease=two, action=SettleAction.FAIL_PERM, error="no")]) == []
    held = await backend.lease("busy", 1, 60.0)
    assert len(held) == 1
    await backend.publish("busy", [Draft(body=b"later", delay=600.0)])
    await backend.pause("idle")
    counts.cell.acked, counts.cell.failed = 8, 2
    clock.advance(4.0)
    second = await sampler.sample()
    busy, idle = second.rows
    assert (busy.ready, busy.leased, busy.delayed, busy.failed, busy.workers) == (2, 1, 1, 1, 1)
    assert (busy.backlog_rate, busy.acked_rate, busy.failed_rate) == (-0.25, 2.0, 0.5)
    assert busy.oldest_age_s is not None
    assert (idle.paused, idle.workers, idle.backlog_rate, idle.oldest_age_s) == (True, 0, 0.0, None)
    assert second.fleet is not None
    assert (second.fleet.workers, second.fleet.running, second.fleet.concurrency) == (1, 3, 10)
    assert second.problem is None
    # A worker that was replaced counts from nothing: better no rate than a wrong one.
    counts.cell.acked = 1
    clock.advance(1.0)
    assert (await sampler.sample()).rows[0].acked_rate is None
    counts.cell.acked = 4
    clock.advance(1.0)
    assert (await sampler.sample()).rows[0].acked_rate == 3.0


async def test_the_history_tells_what_was_done_and_by_how_many(backend: Backend, url: str) -> None:
    clock = FakeClock()
    tasks = Tasks(url)

    @tasks.raw_handler(queue="busy", max_tries=1)
    async def work(message: Message) -> None:
        if message.body == b"bad":
            raise Fail("no")

    # What was before the first look is nobody's rate.
    await Worker(tasks, WorkerOptions(burst=True)).run()
    sampler = Sampler(backend, "busy", clock=clock)
    await sampler.sample()
    await backend.publish("busy", [Draft(body=b"good"), Draft(body=b"bad"), Draft(body=b"good")])
    await Worker(tasks, WorkerOptions(burst=True)).run()
    await tasks.aclose()
    clock.advance(2.0)
    (row,) = (await sampler.sample()).rows
    assert (row.acked_rate, row.failed_rate, row.workers, row.ready) == (1.0, 0.5, 1, 0)
    clock.advance(20.0)
    await sampler.sample()
    clock.advance(1.0)
    (row,) = (await sampler.sample()).rows
    assert (row.acked_rate, row.workers) == (0.0, 0)


async def test_where_nothing_counts_rates_of_work_are_not_known(tmp_path: Path) -> None:
    backend = open_backend(f"file://{tmp_path}/quiet?history=0")
    await backend.publish("busy", [Draft(body=b"x")])
    clock = FakeClock()
    sampler = Sampler(backend, clock=clock)
    await sampler.sample()
    clock.advance(1.0)
    (row,) = (await sampler.sample()).rows
    assert (row.backlog_rate, row.acked_rate, row.failed_rate) == (0.0, None, None)
    await backend.aclose()


async def test_rates_are_of_the_last_seconds_and_not_of_all_time(backend: Backend) -> None:
    clock = FakeClock()
    sampler = Sampler(backend, "busy", clock=clock)
    rates = []
    for _ in range(30):
        rates.append((await sampler.sample()).rows[0].backlog_rate)
        clock.advance(1.0)
        if len(rates) <= 10:
            await backend.publish("busy", [Draft(body=b"x")])
    assert rates[:3] == [None, 1.0, 1.0]
    assert rates[15] == 0.5
    assert rates[-1] == 0.0


async def test_a_store_or_a_port_that_does_not_answer_is_told_beside_what_was_seen_before(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    sampler = Sampler(backend, health=[nobody])
    before = await sampler.sample()
    assert before.problem is not None
    assert "does not answer" in before.problem
    assert before.fleet is None

    async def away() -> list[str]:
        raise BackendUnavailable("nobody at redis://u:hush@there")

    monkeypatch.setattr(backend, "queues", away)
    after = await sampler.sample()
    assert after.rows == before.rows
    assert after.problem is not None
    assert "nobody at" in after.problem
    assert "hush" not in after.problem


async def test_a_queue_that_is_deleted_is_shown_no_more_and_one_that_was_asked_for_is_missed(backend: Backend) -> None:
    both, one = Sampler(backend), Sampler(backend, "idle")
    await both.sample()
    await one.sample()
    await backend.delete("idle")
    assert [row.queue for row in (await both.sample()).rows] == ["busy"]
    with pytest.raises(QueueNotFound):
        await one.sample()


def test_numbers_are_written_for_people() -> None:
    row = Row(queue="q", ready=1234567, backlog_rate=-1234.5, acked_rate=0.04, failed_rate=None, oldest_age_s=3.0)
    shown = dict(zip(COLUMNS, cells(row), strict=True))
    assert (shown["ready"], shown["backlog/s"], shown["acked/s"], shown["failed/s"]) == (
        "1,234,567",
        "-1,234",
        "0.0",
        "-",
    )
    assert dict(zip(COLUMNS, cells(Row(queue="q", backlog_rate=-0.01, paused=True)), strict=True))["backlog/s"] == "0.0"


# -- the screen --------------------------------------------------------------------------------------------------------


def table_of(app: TopScreen) -> list[list[str]]:
    table: DataTable[Any] = app.query_one(DataTable)
    return [[cell.plain for cell in table.get_row_at(row)] for row in range(table.row_count)]


def text_of(app: TopScreen, name: str) -> str:
    return str(app.query_one(f"#{name}", Static).render())


async def test_the_screen_shows_what_changes_and_keeps_to_its_queue(backend: Backend) -> None:
    sampler = Sampler(backend)
    # An interval that never comes: what is shown anew was asked for with a key.
    app = TopScreen(sampler.sample, await sampler.sample(), 3600.0)
    async with app.run_test(size=(140, 20)) as pilot:
        assert [row[:2] for row in table_of(app)] == [["busy", "5"], ["idle", "0"]]
        assert backend.describe() in text_of(app, "heading")
        await pilot.press("down")
        assert app.query_one(DataTable).cursor_row == 1
        await backend.publish("another", [Draft(body=b"x") for _ in range(9)])
        await pilot.press("r")
        await wait_until(lambda: len(table_of(app)) == 3)
        assert [row[0] for row in table_of(app)] == ["another", "busy", "idle"]
        # The cursor is where its queue is now.
        assert app.query_one(DataTable).cursor_row == 2
        await pilot.press("s")
        assert [row[0] for row in table_of(app)] == ["another", "busy", "idle"]
        assert "by ready" in text_of(app, "status")
        await pilot.press("space")
        assert "paused" in text_of(app, "status")
        await pilot.press("q")
    assert app.return_code == 0


async def test_the_screen_looks_by_itself_unless_it_is_paused(backend: Backend) -> None:
    looks = 0
    sampler = Sampler(backend)

    async def look() -> Sample:
        nonlocal looks
        looks += 1
        return await sampler.sample()

    app = TopScreen(look, await sampler.sample(), 0.01)
    async with app.run_test() as pilot:
        await wait_until(lambda: looks >= 3)
        await pilot.press("space")
        # One may have been under way.
        await pilot.pause()
        seen = looks
        for number in range(1, 21):
            await pilot.press("r")
            await wait_until(lambda number=number: looks >= seen + number)
        assert looks <= seen + 21


async def test_the_screen_survives_a_store_that_goes_away(backend: Backend) -> None:
    sampler = Sampler(backend, "busy")
    app = TopScreen(sampler.sample, await sampler.sample(), 3600.0)
    async with app.run_test(size=(140, 20)) as pilot:
        await backend.delete("busy")
        await pilot.press("r")
        await wait_until(lambda: "queue 'busy' does not exist" in text_of(app, "status"))
        await backend.publish("busy", [Draft(body=b"x")])
        await pilot.press("r")
        await wait_until(lambda: table_of(app)[0][1] == "1")


# -- without a terminal ------------------------------------------------------------------------------------------------


async def test_without_a_terminal_one_table_is_printed(
    backend: Backend, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*arguments: str) -> str:
        assert main(["top", url, "--interval", "0.1", *arguments]) == 0
        return capsys.readouterr().out

    shown = (await asyncio.to_thread(call)).splitlines()
    assert shown[1].split() == [*COLUMNS[:-1], COLUMNS[-1]]
    assert shown[2].split()[:6] == ["busy", "5", "0", "0", "0", "0.0"]
    found = json.loads(await asyncio.to_thread(call, "--json"))
    assert [(row["queue"], row["ready"], row["backlog_rate"]) for row in found["rows"]] == [
        ("busy", 5, 0.0),
        ("idle", 0, 0.0),
    ]
    assert [row["queue"] for row in json.loads(await asyncio.to_thread(call, "idle", "--json"))["rows"]] == ["idle"]


WITHOUT_THE_EXTRA = """
import os, pty, sys
# As if it were not installed.
sys.modules["textual"] = sys.modules["textual.app"] = None
from qworker.cli.main import main
out, inner = pty.openpty()
os.dup2(inner, 1)
raise SystemExit(main(["top", sys.argv[1]]))
"""


def test_on_a_terminal_without_the_extra_one_line_says_what_to_install(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_EXTRA, f"file://{tmp_path}/spool"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=50,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        (
            "qworker: qworker top on a terminal (all but --once) needs the extra 'tui': "
            "in a checkout of qworker run pip install '.[tui]', elsewhere pip install 'WHEEL_FILE[tui]' [MissingExtra]"
        )
    ]
