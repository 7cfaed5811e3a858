"""Calls from code without an event loop: in threads, after a fork, with signals, and under gevent."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qworker import State, Tasks
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.enqueue import portal
from qworker.message import Query

PROGRAM = """
from gevent import monkey

monkey.patch_all({patched})

import asyncio
import gevent
from qworker import Tasks

tasks = Tasks("file://./spool")


@tasks.task(result=60)
def work(n: int) -> None: ...


def told(n):
    try:
        return work.enqueue_sync(n).id if n % 2 else work.job("x").result_sync(1)
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"


def advised(n):
    job = gevent.get_hub().threadpool.apply(lambda: asyncio.run(work.enqueue(n)))
    return f"stored {{job.queue}}"


greenlets = [gevent.spawn({call}, n) for n in range(5)]
gevent.joinall(greenlets, timeout=30, raise_error=True)
print("\\n".join(greenlet.value for greenlet in greenlets))
"""


def run(folder: Path, call: str, patched: str = "") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(call=call, patched=patched)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("patched", "problem"), [("", "gevent has replaced threads"), ("thread=False", "gevent has replaced select")]
)
def test_under_gevent_every_blocking_call_is_refused_with_what_to_do(tmp_path, patched, problem):
    lines = run(tmp_path, "told", patched)
    assert len(lines) == 5
    for line in lines:
        assert line.startswith(f"UsageError: {problem}")
        assert "gunicorn -k gthread" in line


async def create_default(folder: Path) -> None:
    backend = open_backend(f"file://{folder}/spool")
    await backend.create("default")
    await backend.aclose()


def test_what_the_refusal_says_to_do_works_in_every_greenlet(tmp_path):
    # Five threads that create one queue would open and close many files: gevent's `os.close` in a thread can take a
    # number that is open again for one that it is still closing.
    asyncio.run(create_default(tmp_path))
    assert run(tmp_path, "advised") == ["stored default"] * 5
    assert len(list((tmp_path / "spool" / "default" / "queue").iterdir())) == 5


# -- threads, forks and signals ----------------------------------------------------------------------------------------


def execute(folder: Path, program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_call_that_ends_just_after_a_wait_gives_its_value():
    class Late(concurrent.futures.Future):
        """It ends between the end of a wait and the next look."""

        def result(self, timeout=None):
            if not self.done():
                self.set_result(7)
                raise concurrent.futures.TimeoutError
            return super().result(timeout)

    assert portal._result(Late()) == 7


def test_all_threads_use_one_loop_in_one_thread():
    apps = [Tasks("memory://portal"), Tasks("memory://portal")]
    start = threading.Barrier(8)

    async def where() -> tuple[asyncio.AbstractEventLoop, int]:
        return asyncio.get_running_loop(), threading.get_ident()

    def call(number: int) -> tuple[asyncio.AbstractEventLoop, int]:
        start.wait(50)
        return apps[number % 2]._run_sync(where())

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(call, range(8)))) == 1


FORKS = """
import os, sys, threading
from qworker import Tasks
from qworker.enqueue import portal

tasks = Tasks("file://./spool?sync=off")


@tasks.task
def work(n: int) -> None: ...


def fork(n):
    pid = os.fork()
    if pid == 0:
        work.enqueue_sync(n)
        os._exit(0)
    return pid


work.enqueue_sync(0)
# The child's copy of a lock stays locked if another thread of the parent had it.
held, forked = threading.Event(), threading.Event()


def hold():
    with portal._background.lock:
        held.set()
        forked.wait()


threading.Thread(target=hold).start()
held.wait()
children = [fork(1)]
forked.set()
ended = threading.Event()


def enqueue():
    n = 100
    while not ended.is_set():
        work.enqueue_sync(n := n + 1)


threads = [threading.Thread(target=enqueue) for _ in range(2)]
for thread in threads:
    thread.start()
children += [fork(n) for n in range(2, 12)]
for pid in children:
    assert os.waitpid(pid, 0)[1] == 0
ended.set()
for thread in threads:
    thread.join()
work.enqueue_sync(12)
"""


def test_a_forked_child_enqueues_whatever_the_threads_of_its_parent_do(tmp_path):
    execute(tmp_path, FORKS)
    backend = open_backend(f"file://{tmp_path}/spool")

    async def arguments() -> set[int]:
        messages = await list_messages(backend, "default", Query(State.READY))
        await backend.aclose()
        return {json.loads(stored.message.body)["args"][0] for stored in messages}

    assert {*range(13)} <= asyncio.run(arguments())


SIGNAL = """
import asyncio, signal, sys, threading, time
from qworker import Tasks

tasks = Tasks("memory:")
started, cancelled = threading.Event(), threading.Event()


async def hang():
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        cancelled.set()


def interrupt():
    started.wait()
    while sys._current_frames()[threading.main_thread().ident].f_code.co_name != "wait":
        time.sleep(0.001)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)


threading.Thread(target=interrupt).start()
try:
    tasks._run_sync(hang())
except KeyboardInterrupt:
    print("interrupted")
print("cancelled", cancelled.wait(50))


async def answer():
    return "still serves"


print(tasks._run_sync(answer()))
"""


def test_a_signal_in_another_thread_ends_a_call_that_blocks(tmp_path):
    assert execute(tmp_path, SIGNAL) == ["interrupted", "cancelled True", "still serves"]
