"""`qworker run` as one real process: its signals, its end, what a SIGKILL leaves behind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Process, started
from tests.support.waiting import becomes_true, wait_for

APP = '''
import asyncio, gc, os, sys, threading, time
from contextlib import asynccontextmanager
from qworker import Backoff, Context, Tasks

@asynccontextmanager
async def lifespan(tasks):
    if os.environ.get("BREAK_START"):
        raise RuntimeError("the lifespan is broken")
    yield None

tasks = Tasks("file://./spool", lifespan=lifespan)

def say(*words):
    # One write: lines of several processes must not mix.
    os.write(1, (" ".join(str(w) for w in words) + "\\n").encode())

@tasks.task(max_tries=2)
async def hold(context: Context, name: str) -> None:
    """Run until a file appears."""
    say("begin", name, context.tries, os.getpid())
    while not os.path.exists(f"free-{name}"):
        await asyncio.sleep(0.02)
    say("end", name, context.tries, os.getpid())

@tasks.task
async def note(name: str) -> None:
    say("noted", name, os.getpid())

@tasks.task
def stuck(name: str) -> None:
    say("begin", name)
    held_up()

def held_up() -> None:
    threading.Event().wait()

@tasks.task
async def later(name: str) -> None:
    say("later", name)

loaded = []

@tasks.task
async def collected() -> None:
    say("collected", any(found is loaded for found in gc.get_objects()))
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("QWORKER_")]:
        monkeypatch.delenv(name)
    return tmp_path


def enqueue(*calls: tuple[str, list[Any]], delay: float = 0.0) -> list[str]:
    """Enqueue calls from this process, without paying for one more."""
    from qworker import Draft
    from qworker.backend.registry import open_backend
    from qworker.enqueue.portal import run_blocking

    async def publish() -> list[str]:
        backend = open_backend("file://./spool")
        bodies = [(task, json.dumps({"task": task, "args": args}).encode()) for task, args in calls]
        drafts = [Draft(body=body, task=task, delay=delay) for task, body in bodies]
        try:
            return await backend.publish("default", drafts)
        finally:
            await backend.aclose()

    return run_blocking(publish(), instead="nothing")


def names(folder: Path, state: str) -> list[str]:
    place = folder / "spool" / "default" / state
    return sorted(n for n in os.listdir(place) if not n.startswith(".")) if place.is_dir() else []


def worker(folder: Path, *options: str) -> Any:
    return started(folder, "run", "app:tasks", "--log-format", "json", *options)


def test_sigterm_finishes_what_runs_and_leases_nothing_more(folder: Path) -> None:
    enqueue(("hold", ["a"]), ("note", ["b"]))
    with worker(folder, "-c", "1") as process:
        process.line("begin a 0")
        process.signal(signal.SIGTERM)
        process.event("worker_draining")
        (folder / "free-a").touch()
        assert process.end() == 0, process.text
        assert "end a 0" in process.text
        assert "noted b" not in process.text
    assert len(names(folder, "queue")) + len(names(folder, "delay")) == 1


def test_a_second_signal_releases_what_runs_with_its_tries_unchanged(folder: Path) -> None:
    enqueue(("hold", ["a"]))
    with worker(folder) as process:
        process.line("begin a 0")
        process.signal(signal.SIGINT)
        process.event("worker_draining")
        process.signal(signal.SIGINT)
        assert process.end() == 4, process.text
    waiting = names(folder, "queue") + names(folder, "delay")
    assert len(waiting) == 1
    assert "_0_hold" in waiting[0]
    assert not names(folder, "lease")


def test_a_killed_workers_message_runs_again_and_after_max_tries_lies_in_fail(folder: Path) -> None:
    [message_id] = enqueue(("hold", ["a"]))
    with worker(folder) as first:
        first.line("begin a 0")
        assert "_0_hold" in names(folder, "lease")[0]
        first.signal(signal.SIGKILL)
        first.end()
    with worker(folder) as second:
        second.line("begin a 1")
        # The zero in front of the tries counts the death.
        assert "_01_hold" in names(folder, "lease")[0]
        second.signal(signal.SIGKILL)
        second.end()
    with worker(folder) as third:
        wait_for(lambda: names(folder, "fail"), "a failed message", lambda: third.text)
        assert third.drain() == 0
        assert "begin a" not in third.text
    assert "_002_hold" in names(folder, "fail")[0]
    reasons = [p.read_text() for p in (folder / "spool/default/fail").glob(".*.reason")]
    assert len(reasons) == 1
    assert "may be killing its workers" in reasons[0]
    assert message_id.split("_")[0] in names(folder, "fail")[0]


def test_the_end_of_the_grace_period_is_told_by_the_exit_status(folder: Path) -> None:
    enqueue(("stuck", ["a"]))
    with worker(folder, "--shutdown-timeout", "0.2") as process:
        process.line("begin a")
        assert process.drain() == 4, process.text


def test_sigusr1_tells_what_each_handler_is_doing(folder: Path) -> None:
    enqueue(("hold", ["a"]), ("stuck", ["b"]))
    with worker(folder, "--shutdown-timeout", "0") as process:
        process.line("begin a 0")
        process.line("begin b")
        wanted = [
            ": 2 running",
            "lease left",
            # Where both stand: the coroutine, and the function that the thread is in.
            " hold: await asyncio.sleep",
            " held_up: threading.Event().wait()",
        ]

        def told() -> bool:
            # Until the handlers have come to where they stay.
            process.signal(signal.SIGUSR1)
            return becomes_true(lambda: all(words in process.text for words in wanted), within=0.2)

        wait_for(told, "the report", lambda: process.text)


def test_sigtstp_quiets_a_worker_that_stays(folder: Path) -> None:
    with worker(folder) as process:
        process.event("worker_started")
        process.signal(signal.SIGTSTP)
        process.event("worker_quiet")
        enqueue(("note", ["a"]))
        assert process.drain() == 0
        assert "noted" not in process.text
    assert len(names(folder, "queue")) == 1


def test_a_burst_ends_without_waiting_for_what_is_due_later(folder: Path) -> None:
    enqueue(*(("note", [str(n)]) for n in range(5)))
    enqueue(("later", ["z"]), delay=3600)
    with worker(folder, "--burst") as process:
        assert process.end() == 0, process.text
        assert sum("noted" in line for line in process.lines) == 5
    assert len(names(folder, "delay")) == 1


def test_the_garbage_collector_does_not_go_through_what_is_loaded(folder: Path) -> None:
    enqueue(("collected", []))
    with worker(folder, "--burst") as process:
        process.line("collected False")
        assert process.end() == 0, process.text


def test_max_messages_replaces_the_process_and_drops_none(folder: Path) -> None:
    enqueue(*(("note", [str(n)]) for n in range(7)))
    with worker(folder, "--burst", "--max-messages", "3", "-c", "2") as process:
        assert process.end() == 0, process.text
        noted = [line.split() for line in process.lines if line.startswith("noted")]
        assert sorted(name for _, name, _ in noted) == [str(n) for n in range(7)]
        # The same process id, a fresh process each time.
        assert {int(pid) for _, _, pid in noted} == {process.pid}
        assert len(process.events("worker_started")) == 3


def test_max_memory_replaces_the_process(folder: Path) -> None:
    with worker(folder, "--max-memory", "1") as process:
        process.event("worker_started", 2)
        assert "more than 1" in process.event("worker_recycling")["reason"]


def test_reload_runs_new_code_and_survives_a_broken_one(folder: Path) -> None:
    with worker(folder, "--reload") as process:
        process.event("worker_started")
        edit_until(folder, "tasks = 1 +\n", lambda: process.events("import_failed"), process)
        edit_until(
            folder, APP.replace('"noted"', '"noted anew"'), lambda: len(process.events("worker_started")) > 1, process
        )
        enqueue(("note", ["a"]))
        process.line(f"noted anew a {process.pid}")


def edit_until(folder: Path, source: str, condition: Callable[[], Any], process: Process) -> None:
    """Save the source until it has an effect: when the watch on it begins is not known."""

    def save_and_wait() -> bool:
        (folder / "app.py").write_text(source)
        return becomes_true(condition, within=2.0)

    wait_for(save_and_wait, "an effect of the new source", lambda: process.text)


def test_a_crash_at_the_start_has_status_1_and_a_traceback(folder: Path) -> None:
    with started(folder, "run", "app:tasks", env={"BREAK_START": "1"}) as process:
        assert process.end() == 1
        assert "RuntimeError: the lifespan is broken" in process.text


def test_a_worker_that_cannot_reach_its_backend_ends_with_status_3(folder: Path) -> None:
    url = f"unix://{folder}/no-such.sock"
    with started(folder, "run", "app:tasks", "--url", url) as process:
        assert process.end() == 3, process.text
        assert "Traceback" not in process.text
        assert sum(line.startswith("qworker: ") for line in process.lines) == 1
