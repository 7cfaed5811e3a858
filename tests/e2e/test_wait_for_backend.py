"""`qworker run --wait-for-backend` as real processes, beside a Redis that starts late, never, or refuses them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qworker import Draft
from qworker.backend.registry import open_backend
from tests.support.processes import Process, started
from tests.support.servers import RedisServer

APP = """
import asyncio, os
from contextlib import asynccontextmanager
from qworker import Tasks

def say(*words):
    os.write(1, (" ".join(str(w) for w in words) + "\\n").encode())

@asynccontextmanager
async def lifespan(tasks):
    yield None
    say("leaving")
    while os.path.exists("stay"):
        await asyncio.sleep(0.02)

tasks = Tasks(lifespan=lifespan)

@tasks.task
async def note(name: str) -> None:
    say("noted", name)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """Not started yet."""
    with RedisServer(start=False) as server:
        yield server


def worker(folder: Path, server: RedisServer, *options: str, **more: Any) -> Any:
    return started(folder, "run", "app:tasks", "--url", server.url, "--log-format", "json", *options, **more)


def note(server: RedisServer, name: str) -> None:
    async def publish() -> None:
        backend = open_backend(server.url)
        await backend.publish("default", [Draft(body=json.dumps({"task": "note", "args": [name]}).encode())])
        await backend.aclose()

    asyncio.run(publish())


def said(process: Process, name: str) -> int:
    return len([event for event in process.events(name) if event.get("loop") == "start"])


@pytest.mark.parametrize("count", [1, 2])
def test_workers_wait_for_a_redis_that_starts_late(folder: Path, server: RedisServer, count: int) -> None:
    with worker(folder, server, "--wait-for-backend", "-w", str(count)) as process:
        process.event("backend_unavailable", count)
        server.start()
        process.event("worker_started", count)
        note(server, "late")
        process.line("noted late")
        assert process.drain() == 0, process.text
        # Once for the outage, not once for an attempt.
        assert (said(process, "backend_unavailable"), said(process, "backend_recovered")) == (count, count)


@pytest.mark.parametrize("count", [1, 2])
def test_a_signal_ends_workers_that_wait(folder: Path, server: RedisServer, count: int) -> None:
    with worker(folder, server, "--wait-for-backend", "-w", str(count)) as process:
        process.event("backend_unavailable", count)
        assert process.drain() == 0, process.text
        assert not process.events("worker_started")


@pytest.mark.parametrize("count", [1, 2])
def test_nobody_waits_who_was_not_told_to(folder: Path, server: RedisServer, count: int) -> None:
    with worker(folder, server, "-w", str(count)) as process:
        assert process.end() == 3, process.text
        assert "Traceback" not in process.text
        assert 1 <= sum(line.startswith("qworker: ") for line in process.lines) <= count


def test_nobody_waits_for_a_redis_that_refuses_him(folder: Path) -> None:
    with RedisServer(start=False, requirepass="sesame") as server:
        server.start()
        with worker(folder, server, "--wait-for-backend") as process:
            assert process.end() == 3, process.text
            assert "Redis asks for a password" in process.text


def test_a_worker_that_replaces_itself_waits_for_a_redis_that_is_away_then(folder: Path, server: RedisServer) -> None:
    server.start()
    (folder / "stay").touch()
    with worker(folder, server, "--max-messages", "1") as process:
        note(server, "first")
        process.line("leaving")
        server.stop()
        (folder / "stay").unlink()
        process.event("backend_unavailable")
        server.start()
        note(server, "second")
        process.line("noted second")
        process.event("worker_started", 2)
