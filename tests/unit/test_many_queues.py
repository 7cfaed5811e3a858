"""Many queues need few open files: queues are opened when they are used, and closed when others need the room."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCHEMES = ("file", "fsq", "vsqs", "sq", "mq")

PROGRAM = """
import asyncio, json, os, resource, sys
from qworker import Tasks
from qworker.backend.registry import open_backend
from qworker.message import Draft, SettleAction, Settlement
from qworker.worker import Worker, WorkerOptions

url, count, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
names = [f"q{number:03d}" for number in range(count)]

def open_files():
    return len(os.listdir("/proc/self/fd"))
"""

CALLS = """
async def use(backend, name):
    await backend.publish(name, [Draft(body=name.encode())])
    (lease,) = await backend.lease(name, 1, 30.0)
    assert lease.message.body == name.encode()
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.RELEASE)]) == []
    assert (await backend.stats(name)).ready == 1
    await backend.reap(name)
    return open_files()

async def main():
    backend = open_backend(url)
    most = max([await use(backend, name) for name in names])
    # Those that are closed give their messages.
    held = [lease for name in names[:15] for lease in await backend.lease(name, 1, 30.0)]
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


@pytest.mark.parametrize("scheme", SCHEMES)
def test_many_queues_are_used_with_few_open_files(scheme: str, tmp_path: Path) -> None:
    found = run(CALLS, f"{scheme}://{tmp_path}/spool?sync=off", 120, 512)
    assert (found["held"], found["refused"]) == (15, 0)
    assert found["most"] < 256


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_worker_of_many_queues_runs_every_message_with_few_open_files(scheme: str, tmp_path: Path) -> None:
    found = run(WORK, f"{scheme}://{tmp_path}/spool?sync=off", 120, 512)
    assert found["ran"]
    assert found["most"] < 512


def test_a_server_of_many_queues_answers_every_request_and_returns_every_expired_lease(tmp_path: Path) -> None:
    found = run(SERVE, f"file://{tmp_path}/spool?sync=off", 30, 768)
    assert found["most"] < 768
