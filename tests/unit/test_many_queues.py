"""Many queues need few open files: queues are opened when they are used, and closed when others need the room."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import RedisServer, free_port

ROOT = Path(__file__).parents[2]
SCHEMES = ("file", "fsq", "vsqs", "sq", "mq", "rfq")
# Queues, and the files that the process may have open.
SIZES = [(120, 512), (200, 1024)]

PROGRAM = """
import asyncio, json, os, resource, sys
from qworker import Tasks
from qworker.backend.registry import open_backend
from qworker.message import Draft, SettleAction, Settlement
from qworker.worker import Worker, WorkerOptions

url, count, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
names = [f"q{number:04d}" for number in range(count)]

def open_files():
    return len(os.listdir("/proc/self/fd"))
"""

CALLS = """
async def use(backend, name):
    await backend.publish(name, [Draft(body=name.encode())])
    (lease,) = await backend.lease(name, 1, 600.0)
    assert lease.message.body == name.encode()
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.RELEASE)]) == []
    assert (await backend.stats(name)).ready == 1
    await backend.reap(name)
    return open_files()

async def main():
    backend = open_backend(url)
    most = max([await use(backend, name) for name in names])
    # Those that are closed give their messages.
    held = [lease for name in names[:15] for lease in await backend.lease(name, 1, 600.0)]
    # A queue stays open while it is leased from.
    for name in names[20:]:
        await backend.stats(name)
    refused = await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in held])
    for name in names[:15]:
        stats = await backend.stats(name)
        assert (stats.ready, stats.leased) == (0, 0), stats
    # Many calls at once.
    async with asyncio.TaskGroup() as group:
        for name in names[20:30]:
            group.create_task(backend.publish(name, [Draft(body=b"x")]))
    assert [(await backend.stats(name)).ready for name in names[20:30]] == [2] * 10
    await backend.wait(names, 30.0)
    await backend.aclose()
    print(json.dumps({"most": most, "held": len(held), "refused": len(refused)}))

asyncio.run(main())
"""

WORK = """
async def main():
    ran, most = [], []
    tasks = Tasks(url)

    async def run(message):
        ran.append(message.queue)
        most.append(open_files())

    for name in names:
        tasks.raw_handler(queue=name)(run)
    backend = await tasks.backend()
    for name in names:
        await backend.publish(name, [Draft(body=b"x")])
    await Worker(tasks, WorkerOptions(burst=True)).run()
    await tasks.aclose()
    print(json.dumps({"ran": sorted(ran) == names, "most": max(most)}))

asyncio.run(main())
"""


REAP = """
import qworker.worker.reaper
from qworker.backend.reap_rounds import ReapRounds

def memory():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

async def main():
    ran, most = [], []
    tasks = Tasks(url)
    # The rounds are counted, so they need not be a second apart.
    qworker.worker.reaper._INTERVAL = 0.02
    number, last, gaps = 0, {}, {}
    is_idle, all_ran, is_done = False, asyncio.Event(), asyncio.Event()

    async def run(message):
        ran.append(message.queue)
        most.append(open_files())
        if len(ran) == len(names):
            all_ran.set()

    for name in names:
        tasks.raw_handler(queue=name)(run)
    backend = await tasks.backend()
    for name in names:
        await backend.create(name)
    before = memory()
    reap, reap_round = backend.reap, ReapRounds.run

    async def count_round(rounds):
        nonlocal number
        number += 1
        await reap_round(rounds)

    async def count_reap(queue):
        result = await reap(queue)
        most.append(open_files())
        if is_idle:
            if queue in last:
                gaps.setdefault(queue, number - last[queue])
            last[queue] = number
            if len(gaps) == len(names):
                is_done.set()
        return result

    backend.reap, ReapRounds.run = count_reap, count_round
    worker = Worker(tasks, WorkerOptions())
    working = asyncio.create_task(worker.run())
    for name in names:
        await backend.publish(name, [Draft(body=b"x")])
    async with asyncio.timeout(120):
        await all_ran.wait()
        is_idle = True
        await is_done.wait()
    grown = memory() - before
    worker.drain()
    await working
    await tasks.aclose()
    print(json.dumps({"ran": sorted(ran) == names, "most": max(most), "rounds": max(gaps.values()), "memory": grown}))

asyncio.run(main())
"""

SERVE = """
import http.client
from tests.support.serving import served

with served(open_backend(url, remote_leases=True)) as server:
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=50)

    def ask(method, path, **headers):
        client.request(method, path, b"x" if method == "POST" else None, headers)
        response = client.getresponse()
        return response.status, response.headers, response.read()

    assert {ask("POST", f"/{name}/messages")[0] for name in names} == {201}
    assert {ask("GET", f"/{name}")[0] for name in names} == {200}
    assert ask("GET", "/missing")[0] == 404
    # Expired leases become ready again, whichever queue is open.
    assert {ask("GET", f"/{name}/messages?visibility_timeout=0.1")[2] for name in names} == {b"x"}
    left = set(names)
    most = 0
    while left:
        name = min(left)
        status, headers, body = ask("GET", f"/{name}/messages?wait=20")
        most = max(most, open_files())
        if status == 200:
            assert headers["X-Message-Tries"] == "1"
            left.discard(name)
            message = f"/{name}/messages/" + headers["X-Message-Id"]
            assert ask("DELETE", message, **{"X-Lease-Token": headers["X-Lease-Token"]})[0] == 202
    client.close()
print(json.dumps({"most": most}))
"""


def run(program: str, url: str, count: int, limit: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program, url, str(count), str(limit)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


@pytest.fixture(params=SCHEMES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new store."""
    return store_url(request, request.param, tmp_path)


def store_url(request: pytest.FixtureRequest, scheme: str, folder: Path) -> str:
    if scheme not in {"redis", "rfq"}:
        return f"{scheme}://{folder}/spool?sync=off"
    server: RedisServer = request.getfixturevalue("server")
    with server.client() as client:
        client.flushall()
    return server.url if scheme == "redis" else f"rfq://127.0.0.1:{server.port}/0"


@pytest.mark.parametrize(("count", "limit"), SIZES)
def test_many_queues_are_used_with_few_open_files(url: str, count: int, limit: int) -> None:
    found = run(CALLS, url, count, limit)
    assert (found["held"], found["refused"]) == (15, 0)
    assert found["most"] < limit // 2


@pytest.mark.parametrize(("count", "limit"), SIZES)
def test_a_worker_of_many_queues_runs_every_message_with_few_open_files(url: str, count: int, limit: int) -> None:
    found = run(WORK, url, count, limit)
    assert found["ran"]
    assert found["most"] < limit


@pytest.mark.parametrize("scheme", ["file", "redis"])
def test_a_worker_of_1000_queues_runs_every_message_and_reaps_idle_queues_within_ten_rounds(
    request: pytest.FixtureRequest, scheme: str, tmp_path: Path
) -> None:
    found = run(REAP, store_url(request, scheme, tmp_path), 1000, 1024)
    assert found["ran"]
    assert found["most"] < 1024
    # A round takes a second. One more if its end is in the next one.
    assert found["rounds"] <= 11
    # Bytes: the queues are known, and few of them are open.
    assert found["memory"] < 40_000_000


def test_a_server_of_many_queues_answers_every_request_and_returns_every_expired_lease(tmp_path: Path) -> None:
    found = run(SERVE, f"file://{tmp_path}/spool?sync=off", 30, 768)
    assert found["most"] < 768
