"""Topics shared live with the rfq 1.4.0 package, and a keyspace that it wrote."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.cli.main import cli
from qworker.message import Draft, Lease, Query, SettleAction, Settlement, State
from qworker.testing.wait_until import wait_until
from tests.support.installed import environment
from tests.support.servers import RedisServer, free_port

FIXTURE = Path(__file__).parents[1] / "fixtures" / "rfq.keyspace.json"
PEER = Path(__file__).with_name("rfq_peer.py")
# Python 3.12 has no distutils, which that redis-py needs.
REQUIREMENTS = ("rfq==1.4.0", "redis>=3.5.3,<4", "setuptools<81")
TOPIC = "tiles"
PATIENCE = 50.0

# The environment is made outside of it.
pytestmark = pytest.mark.timeout(120, func_only=True)


@pytest.fixture(scope="session")
def peer_python() -> Path:
    """A Python with rfq 1.4.0, made once per machine and shared by parallel test processes."""
    install = ("-m", "pip", "install", "-q", "--disable-pip-version-check", *REQUIREMENTS)
    return environment(
        "rfq",
        "\n".join((*REQUIREMENTS, sys.version)),
        lambda python: subprocess.run([python, *install], check=True, timeout=240),
    )


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


class Both:
    """One Redis with both implementations on it."""

    def __init__(self, python: Path, server: RedisServer) -> None:
        self.peer_python = (python, "-W", "ignore", PEER)
        self.qworker = (sys.executable, "-m", "qworker")
        self.server = server
        self.url = f"rfq://127.0.0.1:{server.port}/0"
        self.variables = {"RFQ_REDIS_HOST": "127.0.0.1", "RFQ_REDIS_PORT": str(server.port)}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("QWORKER_", "RFQ_"))}
        self._environment = {**kept, **self.variables, "PYTHONUNBUFFERED": "1"}
        self._commands: asyncio.subprocess.Process | None = None

    @contextlib.asynccontextmanager
    async def running(self, *command: object, **options: object) -> AsyncGenerator[asyncio.subprocess.Process]:
        """A process that ends with the block."""
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            stdout=asyncio.subprocess.PIPE,
            env=self._environment,
            **options,  # type: ignore[arg-type]
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncGenerator[Both]:
        """With a process of the package that runs its commands."""
        async with self.running(*self.peer_python, "commands", stdin=asyncio.subprocess.PIPE) as process:
            self._commands = process
            yield self

    async def theirs(self, *arguments: object) -> tuple[int, str]:
        """A command of the package, or what its library does; its exit status and what it printed."""
        process = self._commands
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([str(argument) for argument in arguments]).encode() + b"\n")
        async with asyncio.timeout(PATIENCE):
            status, output = json.loads(await process.stdout.readline())
        return status, output

    async def ours(self, *arguments: str) -> tuple[int, str]:
        """A command of qworker's."""

        def run() -> tuple[int, str]:
            found = CliRunner().invoke(cli, ["rfq", *arguments], env=self.variables, standalone_mode=False)
            assert found.exception is None, found.exception
            return found.return_value or 0, found.stdout

        return await asyncio.to_thread(run)


@pytest.fixture
async def both(peer_python: Path, server: RedisServer) -> AsyncGenerator[Both]:
    with server.client() as client:
        client.flushall()
    async with Both(peer_python, server).opened() as both:
        yield both


@pytest.fixture
async def backend(both: Both) -> AsyncGenerator[Backend]:
    backend = open_backend(both.url)
    yield backend
    await backend.aclose()


async def ack(backend: Backend, *leases: Lease) -> None:
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []


def keys(both: Both) -> set[str]:
    """Every key but qworker's own."""
    with both.server.client() as client:
        return {key.decode() for key in client.keys("*") if b":qworker:" not in key}


APP = """\
import os
from qworker import Message, Tasks

tasks = Tasks()
log = os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


@tasks.raw_handler(queue="tiles")
async def on_tile(message: Message) -> None:
    os.write(log, (message.fields["k"] + "\\n").encode())


@tasks.task(queue="tiles")
async def shade(tile: str) -> None:
    os.write(log, f"task {tile}\\n".encode())
"""


