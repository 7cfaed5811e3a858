"""A key of another type: its queue reports it and waits, every other queue of the app continues, nothing is lost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from qworker import Tasks
from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.cli.main import main
from qworker.errors import BackendError, QueueDamaged
from qworker.kit.doctor_check import Check, CheckStatus
from qworker.message import Draft, Lease, SettleAction, Settlement
from qworker.server.app import create_app
from qworker.testing.wait_until import wait_until
from qworker.unique import Unique
from qworker.url import BackendURL
from qworker.worker import Worker, WorkerOptions
from qworker_redis import RedisBackend
from qworker_redis.keys import PARTS, REGISTER, queue_key
from qworker_redis.rfq.backend import RfqBackend
from qworker_redis.rfq.keys import PARTS as RFQ_PARTS
from qworker_redis.rfq.keys import rfq_key
from tests.support.servers import PROGRAMS, RedisServer, free_port

pytestmark = pytest.mark.fault

BAD, GOOD = "bad", "good"
# Seconds. What is still leased after the damage returns by itself.
VISIBLE = 0.5
# What a queue's own work does not read or write: the history, and the loads of bulk writes.
WORK = [part for part in PARTS if part not in {"history", "jobs", "seals"}]
TOPIC = ["backlog", "nextlog", *RFQ_PARTS]


@pytest.fixture(scope="module", params=PROGRAMS)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with RedisServer(port=free_port(), program=request.param) as server:
        yield server


def url_of(server: RedisServer, scheme: str) -> str:
    return f"{scheme}://127.0.0.1:{server.port}/0"


def key_of(scheme: str, part: str) -> bytes:
    return queue_key(BAD, part) if scheme == "redis" else rfq_key(BAD, part)


async def checks(server: RedisServer, scheme: str) -> dict[str, Check]:
    kind = RedisBackend if scheme == "redis" else RfqBackend
    return {check.name: check for check in await kind.doctor(BackendURL.parse(url_of(server, scheme)))}


@asynccontextmanager
async def working(url: str) -> AsyncIterator[list[str]]:
    """A worker of two queues, and the queues of the messages that it has run."""
    tasks, ran = Tasks(url), list[str]()
    for queue in (BAD, GOOD):

        @tasks.raw_handler(queue=queue)
        async def run(message: Any) -> None:
            ran.append(message.queue)

    worker = Worker(tasks, WorkerOptions(visibility_timeout=30.0))
    running = asyncio.create_task(worker.run())
    try:
        yield ran
    finally:
        worker.drain()
        await running


@pytest.mark.parametrize(("scheme", "part"), [("redis", part) for part in WORK] + [("rfq", part) for part in TOPIC])
async def test_a_key_of_another_type_stops_its_own_queue_only_and_is_named(
    server: RedisServer, scheme: str, part: str
) -> None:
    with server.client() as client:
        client.flushall()
    backend, key = open_backend(url_of(server, scheme)), key_of(scheme, part)
    with server.client() as client:
        # The topic exists only while it has a list.
        await backend.publish(BAD, [Draft(body=b"waiting")])
        client.delete(key)
        client.set(key, "planted")
        with structlog.testing.capture_logs() as logs:
            async with working(url_of(server, scheme)) as ran:
                for number in range(3):
                    await backend.publish(GOOD, [Draft(body=b"%d" % number), Draft(body=b"delayed", delay=0.05)])
                    await wait_until(lambda number=number: ran.count(GOOD) == 2 * number + 2)
                if part not in {"keys", "gone", "samples"}:
                    # These are needed for some messages only, or by what shows numbers.
                    await wait_until(lambda: any(key.decode() in log.get("error", "") for log in logs))
                    broken = (await checks(server, scheme))["redis keys"]
                    assert broken.health is CheckStatus.BROKEN
                    assert key.decode() in broken.detail
                client.delete(key)
                await backend.publish(BAD, [Draft(body=b"repaired")])
                await wait_until(lambda: BAD in ran)
    lines = [log for log in logs if key.decode() in log.get("error", "")]
    # Each loop reports it once, however often it tries.
    assert len(lines) <= 5
    assert all("rename this key" in log["error"] for log in lines)
    assert (await checks(server, scheme))["redis keys"].health is CheckStatus.OK
    await backend.aclose()


@pytest.mark.parametrize("command", ["run", "enqueue", "ls", "create"])
def test_a_register_of_another_type_is_named_in_one_line(server: RedisServer, tmp_path: Path, command: str) -> None:
    (tmp_path / "wrong_app.py").write_text(
        f"from qworker import Tasks\ntasks = Tasks({url_of(server, 'redis')!r})\n@tasks.task\ndef work(): ...\n"
    )
    rest = {
        "run": ["wrong_app:tasks", "--burst"],
        "enqueue": ["wrong_app:tasks", "work"],
        "ls": [url_of(server, "redis")],
        "create": [url_of(server, "redis"), "other"],
    }[command]
    with server.client() as client:
        client.flushall()
        client.set(REGISTER, "planted")
        program = [sys.executable, "-m", "qworker", command, *rest]
        ended = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
        client.delete(REGISTER)
    assert ended.returncode == 3
    expected = "the names of the queues cannot be used, because the Redis key qworker:queues is not a set: "
    expected += "rename this key, or delete it if nothing needs it"
    assert ended.stderr.splitlines() == [f"qworker: {expected} [QueueDamaged]"]


@pytest.mark.parametrize(("scheme", "part"), [("redis", "meta"), ("rfq", "nextlog")])
async def test_commands_and_servers_use_the_other_queues(
    server: RedisServer, scheme: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url, key = url_of(server, scheme), key_of(scheme, part)
    backend = open_backend(url, remote_leases=True)
    with server.client() as client:
        client.flushall()
        for queue in (BAD, GOOD):
            await backend.publish(queue, [Draft(body=b"x")])
        client.delete(key)
        client.set(key, "planted")
        if scheme == "redis":
            # Names that no queue can have.
            client.sadd("qworker:queues", "not a name", b"\xff")
    for command in ("ls", "stats"):
        assert await asyncio.to_thread(main, [command, url]) == 0
        out, err = capsys.readouterr()
        assert GOOD in out
        assert f"queue {BAD}: " in err
        assert key.decode() in err
    with structlog.testing.capture_logs() as logs:
        app = create_app(backend)
        await app.start()
        (lease,) = await backend.lease(GOOD, 1, 0.1)

        async def is_returned() -> bool:
            return [one.message.id for one in await backend.lease(GOOD, 1, 30.0)] == [lease.message.id]

        await wait_until(is_returned)
        await app.stop()
    assert [(log["event"], log["queue"]) for log in logs] == [("queue_unusable", BAD)]
    await backend.aclose()


async def attempt_everything(backend: Backend, held: Sequence[Lease]) -> list[str]:
    """Make every kind of call on the damaged queue. Return the ids that were accepted."""
    accepted: list[str] = []
    actions = [SettleAction.FAIL_TMP, SettleAction.RELEASE, SettleAction.FAIL_TMP]
    ends = [Settlement(lease=one, action=how, delay=0.001) for one, how in zip(held, actions, strict=True)]

    async def publish(*drafts: Draft) -> None:
        accepted.extend(await backend.publish(BAD, drafts))

    async def lease() -> None:
        leases = await backend.lease(BAD, 2, VISIBLE)
        await backend.settle([Settlement(lease=one, action=SettleAction.RELEASE) for one in leases])

    async def reap() -> None:
        await backend.reap(BAD)

    async def settle() -> None:
        await backend.settle(ends)

    async def one() -> None:
        await publish(Draft(body=b"x", id=ids[0]))

    async def two() -> None:
        await publish(Draft(body=b"x", id=ids[1]), Draft(body=b"y", id=ids[2], delay=0.001))

    ids = [f"{number:032x}" for number in range(3)]
    for call in (lease, reap, settle, one, two, lease, reap):
        try:
            await call()
        except QueueDamaged:
            continue
    return accepted


@pytest.mark.parametrize(
    ("scheme", "part"),
    [("redis", part) for part in WORK if part not in {"msg", "meta"}]
    + [("rfq", part) for part in TOPIC if part != "meta"],
)
async def test_a_key_of_another_type_loses_no_message(server: RedisServer, scheme: str, part: str) -> None:
    with server.client() as client:
        client.flushall()
        backend, key = open_backend(url_of(server, scheme)), key_of(scheme, part)
        accepted = set(await backend.publish(BAD, [Draft(body=b"%d" % number) for number in range(10)]))
        held = await backend.lease(BAD, 3, VISIBLE)
        saved = key + b".saved"
        was_there = client.exists(key)
        if was_there:
            client.rename(key, saved)
        client.set(key, "planted")
        accepted |= set(await attempt_everything(backend, held))
        # A publish that has failed with this error can be repeated.
        client.delete(key)
        if was_there:
            client.rename(saved, key)
    for number in range(3):
        accepted |= set(await backend.publish(BAD, [Draft(body=b"x", id=f"{number:032x}")]))
    try:
        await backend.settle([Settlement(lease=one, action=SettleAction.RELEASE) for one in held])
    except BackendError as error:
        pytest.fail(str(error))
    ran: set[str] = set()

    async def drained() -> bool:
        await backend.reap(BAD)
        leases = await backend.lease(BAD, 100, VISIBLE)
        ran.update(lease.message.id for lease in leases)
        assert await backend.settle([Settlement(lease=one, action=SettleAction.ACK) for one in leases]) == []
        return ran >= accepted

    await wait_until(drained, timeout=10)
    assert ran == accepted
    await backend.aclose()


async def test_a_batch_that_needs_a_key_of_another_type_is_refused_as_a_whole(server: RedisServer) -> None:
    everywhere = Unique(scope="app")
    batch = [
        Draft(body=b"one", unique_key="one"),
        Draft(body=b"later", delay=60.0),
        Draft(body=b"two", unique_key="two", unique=everywhere),
    ]
    with server.client() as client:
        client.flushall()
        client.set("{qworker:}:appkeys", "planted")
    backend = open_backend(url_of(server, "redis"))
    try:
        with pytest.raises(BackendError, match="appkeys"):
            await backend.publish(GOOD, batch)
    finally:
        await backend.aclose()
    with server.client() as client:
        assert set(client.keys()) == {b"{qworker:}:appkeys"}


async def leased_of_both(backend: Backend, visibility: float = 60.0) -> list[Lease]:
    leases: list[Lease] = []
    for queue in (BAD, GOOD):
        await backend.publish(queue, [Draft(body=b"x")])
        leases += await backend.lease(queue, 1, visibility)
    return leases


@pytest.mark.parametrize("scheme", ["redis", "rfq"])
async def test_settlements_and_extensions_of_other_queues_do_not_wait_for_a_damaged_one(
    server: RedisServer, scheme: str
) -> None:
    backend = open_backend(url_of(server, scheme))
    with server.client() as client:
        client.flushall()
        leases = await leased_of_both(backend)
        ends = [Settlement(lease=one, action=SettleAction.FAIL_PERM, error="no") for one in leases]
        failed = key_of(scheme, "fail" if scheme == "redis" else "failed")
        client.set(failed, "planted")
        with pytest.raises(QueueDamaged, match="rename this key"):
            await backend.settle(ends)
        assert (await backend.stats(GOOD)).failed == 1
        client.delete(failed)
        # The same call again: the first answer counts for what has ended.
        assert await backend.settle(ends) == []
        assert ((await backend.stats(BAD)).failed, (await backend.stats(GOOD)).failed) == (1, 1)
        bad, good = await leased_of_both(backend)
        client.delete(key_of(scheme, "leased"))
        client.set(key_of(scheme, "leased"), "planted")
        assert await asyncio.to_thread(backend.extend, [bad, good], 90.0) == [bad]
        assert await backend.settle([Settlement(lease=good, action=SettleAction.ACK)]) == []
    await backend.aclose()
