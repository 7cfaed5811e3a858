"""Threads for blocking calls: one kind that hangs holds up no other."""

from __future__ import annotations

import ast
import asyncio
import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qworker import bulk
from qworker.backend.registry import open_backend
from qworker.kit.directory.doctor import examine_directory
from qworker.kit.threads import BlockingCall, run_in_thread
from qworker.message import Draft
from tests.support.waiting import give_turns

ROOT = Path(__file__).parents[2]
# Calls in the default executor, with their reason.
IN_THE_EXECUTOR = {
    "backends/qworker_redis/": "its own calls resolve names",
    "qworker/cli/demo.py": "waits for a process, and runs nothing else",
    "qworker/cli/demo_ui.py": "waits for a process, and runs nothing else",
    "qworker/testing/": "tests",
    "qworker/worker/handlers/isolated_main.py": "its process runs one handler, and nothing else",
}


@pytest.fixture
def hold() -> threading.Event:
    return threading.Event()


async def test_a_kind_that_hangs_holds_up_no_name_resolution_and_no_doctor(tmp_path, hold):
    stuck = [asyncio.create_task(run_in_thread(BlockingCall.STAGE, hold.wait, 100)) for _ in range(40)]
    try:
        await give_turns()
        async with asyncio.timeout(40):
            assert await asyncio.get_running_loop().getaddrinfo("localhost", 80)
            assert await examine_directory(tmp_path)
        assert not any(call.done() for call in stuck)
    finally:
        hold.set()
        assert await asyncio.gather(*stuck) == [True] * 40


async def test_a_kind_runs_no_more_calls_at_once_than_its_limit(hold):
    lock, running, most = threading.Lock(), 0, 0

    def call() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        hold.wait(100)
        with lock:
            running -= 1

    calls = [asyncio.create_task(run_in_thread(BlockingCall.DELETE, call)) for _ in range(20)]
    async with asyncio.timeout(40):
        while running < 2:
            await asyncio.sleep(0)
        await give_turns()
        hold.set()
        await asyncio.gather(*calls)
    assert most == 2


def test_each_event_loop_has_limits_of_its_own():
    async def use_all() -> list[int]:
        return await asyncio.gather(*[run_in_thread(BlockingCall.DELETE, os.getpid) for _ in range(5)])

    with ThreadPoolExecutor(4) as loops:
        results = [loops.submit(asyncio.run, use_all()) for _ in range(8)]
        assert [result.result(timeout=40) for result in results] == [[os.getpid()] * 5] * 8


async def test_loads_that_wait_for_a_lock_hold_up_no_discard(tmp_path):
    backend = open_backend(f"memory://{tmp_path.name}")
    folder = tmp_path / "folder"
    writer = bulk.open(backend, "q", "load", folder)
    manifest = await writer.seal(0, [await writer.stage("run", 0, "first", [[Draft(body=b"x")]])])
    assert manifest is not None
    lock = os.open(folder / "q" / "lock-load", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    waiting = [asyncio.create_task(bulk.open(backend, "q", "load", folder).publish(manifest)) for _ in range(40)]
    try:
        await give_turns()
        async with asyncio.timeout(40):
            await bulk.open(backend, "q", "other", folder).discard("run")
        assert not any(call.done() for call in waiting)
    finally:
        os.close(lock)
    async with asyncio.timeout(40):
        done = await asyncio.gather(*waiting)
    assert {load.rows for load in done} == {1}
    assert len(await backend.lease("q", 10, 30.0)) == 1
    await backend.aclose()


def test_nothing_but_the_exceptions_uses_the_default_executor():
    found = set()
    for folder in ("qworker", "backends"):
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_bytes())):
                used = (
                    isinstance(node, ast.Attribute)
                    and node.attr == "to_thread"
                    and ast.unparse(node.value) == "asyncio"
                )
                default = (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr == "run_in_executor"
                    and ast.unparse(node.args[0]) == "None"
                )
                if used or default:
                    found.add(next((place for place in IN_THE_EXECUTOR if name.startswith(place)), name))
    assert found == set(IN_THE_EXECUTOR)
