"""The memory of `qworker serve` does not depend on how many bodies arrive at once, or are leased."""

from __future__ import annotations

import asyncio
import http.client
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qworker.backend.registry import open_backend
from qworker.message import Draft
from qworker.server.memory import MemoryBudget, ServerBusy
from qworker.testing.wait_until import wait_until
from tests.support.serving import served

MOST_MB = 200
MIB = 1 << 20
Connect = Callable[[int], http.client.HTTPConnection]


class Serving(msgspec.Struct):
    """A process of `qworker serve`."""

    pid: int
    port: int

    def peak_mb(self) -> float:
        """The most resident memory that it has had."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) * 1024 / 1e6

    def unread(self) -> int:
        """Bytes that have arrived for it, and which it has not read."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        here = f":{self.port:04X}"
        return sum(int(row[4].partition(":")[2], 16) for row in rows if row[1].endswith(here) and row[3] == "01")


@contextmanager
def serving(url: str, *options: str) -> Iterator[Serving]:
    command = [sys.executable, "-m", "qworker", "serve", url, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found is not None, line + process.stderr.read()
        yield Serving(process.pid, int(found[1]))
        process.send_signal(signal.SIGTERM)
        assert process.wait(50) == 0
    finally:
        process.kill()
        process.communicate()


def begin(server: Serving, size: int) -> socket.socket:
    """Send a POST without its last byte."""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=50)
    client.sendall(b"POST /q/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size)
    client.sendall(bytes(size - 1))
    return client


@pytest.fixture
def connect() -> Iterator[Connect]:
    with ExitStack() as opened:
        yield lambda port: opened.enter_context(closing(http.client.HTTPConnection("127.0.0.1", port, timeout=50)))


@pytest.mark.parametrize(("count", "size"), [(300, MIB), (40, 16 * MIB)])
async def test_bodies_that_arrive_at_once_stay_within_the_budget(tmp_path: Path, count: int, size: int) -> None:
    with serving(f"file://{tmp_path}/spool?sync=off", "--max-body-size", str(size)) as server, ExitStack() as opened:
        clients = [opened.enter_context(begin(server, size)) for _ in range(count)]
        await wait_until(lambda: server.unread() == 0)
        assert server.peak_mb() < MOST_MB
        for client in clients:
            client.sendall(b".")
        for client in clients:
            assert client.recv(20).startswith(b"HTTP/1.1 201")
        # Complete bodies are in memory, as far as the budget allows.
        assert server.peak_mb() < MOST_MB + 50


async def test_a_lease_keeps_no_body(tmp_path: Path, connect: Connect) -> None:
    url = f"file://{tmp_path}/spool?sync=off"
    backend = open_backend(url)
    for _ in range(300):
        await backend.publish("q", [Draft(body=bytes(MIB))])
    await backend.aclose()
    with serving(url) as server:
        client = connect(server.port)
        tokens: dict[str, str] = {}
        for _ in range(300):
            client.request("GET", "/q/messages?visibility_timeout=600")
            response = client.getresponse()
            assert len(response.read()) == MIB
            tokens[response.headers["X-Message-Id"]] = response.headers["X-Lease-Token"]
        assert server.peak_mb() < MOST_MB
        for message_id, token in tokens.items():
            client.request("DELETE", f"/q/messages/{message_id}", headers={"X-Lease-Token": token})
            assert client.getresponse().read() == b""
        client.request("GET", "/q/messages")
        assert client.getresponse().status == 204


@pytest.mark.parametrize("scheme", ["file", "sq", "vsqs", "mq", "fsq"])
async def test_a_message_that_fails_keeps_its_body(tmp_path: Path, scheme: str, connect: Connect) -> None:
    backend = open_backend(f"{scheme}://{tmp_path}/spool", remote_leases=True)
    with served(backend) as server:
        client = connect(server.port)
        client.request("POST", "/q/messages", b"the body")
        client.getresponse().read()
        client.request("GET", "/q/messages")
        response = client.getresponse()
        assert response.read() == b"the body"
        headers = {"X-Lease-Token": response.headers["X-Lease-Token"]}
        client.request("POST", f"/-/q/messages/{response.headers['X-Message-Id']}/fail", b"{}", headers)
        response = client.getresponse()
        assert (response.status, response.read()) == (202, b"")
        client.request("GET", "/-/q/browse?state=failed")
        (stored,) = msgspec.json.decode(client.getresponse().read(), type=list[dict[str, Any]])
        assert stored["message"]["body"] == "dGhlIGJvZHk="


async def test_a_request_without_room_waits_and_is_refused_at_the_end_of_its_patience() -> None:
    budget = MemoryBudget(100, patience=50.0)
    first = await budget.reserve(60)
    waiting = asyncio.create_task(budget.reserve(60))
    small = asyncio.create_task(budget.reserve(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    # It does not overtake.
    assert not small.done()
    budget.release(first)
    assert (await waiting, await small) == (60, 1)
    waiting = asyncio.create_task(budget.reserve(90))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    budget.release(60)
    budget.release(1)
    # A body that is larger than the budget gets all of it.
    assert await budget.reserve(1000) == 100
    impatient = MemoryBudget(100, patience=0.001)
    await impatient.reserve(100)
    with pytest.raises(ServerBusy):
        await impatient.reserve(1)


async def test_a_request_without_room_gets_status_503_and_a_time_to_come_back(tmp_path: Path, connect: Connect) -> None:
    backend = open_backend(f"file://{tmp_path}/spool", remote_leases=True)
    with served(backend, memory=MIB) as server:
        server.app.memory._patience = 0.001
        server.app.memory.charge(MIB)
        client = connect(server.port)
        client.request("POST", "/q/messages", b"x")
        response = client.getresponse()
        assert (response.status, response.headers["Retry-After"]) == (503, "2")
        assert b"--memory" in response.read()
        assert response.headers["Connection"] == "close"
        server.app.memory.charge(-MIB)
        client.request("POST", "/q/messages", b"x")
        assert client.getresponse().status == 201
