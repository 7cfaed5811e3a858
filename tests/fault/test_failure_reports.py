"""`on_failure` and a kill before and after each of its two steps: a failure is reported once, and never lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from qworker import State
from qworker.backend.registry import open_backend
from qworker.message import Query, StoredMessage
from qworker.names import failure_id
from qworker.url import BackendURL
from tests.support.depth import DEEP
from tests.support.servers import RedisServer

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]

APP = """
import os, signal
from qworker import Backoff, Fail, FailedCall, Tasks
from qworker.backend.registry import backend_class
from qworker.message import SettleAction

tasks = Tasks(os.environ["URL"])

@tasks.task(queue="alerts")
async def alert(failed: FailedCall) -> None:
    with open("reports", "a") as file:
        print(failed.id, failed.code, file=file)

options = {"on_failure": alert, "max_tries": 2, "retry": Backoff(initial=0.0)}

@tasks.task(**options)
async def fail(number: int) -> None:
    raise Fail("no")

@tasks.task(**options)
async def tries(number: int) -> None:
    raise ValueError("no luck")

@tasks.task(**options)
def thread(number: int) -> None:
    raise Fail("no")

@tasks.task(process=True, **options)
def process(number: int) -> None:
    raise Fail("no")

@tasks.task(**options)
async def poison(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)

@tasks.task(name="arguments", **options)
async def wrong(number: int) -> None: ...

def die(point):
    if os.environ.get("KILL") == point and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

kind = backend_class(tasks.url.partition(":")[0])
publish, settle = kind.publish, kind.settle

async def publish_or_die(self, queue, drafts):
    if queue != "alerts":
        return await publish(self, queue, drafts)
    die("before-publish")
    ids = await publish(self, queue, drafts)
    die("after-publish")
    return ids

async def settle_or_die(self, settlements):
    fails = any(one.action is SettleAction.FAIL_PERM for one in settlements)
    if fails:
        die("before-fail")
    refused = await settle(self, settlements)
    if fails:
        die("after-fail")
    return refused

kind.publish, kind.settle = publish_or_die, settle_or_die
"""

POINTS = ["before-publish", "after-publish", "before-fail", "after-fail"]
# The worker's code is the same for both stores, and the steps are the same for most causes.
OFTEN = {"fail", "poison"}
DEATHS = [
    (store, cause, point)
    for store in ("file", "redis")
    for cause in ("fail", "tries", "thread", "process", "poison", "arguments")
    for point in POINTS
    if DEEP
    or (store == "file" and cause in OFTEN)
    or (point == "after-publish" and (store == "file" or cause in OFTEN))
]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/spool?keep_done=1d"
    server: RedisServer = request.getfixturevalue("redis")
    with server.client() as client:
        client.flushall()
    return BackendURL.parse(server.url).with_options(keep_done="1d")


def qworker(folder: Path, url: str, *arguments: str, kill: str = "") -> int:
    environment = {**os.environ, "URL": url, "KILL": kill}
    command = [sys.executable, "-m", "qworker", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, check=False, timeout=60).returncode


def stored(url: str, queue: str, state: State) -> list[StoredMessage]:
    async def listed() -> list[StoredMessage]:
        async with aclosing(open_backend(url)) as backend:
            await backend.open()
            if queue not in await backend.queues():
                return []
            return [each async for page in backend.browse(queue, Query(state)) for each in page]

    return asyncio.run(listed())


@pytest.mark.parametrize(("url", "cause", "point"), DEATHS, indirect=["url"])
def test_a_failure_is_reported_once_although_the_worker_is_killed(
    url: str, cause: str, point: str, tmp_path: Path
) -> None:
    (tmp_path / "reports_app.py").write_text(APP)
    argument = '"x"' if cause == "arguments" else "1"
    body = f'{{"task":"{cause}","args":[{argument}]}}'
    assert qworker(tmp_path, url, "publish", url, "default", "--body", body) == 0
    (message,) = stored(url, "default", State.READY)
    # On Redis a dead worker's messages return by time alone, and a living one must keep its own on a busy machine.
    run = ("run", "reports_app:tasks", "--burst", "--visibility-timeout", "8")
    deaths = 0
    while qworker(tmp_path, url, *run, kill=point) == -signal.SIGKILL:
        deaths += 1
        assert deaths <= 3
    assert (tmp_path / "killed").exists()
    (failed,) = stored(url, "default", State.FAILED)
    assert failed.message.id == message.message.id
    (report,) = stored(url, "alerts", State.DONE)
    assert report.message.id == failure_id(message.message.id)
    for state in (State.DELAYED, State.READY, State.LEASED, State.FAILED):
        assert stored(url, "alerts", state) == []
    # A worker that was killed may have run the report too, and not stored that it is done.
    lines = (tmp_path / "reports").read_text().splitlines()
    assert {line.split()[0] for line in lines} == {message.message.id}
    assert len(lines) <= deaths + 1
