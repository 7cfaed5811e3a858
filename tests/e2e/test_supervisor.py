"""`qworker run -w N` in real processes (restarts, drains, a dead supervisor), and its decisions with a fake clock."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qworker.supervisor.scaling import Scaler
from qworker.supervisor.worker_process import Slot, WorkerProcess
from qworker_redis.keys import REGISTER, queue_key
from tests.e2e.test_run import APP, enqueue, names
from tests.support.processes import Process, alive, started
from tests.support.servers import RedisServer, free_port
from tests.support.waiting import wait_for

# What process id 1 is by nature, a process can make itself; the attribute (36) survives the exec.
AS_INIT = (
    "-c",
    """
import ctypes, os, sys
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0
os.execv(sys.executable, [sys.executable, "-m", "qworker", *sys.argv[1:]])
""",
)

# Started by a program that had blocked its signals, and has handed its mask on.
BLOCKED = (
    "-c",
    """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
os.execv(sys.executable, [sys.executable, "-m", "qworker", *sys.argv[1:]])
""",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def workers(process: Process, count: int) -> list[int]:
    """The process ids of the first `count` workers, when they work."""
    process.event("worker_started", count)
    return [int(e["pid"]) for e in process.events("worker_process_started")][:count]


def two(folder: Path, *options: str, **more: Any) -> Any:
    return started(folder, "run", "app:tasks", "-w", "2", "-c", "1", "--log-format", "json", *options, **more)


def test_a_supervisor_that_was_started_with_blocked_signals_hears_them(folder: Path) -> None:
    with two(folder, program=BLOCKED) as process:
        workers(process, 2)
        assert process.drain() == 0, process.text


def test_a_killed_worker_is_replaced_and_its_message_runs_again(folder: Path) -> None:
    enqueue(("hold", ["a"]))
    with two(folder) as process:
        victim = int(process.line("begin a 0").split()[3])
        os.kill(victim, signal.SIGKILL)
        ended = process.event("worker_process_ended")
        assert (ended["pid"], ended["signal"]) == (victim, "SIGKILL")
        process.event("worker_process_started", 3)
        assert int(process.line("begin a 1").split()[3]) != victim
        (folder / "free-a").touch()
        process.line("end a 1")
        workers(process, 3)
        assert process.drain() == 0, process.text
    assert not [*names(folder, "queue"), *names(folder, "lease"), *names(folder, "delay"), *names(folder, "fail")]


def test_sigterm_drains_every_worker_and_a_second_one_releases(folder: Path) -> None:
    enqueue(("hold", ["a"]), ("hold", ["b"]))
    with two(folder) as process:
        process.line("begin a 0")
        process.line("begin b 0")
        pids = workers(process, 2)
        process.signal(signal.SIGTERM)
        process.event("worker_draining", 2)
        (folder / "free-a").touch()
        process.line("end a 0")
        process.signal(signal.SIGTERM)
        assert process.end() == 4, process.text
        assert not any(alive(pid) for pid in pids)
    waiting = [*names(folder, "queue"), *names(folder, "delay")]
    assert len(waiting) == 1
    assert "_0_hold" in waiting[0]


def test_workers_drain_when_their_supervisor_is_killed(folder: Path) -> None:
    with two(folder) as process:
        pids = workers(process, 2)
        process.signal(signal.SIGKILL)
        process.end()
        wait_for(lambda: not any(alive(pid) for pid in pids), "the workers' end", lambda: process.text)
        assert len(process.events("worker_draining")) == 2


def test_a_supervised_burst_recycles_and_ends(folder: Path) -> None:
    enqueue(*(("note", [str(n)]) for n in range(8)))
    with two(folder, "--burst", "--max-messages", "3") as process:
        assert process.end() == 0, process.text
        assert sorted(line.split()[1] for line in process.lines if line.startswith("noted")) == [
            str(n) for n in range(8)
        ]


def test_what_keeps_the_first_worker_from_starting_ends_the_supervisor(folder: Path) -> None:
    with started(folder, "run", "nope:tasks", "-w", "2") as process:
        assert process.end() == 2, process.text
        assert "no module 'nope'" in process.text
        assert "Traceback" not in process.text


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


def break_register(server: RedisServer, spool: Path) -> str:
    with server.client() as client:
        client.flushall()
        client.rpush(REGISTER, "x")
    return f"redis://127.0.0.1:{server.port}/0"


def break_queue(server: RedisServer, spool: Path) -> str:
    with server.client() as client:
        client.flushall()
        client.set(queue_key("default", "meta"), "x")
    return f"redis://127.0.0.1:{server.port}/0"


def write_with_newer_release(server: RedisServer, spool: Path) -> str:
    with server.client() as client:
        client.flushall()
        client.hset(queue_key("default", "meta"), "version", "99")
    return f"redis://127.0.0.1:{server.port}/0"


def write_directory_with_newer_release(server: RedisServer, spool: Path) -> str:
    (spool / "default").mkdir(parents=True)
    (spool / "default" / "format").write_text("qworker directory 99\n")
    return f"file://{spool}"


def put_file_in_its_place(server: RedisServer, spool: Path) -> str:
    spool.write_bytes(b"precious")
    return f"fsq://{spool}"


def take_permission(server: RedisServer, spool: Path) -> str:
    # Nobody can make a directory there, not even root.
    return "vsqs:///sys/spool"


@pytest.mark.parametrize(
    ("break_store", "words"),
    [
        (break_register, "the Redis key qworker:queues is not a set: rename this key"),
        (break_queue, "queue 'default' cannot be used, because the Redis key {qworker:default}:meta is not a hash"),
        (write_with_newer_release, "this release reads only 1: upgrade qworker"),
        (write_directory_with_newer_release, "upgrade qworker"),
        (put_file_in_its_place, "a file where a directory should be: check the URL"),
        (take_permission, "cannot"),
    ],
)
def test_a_store_that_can_never_be_used_ends_the_supervisor_as_it_ends_a_worker(
    break_store: Callable[[RedisServer, Path], str], words: str, server: RedisServer, folder: Path
) -> None:
    url = break_store(server, folder / "spool")
    for count in ("1", "2"):
        with started(folder, "run", "app:tasks", "-w", count, "--url", url, "--log-level", "warning") as process:
            assert process.end() == 3, process.text
            # One of each process.
            said = [line for line in process.lines if line.startswith("qworker: ")]
            assert len(said) == process.text.count(words) <= int(count), process.text
            assert said
            assert "Traceback" not in process.text


def test_as_an_init_it_reaps_strangers_orphans(folder: Path) -> None:
    (folder / "app.py").write_text(
        APP
        + """
