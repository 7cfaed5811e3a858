"""A queue that is deleted while clients use it: each request succeeds, or the queue is not there."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from tests.support.depth import DEPTH
from tests.support.servers import RedisServer
from tests.support.serving import served

ROUNDS = 60 * DEPTH
Request = tuple[str, str, bytes]
PLAIN: list[Request] = [
    ("DELETE", "/q", b""),
    ("PUT", "/q", b""),
    ("POST", "/q/messages", b"x"),
    ("GET", "/q/messages", b""),
    ("GET", "/q", b""),
]
ADDITIONS: list[Request] = [
    ("GET", "/-/q/stats", b""),
    ("POST", "/-/q/reap", b""),
    ("GET", "/-/q/browse", b""),
    ("POST", "/-/q/pause", b""),
    ("POST", "/-/q/resume", b""),
    ("POST", "/-/q/publish", b'[{"body":"AA==","delay":5}]'),
    ("POST", "/-/q/publish", b'[{"body":"AA=="},{"body":"AA==","id":"x"}]'),
    ("GET", "/-/q/messages/x", b""),
    ("POST", "/-/q/lease?limit=5", b""),
    ("POST", "/-/q/remove", b'{"state":"ready"}'),
    ("POST", "/-/q/requeue", b'{"state":"failed"}'),
    ("GET", "/-/stats", b""),
]


@pytest.fixture(params=["file", "redis", "memory", "fsq", "mq", "sq", "vsqs"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    if request.param == "redis":
        with RedisServer() as redis:
            yield open_backend(redis.url, remote_leases=True)
        return
    place = f"//deleted-{tmp_path.name}" if request.param == "memory" else f"//{tmp_path}/root"
    yield open_backend(f"{request.param}:{place}", remote_leases=True)


async def ask(port: int, requests: Iterable[Request], statuses: Counter[tuple[str, str, int]]) -> None:
    """Send requests one after another on one connection, and count the statuses."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for method, path, body in requests:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        lengths = [int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:")]
        await reader.readexactly(sum(lengths))
        statuses[method, path, int(lines[0].split()[1])] += 1
    writer.close()
    await writer.wait_closed()


async def test_no_request_fails_because_the_queue_is_deleted(backend: Backend) -> None:
    statuses: Counter[tuple[str, str, int]] = Counter()
    with served(backend) as server:
        clients = [[request] * ROUNDS for request in PLAIN] * 3 + [ADDITIONS * (ROUNDS // 6)] * 2
        async with asyncio.timeout(100):
            await asyncio.gather(*(ask(server.port, requests, statuses) for requests in clients))
    assert {key: count for key, count in statuses.items() if key[2] >= 500} == {}
    assert statuses["POST", "/q/messages", 201] == 3 * ROUNDS
    assert statuses["PUT", "/q", 201] == 3 * ROUNDS
