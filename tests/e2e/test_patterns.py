"""The programs of examples/patterns, run as their README says."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

import pytest

from qworker import Tasks
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.message import Query, State
from qworker.testing import FakeClock, run_until_idle
from qworker.testing.plugin import qworker_memory
from tests.support.processes import Process, started
from tests.support.waiting import PATIENCE, wait_for

__all__ = ["qworker_memory"]

PATTERNS = Path(__file__).parents[2] / "examples" / "patterns"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(PATTERNS, tmp_path / "patterns", ignore=shutil.ignore_patterns("__pycache__", "spool", "pages"))
    return tmp_path / "patterns"


# -- the crawler -------------------------------------------------------------------------------------------------------

PAGES = 60


class LinkedSite(ThreadingHTTPServer):
    """A site of pages that link to each other in circles. Its tenth request waits for `go_on`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Page)
        self.requests: Counter[str] = Counter()
        self.is_waiting, self.go_on = threading.Event(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Page(BaseHTTPRequestHandler):
    server: LinkedSite  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self.server.requests[self.path] += 1
        if self.server.requests.total() == 10:
            self.server.is_waiting.set()
            self.server.go_on.wait(PATIENCE)
        page = self.path.removeprefix("/page")
        if not page.isdigit():
            self.send_error(404)
            return
        number = int(page)
        links = [f"/page{(2 * number) % PAGES}", f"page{(3 * number + 1) % PAGES}#part", f"page{(number + 7) % PAGES}"]
        links += ["/missing", "http://other.example/page1", "http://[", "mailto:a@example.org"]
        body = "".join(f'<a href="{link}">x</a>' for link in links).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            """The client was killed."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Requests are counted, not logged."""


Server = TypeVar("Server", bound=ThreadingHTTPServer)


@contextmanager
def serving(server: Server) -> Generator[Server]:
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def linked_site() -> Generator[LinkedSite]:
    with serving(LinkedSite()) as site:
        try:
            yield site
        finally:
            site.go_on.set()


def test_a_crawler_visits_each_page_once_although_its_worker_is_killed(folder: Path) -> None:
    with linked_site() as site:
        for _ in range(2):  # A start that is repeated visits nothing again.
            with started(folder, f"{site.url}/page0", program=("crawler.py",)) as command:
                assert command.end() == 0, command.text
        with started(folder, "run", "crawler:tasks", "-c", "1") as killed:
            assert site.is_waiting.wait(PATIENCE), killed.text
            killed.popen.kill()
        site.go_on.set()
        with started(folder, "run", "crawler:tasks", "-c", "4", "--burst") as worker:
            assert worker.end() == 0, worker.text
        assert set(site.requests) == {"/missing", *(f"/page{number}" for number in range(PAGES))}
        # The page that the killed worker was fetching is fetched again, and no other one.
        assert site.requests.total() == len(site.requests) + 1
    assert len(list((folder / "pages").glob("*.json"))) == PAGES
    assert len(list((folder / "spool/crawler/default/fail").glob("[!.]*"))) == 1  # /missing


# -- the reminders -----------------------------------------------------------------------------------------------------

ZONES = {"ada": "Europe/London", "bo": "America/New_York", "chandra": "Asia/Kolkata", "dot": "Australia/Lord_Howe"}
# Lord Howe changes its clocks on 4 October, London on the 25th, and New York on 1 November.
START, DAYS = datetime(2026, 10, 24, 0, 10, tzinfo=UTC), 9


@pytest.fixture
def qworker_clock() -> FakeClock:
    return FakeClock(START.timestamp())


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, PATTERNS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_user_is_reminded_once_a_day_at_the_time_of_the_users_clock(
    qworker_memory: Callable[[Tasks], Tasks], qworker_clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    reminders = load("reminders")
    qworker_memory(reminders.tasks)
    for user, zone in ZONES.items():
        reminders.add(user, "06:00", "UTC", "replaced")
        reminders.add(user, "09:00", zone, "stand-up")
    reminders.add("eve", "09:00", "UTC", "removed")
    reminders.remove("eve")
    reminders.show()
    assert "ada: 2026-10-24 09:00:00+01:00" in capsys.readouterr().out

    async def let_days_pass() -> None:
        await run_until_idle(reminders.tasks)
        for _ in range(4 * DAYS):
            qworker_clock.advance(6 * 3600)
            await run_until_idle(reminders.tasks)

    asyncio.run(let_days_pass())
    moments = [START + timedelta(minutes=minutes) for minutes in range(60 * 24 * DAYS + 1)]
    wanted = [
        f"{local:%Y-%m-%d %H:%M %Z} {user}: stand-up"
        for user, zone in ZONES.items()
        for local in (moment.astimezone(ZoneInfo(zone)) for moment in moments)
        if (local.hour, local.minute) == (9, 0)
    ]
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line for line in lines if line.endswith(("stand-up", "replaced", "removed"))) == sorted(wanted)


# -- the webhooks ------------------------------------------------------------------------------------------------------


class Receiver(ThreadingHTTPServer):
    """Endpoints that note what they are sent. Those in `down` answer 503."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Endpoint)
        self.got: dict[str, list[int]] = {}
        self.down: set[str] = set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Endpoint(BaseHTTPRequestHandler):
    server: Receiver  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Idempotency-Key"]
        self.server.got.setdefault(self.path, []).append(body["number"])
        self.send_response(503 if self.path in self.server.down else 204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Requests are noted, not logged."""


async def test_each_endpoint_gets_its_events_in_order_while_another_one_fails_and_none_is_lost(
    qworker_memory: Callable[[Tasks[Any]], Tasks[Any]],
    qworker_clock: FakeClock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    webhooks = load("webhooks")
    qworker_memory(webhooks.tasks)

    async def run_after(seconds: float) -> None:
        qworker_clock.advance(seconds)
        await run_until_idle(webhooks.tasks)

    with serving(Receiver()) as receiver:

        async def emit(path: str, number: int) -> None:
            await asyncio.to_thread(webhooks.emit, receiver.url + path, json.dumps({"number": number}))

        receiver.down.add("/b")
        for number in range(1, 7):
            await emit("/a" if number % 2 else "/b", number)
        await run_after(0)
        assert receiver.got == {"/a": [1, 3, 5], "/b": [2]}
        # While an event waits for its retry, a new one waits behind it.
        await emit("/b", 7)
        await run_after(3)
        assert receiver.got["/b"] == [2, 2]
        receiver.down.clear()
        await run_after(6)
        assert receiver.got["/b"] == [2, 2, 2, 4, 6, 7]
        # As a process leaves it that is killed between the commit and the call.
        with webhooks.transaction() as database:
            webhooks.add_event(database, f"{receiver.url}/a", '{"number": 8}')
        await run_after(10)
        assert receiver.got["/a"] == [1, 3, 5, 8]


# -- the report --------------------------------------------------------------------------------------------------------


def opened_by_a_reader(pipe: Path, process: Process) -> int:
    """Wait until a handler reads a named pipe, and return its other end."""

    def try_open() -> int:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            assert error.errno == errno.ENXIO  # noqa: PT017 - no handler has opened it yet
            return 0

    return wait_for(try_open, "a handler that reads", lambda: process.text)


def leased_in(folder: Path) -> set[str]:
    """Return the report and its parts that are leased, by the last argument of each."""

    async def read() -> set[str]:
        backend = open_backend(f"file://{folder}/spool/report")
        leased = await list_messages(backend, "default", Query(State.LEASED))
        await backend.aclose()
        calls = [json.loads(one.message.body) for one in leased]
        return {"report" if call["task"] == "report" else call["args"][0] for call in calls}

    return asyncio.run(read())


def test_a_report_waits_for_its_parts_at_one_slot_and_does_not_repeat_them_after_a_kill(folder: Path) -> None:
    for name, text in {"first": "a b", "second": "a b c", "last": "a"}.items():
        (folder / name).write_text(text)
    os.mkfifo(folder / "slow")
    with started(folder, "first", "second", "slow", "last", program=("report.py",)) as command:
        with started(folder, "run", "report:tasks", "-c", "1") as killed:
            end = opened_by_a_reader(folder / "slow", killed)
            # A part that has run, but is not acked yet, may run again.
            wait_for(lambda: leased_in(folder) == {"report", "slow"}, "two acked parts", lambda: killed.text)
            killed.popen.kill()
            killed.popen.wait()
            os.close(end)
        # A part that runs again would count these.
        for name in ("first", "second"):
            (folder / name).write_text("")
        with started(folder, "run", "report:tasks", "-c", "1") as worker:
            end = opened_by_a_reader(folder / "slow", worker)
            os.write(end, b"a b c d e")
            os.close(end)
            assert command.end() == 0, command.text + worker.text
            assert worker.drain() == 0, worker.text
        *shown, last = command.lines
        assert last == "{'first': 2, 'second': 3, 'slow': 5, 'last': 1}"
        assert shown[-1] == "4 of 4"
