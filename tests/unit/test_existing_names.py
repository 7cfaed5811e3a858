"""Queues whose names only other programs create: they are read and their messages run, and they are never created."""

from __future__ import annotations

import http.client
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner

from qworker import Message, Tasks
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.cli.main import cli, main
from qworker.errors import InvalidName
from qworker.message import Draft, Query, Selection, SettleAction, Settlement, State
from qworker.names import check_existing_queue
from qworker.worker.worker import Worker
from qworker.worker.worker_options import WorkerOptions
from tests.support.servers import RedisServer, free_port
from tests.support.serving import Served, served

NAMES = ["straße", "очередь", "sentinel:s2"]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


@pytest.fixture(params=["fsq", "vsqs", "sq", "file", "rfq"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=NAMES)
def queue(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def url(scheme: str, queue: str, tmp_path: Path, server: RedisServer) -> str:
    """A store in which another program created the queue, with two messages."""
    if scheme == "rfq":
        return _make_topic(server, queue)
    url = f"{scheme}://{tmp_path}/root"
    backend = open_backend(url)
    await backend.publish("q", [Draft(body=b"1"), Draft(body=b"2")])
    await backend.aclose()
    # Its files are those of any other queue.
    (tmp_path / "root" / "q").rename(tmp_path / "root" / queue)
    return url


def _make_topic(server: RedisServer, topic: str) -> str:
    with server.client() as client:
        client.flushall()
        for body in ("1", "2"):
            message_id = uuid.uuid1().hex
            client.hset(f"rfq:{topic}:message:{message_id}", mapping={"tile": body})
            client.lpush(f"rfq:{topic}:backlog", message_id)
    return f"rfq://127.0.0.1:{server.port}/0"


async def test_a_worker_works_off_a_queue_whose_name_only_other_programs_create(url: str, queue: str) -> None:
    tasks = Tasks(url)
    seen: list[str] = []

    @tasks.raw_handler(queue=queue)
    async def handle(message: Message) -> None:
        seen.append((message.fields or {}).get("tile") or message.body.decode())

    assert await Worker(tasks, WorkerOptions(burst=True)).run()
    assert seen == ["1", "2"]


async def test_its_messages_can_be_read_failed_requeued_and_removed(url: str, queue: str) -> None:
    backend = open_backend(url)
    try:
        assert await backend.queues() == [queue]
        assert (await backend.stats(queue)).ready == 2
        leases = await backend.lease(queue, 1, 30.0)
        assert await backend.settle([Settlement(lease=leases[0], action=SettleAction.FAIL_PERM, error="no")]) == []
        failed = await list_messages(backend, queue, Query(State.FAILED))
        assert [stored.error for stored in failed] == ["no"]
        assert await backend.requeue(queue, Selection(state=State.FAILED)) == 1
        assert (await backend.reap(queue)).returned == 0
        left = [stored.message.id for stored in await list_messages(backend, queue, Query(State.READY))]
        assert await backend.remove(queue, Selection(ids=left)) == 2
        # A task can be enqueued into it: it exists.
        await backend.create(queue)
        await backend.publish(queue, [Draft(body=b"3")])
        assert (await backend.stats(queue)).ready == 1
    finally:
        await backend.aclose()


async def test_a_queue_with_such_a_name_is_never_created(url: str, queue: str) -> None:
    other = f"{queue}ß:2"
    assert check_existing_queue(other) == other
    backend = open_backend(url)
    try:
        for call in (backend.create(other), backend.publish(other, [Draft(body=b"x")])):
            with pytest.raises(InvalidName, match=r"is not a valid queue name"):
                await call
        assert await backend.queues() == [queue]
    finally:
        await backend.aclose()


def test_the_commands_show_and_scan_it(url: str, queue: str, tmp_path: Path) -> None:
    found = CliRunner().invoke(cli, ["stats", url, queue, "--json"], standalone_mode=False)
    assert json.loads(found.stdout)["queue"] == queue
    assert main(["scan", url, queue, "sh", "-c", f"echo x >> {tmp_path}/ran"]) == 0
    assert (tmp_path / "ran").read_text() == "x\nx\n"


async def test_a_server_serves_it(url: str, queue: str) -> None:
    with served(open_backend(url, remote_leases=True)) as server:
        assert _ask(server, "GET", queue) == 200
        assert _ask(server, "POST", "né") == 404


def _ask(server: Served, method: str, queue: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=50)
    try:
        connection.request(method, f"/{quote(queue)}/messages", b"x" if method == "POST" else None)
        return connection.getresponse().status
    finally:
        connection.close()


def test_rfq_s_own_commands_take_a_topic_with_a_colon(server: RedisServer) -> None:
    url = _make_topic(server, "sentinel:s2")
    with server.client() as client:
        ids = [name.decode() for name in client.lrange("rfq:sentinel:s2:backlog", 0, -1)]
    found = CliRunner().invoke(cli, ["rfq", "list-queue", "-t", "sentinel:s2", "--url", url], standalone_mode=False)
    assert found.stdout.split() == ids


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "-a",
        ".ä",
        "ä/b",
        "ä\n",
        "ä\x00",
        "ä b",
        "../ä",
        "ä%2fb",
        "ä\\b",
        "{ä}",
        "ä" * 101,
        "\udce4",
        ":a",
    ],
)
def test_a_name_that_could_leave_its_place_is_not_one_of_them(name: str) -> None:
    with pytest.raises(InvalidName):
        check_existing_queue(name)
