"""Worker processes on Redis that are killed or stopped past their leases, with clock jumps and server restarts."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.message import Draft, Query, SettleAction, Settlement, State
from qworker.testing.wait_until import wait_until
from tests.support.depth import DEPTH
from tests.support.processes import pause
from tests.support.servers import RedisServer

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

PROGRAMS = Path(__file__).with_name("redis_programs.py")
QUEUE = "work"
CONCURRENCY = 10
PATIENCE = 90.0


@contextmanager
def running(name: str, url: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A program, killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAMS), name, url, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lines(folder: Path, book: str) -> list[str]:
    path = folder / book
    return path.read_text().split() if path.exists() else []


async def stored(backend: Backend) -> set[str]:
    return {row.message.id for state in State for row in await list_messages(backend, QUEUE, Query(state))}


async def check_invariant(backend: Backend, folder: Path) -> Counter[str]:
    """Accepted - finished - still stored = nothing, and every finished message was published."""
    still, finished = await stored(backend), Counter(lines(folder, "finished"))
    assert set(lines(folder, "accepted")) - finished.keys() - still == set(), "lost"
    assert (finished.keys() | still) - set(lines(folder, "attempted")) == set(), "published by nobody"
    return finished


async def drained(process: subprocess.Popen[str], backend: Backend) -> None:
    """Let a worker finish everything, and stop it."""

    async def empty() -> bool:
        assert process.poll() is None, "the worker ended"
        return not await stored(backend)

    await wait_until(empty, timeout=PATIENCE)
    process.send_signal(signal.SIGTERM)
    told, _ = await asyncio.to_thread(process.communicate, None, PATIENCE)
    assert process.returncode == 0, told[-2000:]


async def test_a_worker_outlives_restarts_of_redis_and_nothing_is_lost(tmp_path: Path) -> None:
    with (
        RedisServer(appendonly="yes", appendfsync="always") as server,
        running("work", server.url, tmp_path) as worker,
        running("publish", server.url, tmp_path) as publisher,
    ):
        for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
            before = len(lines(tmp_path, "finished"))
            await wait_until(lambda before=before: len(lines(tmp_path, "finished")) > before + 60, timeout=PATIENCE)
            server.stop(how)
            server.start()
        before = len(lines(tmp_path, "finished"))
        await wait_until(lambda: len(lines(tmp_path, "finished")) > before, timeout=PATIENCE)
        (tmp_path / "stop").touch()
        assert await asyncio.to_thread(publisher.wait, PATIENCE) == 0
        backend = open_backend(server.url)
        await drained(worker, backend)
        finished = await check_invariant(backend, tmp_path)
        await backend.aclose()
        # What ran as Redis died was settled when it came back, and ran once.
        assert finished.total() == len(finished)


async def test_killed_workers_and_publishers_lose_nothing(tmp_path: Path) -> None:
    draw, kills = random.Random(5), 0
    with RedisServer(moved_clock=True) as server:
        backend = open_backend(server.url)
        for _ in range(6 * DEPTH):
            with (
                running("publish", server.url, tmp_path),
                running("work", server.url, tmp_path),
                running("work", server.url, tmp_path),
            ):
                before = len(lines(tmp_path, "finished"))
                enough = before + draw.randrange(100)
                await wait_until(lambda enough=enough: len(lines(tmp_path, "finished")) > enough, timeout=PATIENCE)
            kills += 2
            await check_invariant(backend, tmp_path)
        await backend.aclose()
        # Who held leases is dead, and no time passes for others. No worker has seen the clock move.
        server.advance(60)
        with server.client() as client:
            client.hdel(f"{{qworker:{QUEUE}}}:meta", "seen")
        backend = open_backend(server.url)
        with running("work", server.url, tmp_path) as worker:
            await drained(worker, backend)
        finished = await check_invariant(backend, tmp_path)
        await backend.aclose()
        assert finished.total() - len(finished) <= kills * CONCURRENCY


async def test_leases_that_outlived_their_holder_are_refused(tmp_path: Path) -> None:
    with RedisServer() as server:
        backend = open_backend(server.url)
        for turn in range(2):
            folder = tmp_path / str(turn)
            folder.mkdir()
            ids = await backend.publish(QUEUE, [Draft(body=b"x") for _ in range(20)])
            with running("hold", server.url, folder) as holder:
                await wait_until(lambda folder=folder: len(lines(folder, "held")) == 20, timeout=PATIENCE)
                pause(holder.pid)
                taken: list[str] = []

                async def take(taken: list[str] = taken) -> bool:
                    await backend.reap(QUEUE)
                    leases = await backend.lease(QUEUE, 20, 300.0)
                    assert all(lease.message.tries == 1 for lease in leases)
                    taken += [lease.message.id for lease in leases]
                    assert (
                        await backend.settle([Settlement(lease=one, action=SettleAction.ACK) for one in leases]) == []
                    )
                    return len(taken) >= 20

                await wait_until(take, timeout=PATIENCE)
                os.kill(holder.pid, signal.SIGCONT)
                told, _ = await asyncio.to_thread(holder.communicate, "\n", PATIENCE)
                assert told.split() == ["2", "20"]
            assert sorted(taken) == sorted(ids)
        await backend.aclose()


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
async def test_a_server_clock_that_jumps_an_hour_takes_no_live_lease_and_prolongs_no_dead_one(
    tmp_path: Path, jump: float
) -> None:
    with RedisServer(moved_clock=True) as server:
        backend = open_backend(server.url)
        await backend.publish(QUEUE, [Draft(body=b"held", id="held"), Draft(body=b"dead", id="dead")])
        held, dead = await backend.lease(QUEUE, 2, 600.0)

        async def rounds() -> None:
            seen = len(lines(tmp_path, "rounds"))
            await wait_until(lambda: len(lines(tmp_path, "rounds")) >= seen + 3, timeout=PATIENCE)

        with running("watch", server.url, tmp_path):
            await rounds()
            server.advance(jump)
            await rounds()
            assert lines(tmp_path, "finished") == []
            assert await asyncio.to_thread(backend.extend, [held], 1000.0) == []
        left = {row.message.id: row for row in await list_messages(backend, QUEUE, Query(State.LEASED))}[
            dead.message.id
        ]
        with server.client() as client:
            now, _ = client.time()
        assert left.expires_at is not None
        # What was left of it is left of it, give or take what this test took.
        assert 600 - PATIENCE * 4 < left.expires_at - now < 630
        assert await backend.settle([Settlement(lease=held, action=SettleAction.ACK)]) == []
        await backend.aclose()