import subprocess
@tasks.task
async def leave(name: str) -> None:
    # Its parent, a shell, ends at once: the sleeper is handed to the nearest init above.
    done = subprocess.run(["sh", "-c", "sleep 0.3 >/dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE)
    say("left", int(done.stdout))
"""
    )
    with two(folder, "--log-level", "debug", program=AS_INIT) as process:
        enqueue(("leave", ["x"]))
        orphan = int(process.line("left ").split()[1])
        process.line(lambda line: '"event":"orphan_reaped"' in line and f'"pid":{orphan}' in line)
        workers(process, 2)
        assert process.drain() == 0, process.text


def test_the_number_of_workers_follows_the_backlog_up_at_once_and_down_after_a_while() -> None:
    scaler = Scaler(least=1, most=4, concurrency=10)
    assert scaler.observe(0, now=0.0) == 1
    assert scaler.observe(11, now=1.0) == 2
    assert scaler.observe(1000, now=2.0) == 4
    assert scaler.observe(5, now=3.0) == 4
    assert scaler.observe(5, now=32.0) == 4
    # Thirty seconds in which fewer were enough: one less, and then again.
    assert scaler.observe(5, now=33.0) == 3
    assert scaler.observe(5, now=62.0) == 3
    assert scaler.observe(30, now=62.5) == 3
    assert scaler.observe(5, now=63.0) == 3
    assert scaler.observe(5, now=93.0) == 2


def test_a_worker_that_crashes_at_its_start_is_restarted_ever_later() -> None:
    slot = Slot(0)
    delays = [slot.on_process_exit(0.0, crashed=True, draw=0.5) for _ in range(10)]
    assert delays == sorted(delays)
    assert delays[0] < 1.0
    assert delays[-1] == pytest.approx(22.5)


@pytest.mark.parametrize(
    ("ready_for", "crashed", "waits"), [(0.9, True, True), (0.9, False, True), (4.0, True, True), (4.0, False, False)]
)
def test_a_process_that_ends_soon_is_started_again_later(ready_for: float, crashed: bool, waits: bool) -> None:
    assert (_delay_after(ready_for, crashed=crashed) > 0) is waits


def test_a_worker_that_crashes_after_it_has_worked_is_restarted_at_once() -> None:
    assert _delay_after(5.0, crashed=True) == 0


def _delay_after(ready_for: float, *, crashed: bool) -> float:
    slot = Slot(0)
    slot.process = object.__new__(WorkerProcess)
    slot.process.ready_at = 100.0
    return slot.on_process_exit(100.0 + ready_for, crashed=crashed, draw=0.5)


def test_a_worker_with_a_range_of_processes_starts_with_the_least(folder: Path) -> None:
    enqueue(("hold", ["a"]), ("hold", ["b"]), ("hold", ["c"]))
    with started(
        folder, "run", "app:tasks", "-w", "1:2", "-c", "1", "--log-format", "json", "--shutdown-timeout", "0"
    ) as process:
        # One slot is full, and two messages wait: the second process comes.
        process.line("begin a 0")
        assert process.event("workers_scaled")["workers"] == 2
        process.line("begin b 0")
        workers(process, 2)
        assert process.drain() == 4