async def test_both_publish_and_consume_one_topic_and_nothing_is_lost_or_doubled(
    both: Both, backend: Backend, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(APP)
    worker = (*both.qworker, "run", "app:tasks", "--url", both.url, "-c", "3")
    published: list[str] = []
    found: list[str] = []

    async def collect(process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            found.append(line.decode().strip())  # noqa: PERF401 - each counts as soon as it is there

    async with contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(both.running(*worker, cwd=tmp_path, stderr=asyncio.subprocess.DEVNULL))
        consume = (*both.peer_python, "consume", TOPIC)
        theirs = [await stack.enter_async_context(both.running(*consume)) for _ in range(2)]
        # Everybody is there before there is work: both have a share of it.
        await wait_until(lambda: _waiting(both) == {"brpoplpush": 2, "blmove": 2}, timeout=PATIENCE)
        readers = [asyncio.create_task(collect(process)) for process in theirs]
        publishing = asyncio.create_task(both.theirs("publish-many", "their-", 120, TOPIC))
        for number in range(0, 120, 4):
            drafts = [{"k": f"own-{number + n}"} for n in range(4)]
            await _publish(backend, drafts)
            published += [draft["k"] for draft in drafts]
        await publishing
        published += [f"their-{number}" for number in range(120)]
        log = tmp_path / "log"

        def all_are_there() -> bool:
            ours = log.read_text().split() if log.exists() else []
            return len(ours) + len(found) >= len(published)

        await wait_until(all_are_there, timeout=PATIENCE)
        await wait_until(lambda: _is_empty(both), timeout=PATIENCE)
        for process in theirs:
            process.kill()
        await asyncio.gather(*readers)
    assert found
    assert log.exists()
    assert sorted([*found, *log.read_text().split()]) == sorted(published)


async def _publish(backend: Backend, maps: list[dict[str, str]]) -> list[str]:
    return await backend.publish(TOPIC, [Draft(body=b"", fields=fields) for fields in maps])


def _waiting(both: Both) -> Counter[str]:
    """How many clients wait for messages, by the command that they wait in."""
    with both.server.client() as client:
        return Counter(row["cmd"] for row in client.client_list() if "b" in row["flags"])


def _is_empty(both: Both) -> bool:
    return keys(both) == set()


async def test_each_sees_the_maps_and_the_order_of_the_other(both: Both, backend: Backend) -> None:
    first, second = await _publish(backend, [{"k": "ours", "ä": "☃ \n\t"}, {"k": "next"}])
    third = (await both.theirs("publish-many", "their", 1, TOPIC))[1].strip()
    assert await both.theirs("list-queue", "-t", TOPIC) == (0, f"{third}\n{second}\n{first}\n")
    held, fields = (await both.theirs("hold", TOPIC))[1].split(" ", 1)
    assert (held, json.loads(fields)) == (first, {"k": "ours", "ä": "☃ \n\t"})
    two, three = await backend.lease(TOPIC, 10, 60.0)
    assert [two.message.id, three.message.id] == [second, third]
    assert (three.message.fields, three.message.body) == ({"k": "their0"}, b"")
    assert abs(three.message.enqueued_at - two.message.enqueued_at) < 60
    await ack(backend, two, three)
    await both.theirs("commit", TOPIC, held)
    assert keys(both) == set()


async def test_our_crashed_consumers_are_harvested_and_theirs_are_left_to_harvest(both: Both, backend: Backend) -> None:
    await _publish(backend, [{"k": "their"}, {"k": "our"}])
    held = (await both.theirs("hold", TOPIC))[1].split()[0]
    code = (
        "import asyncio, sys\nfrom qworker.backend.registry import open_backend\n"
        "async def main():\n"
        f"    leases = await open_backend({both.url!r}).lease({TOPIC!r}, 1, 0.5)\n"
        "    print(leases[0].message.id, flush=True)\n    await asyncio.sleep(600)\n"
        "asyncio.run(main())"
    )
    async with both.running(sys.executable, "-c", code) as worker:
        assert worker.stdout is not None
        ours = (await worker.stdout.readline()).decode().strip()
        worker.send_signal(signal.SIGKILL)
        await worker.wait()
    assert (await backend.stats(TOPIC)).leased == 2

    async def is_reaped() -> bool:
        return (await backend.reap(TOPIC)).returned == 1

    await wait_until(is_reaped)
    (lease,) = await backend.lease(TOPIC, 10, 60.0)
    assert (lease.message.id, lease.message.tries) == (ours, 1)
    for _ in range(2):
        assert (await backend.reap(TOPIC)).returned == 0
    assert held != ours
    status, output = await both.ours("harvest", "-t", TOPIC)
    assert (status, set(output.split())) == (0, {held, ours})
    # Whoever runs harvest says that all consumers are dead: this one is told so.
    assert await asyncio.to_thread(backend.extend, [lease], 60.0) == [lease]
    leases = await backend.lease(TOPIC, 10, 60.0)
    assert {lease.message.id for lease in leases} == {held, ours}


async def test_their_harvest_takes_our_leases_and_no_message_is_lost(both: Both, backend: Backend) -> None:
    await _publish(backend, [{"k": f"{n}"} for n in range(4)])
    acked, failed, kept, done = await backend.lease(TOPIC, 4, 60.0)
    status, output = await both.theirs("harvest", "-t", TOPIC)
    assert (status, len(output.split())) == (0, 4)
    # What was done is done: a commit takes the message off the backlog, as rfq's own does.
    assert await backend.settle([Settlement(lease=acked, action=SettleAction.ACK)]) == []
    assert await backend.settle([Settlement(lease=failed, action=SettleAction.FAIL_TMP, error="late")]) == []
    assert (await backend.reap(TOPIC)).returned == 0
    assert await backend.settle([Settlement(lease=kept, action=SettleAction.RELEASE)]) != []
    await both.theirs("commit", TOPIC, done.message.id)
    leases = {lease.message.id: lease for lease in await backend.lease(TOPIC, 10, 60.0)}
    assert set(leases) == {failed.message.id, kept.message.id}
    assert [leases[lease.message.id].message.tries for lease in (failed, kept)] == [1, 1]
    await ack(backend, *leases.values())
    assert keys(both) == set()


async def test_a_task_travels_as_an_envelope_in_a_field(both: Both, backend: Backend, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    enqueue = (*both.qworker, "enqueue", "app:tasks", "shade", '"T32U0"', "--url", both.url)
    async with both.running(*enqueue, cwd=tmp_path) as process:
        assert await process.wait() == 0
    line = (await both.theirs("hold", TOPIC))[1]
    fields = json.loads(line.partition(" ")[2])
    assert list(fields) == ["qworker"]
    assert json.loads(fields["qworker"]) == {"task": "shade", "args": ["T32U0"]}
    envelope = json.dumps({"task": "shade", "args": ["T33"]})
    status, _ = await both.theirs("publish", "-t", TOPIC, "-m", json.dumps({"qworker": envelope}))
    assert status == 0
    run = (*both.qworker, "run", "app:tasks", "--url", both.url)
    async with both.running(*run, cwd=tmp_path, stderr=asyncio.subprocess.DEVNULL):
        await wait_until(
            lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text() == "task T33\n", PATIENCE
        )


async def test_the_commands_print_what_those_of_the_package_print(both: Both) -> None:
    async def same(*arguments: str) -> tuple[int, str]:
        ours, theirs = await asyncio.gather(both.ours(*arguments), both.theirs(*arguments))
        assert ours == theirs, arguments
        return ours

    for message, flags in (
        ('{"k": "1", "ü": "☃"}', ()),
        ('{"n": 2, "k": "\'\\""}', ("--front",)),
        ('{"k": "3"}', ("-f",)),
    ):
        for run in (both.ours, both.theirs):
            status, output = await run("publish", "-t", TOPIC, "-m", message, *flags)
            assert status == 0
            assert re.fullmatch(r"[0-9a-f]{12}1[0-9a-f]{19}\n", output)
    assert await same("list-topics") == (0, f"{TOPIC}\n")
    await same("info")
    _, listed = await same("list-queue", "-t", TOPIC)
    ids = listed.split()
    assert len(ids) == 6
    await same("list-queue", "--topic", TOPIC, "--queue", "nextlog")
    assert (await same("peek", "-t", TOPIC, "-m", ids[0]))[0] == 0
    assert (await same("peek", "--topic", TOPIC, "--msgid", "0" * 32)) == (1, "")
    # Each implementation published each message once: what one consumes, the other does too.
    for _ in range(2):
        consumed = [await both.ours("consume", "-t", TOPIC), await both.theirs("consume", "-t", TOPIC)]
        assert consumed[0] == consumed[1]
    assert sorted((await both.ours("purge-queue", "-t", TOPIC))[1].split()) == sorted(ids[:2])
    assert await same("list-topics") == (0, "")
    assert keys(both) == set()
    assert (await both.theirs("completions", "bash"))[1].split()[-2:] == (await both.ours("completions", "bash"))[
        1
    ].split()[-2:]
    assert re.fullmatch(r"qworker \S+\nredis \d+\.\S+\n", (await both.ours("version"))[1])


async def test_a_keyspace_that_the_package_wrote_is_read_in_its_order(both: Both, backend: Backend) -> None:
    stored = json.loads(FIXTURE.read_text())
    with both.server.client() as client:
        for key, value in stored.items():
            if isinstance(value, list):
                client.rpush(key, *value)
            else:
                client.hset(key, mapping=value)
    assert await backend.queues() == ["ndvi", "tiles"]
    counts = [(s.ready, s.leased) for s in [await backend.stats("ndvi"), await backend.stats("tiles")]]
    assert counts == [(3, 2), (6, 0)]
    held = await list_messages(backend, "ndvi", Query(State.LEASED))
    assert {row.message.id for row in held} == set(stored["rfq:ndvi:nextlog"])
    assert (await backend.reap("ndvi")).returned == 0
    leases = await backend.lease("ndvi", 10, 60.0)
    assert [lease.message.fields for lease in leases] == [{"tile": f"T32U{n}", "op": "ndvi"} for n in (2, 3, 4)]
    # 2026-11-21, to the tick of the id.
    assert leases[0].message.enqueued_at == pytest.approx(1_795_257_047, abs=86_400 * 3)
    await ack(backend, *leases)
    tiles = await backend.lease("tiles", 10, 60.0)
    assert [lease.message.fields for lease in tiles] == [{"k": k} for k in ("f0", "f1", "f2", "0", "1", "2")]
    assert await both.ours("list-topics") == (0, "ndvi\ntiles\n")
