"""Clients that leave while they wait for a message: it is in a response, or ready again, and never lost."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.errors import BackendUnavailable
from qworker.message import Draft, Lease
from qworker.server.app import MqApp, create_app
from qworker.testing.wait_until_blocked import wait_until_blocked
from qworker_memory import MemoryBackend
from tests.support.serving import served
from tests.support.waiting import wait_for

STORES = ["memory://{name}", "file://{root}/spool?sync=off", "mq://{root}/root?sync=off"]
POLLS = [("GET", "/q/messages", b"wait=45"), ("POST", "/-/q/lease", b"wait=45")]


class Client:
    """The server's side of one request: what the client sends, and what it receives."""

    def __init__(self, method: str, path: str, query: bytes, body: bytes = b"") -> None:
        self.left = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self._requests = [{"type": "http.request", "body": body, "more_body": False}]
        self.scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query,
            "headers": [(b"host", b"localhost")],
        }

    async def receive(self) -> dict[str, Any]:
        if self._requests:
            return self._requests.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def ask(self, app: MqApp) -> None:
        await app(self.scope, self.receive, self.send)

    @property
    def messages(self) -> int:
        """The number of messages in the response."""
        if not self.sent or self.sent[0]["status"] != 200:
            return 0
        body: bytes = self.sent[1]["body"]
        return len(json.loads(body)) if self.scope["method"] == "POST" else 1


class Polls(MemoryBackend):
    """A store that counts its calls that wait."""

    running = 0

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        self.running += bool(timeout)
        try:
            return await super().lease(queue, limit, visibility, timeout)
        finally:
            self.running -= bool(timeout)


@pytest.fixture(params=STORES, ids=["memory", "file", "mq"])
async def backend(request: pytest.FixtureRequest, tmp_path: Any) -> AsyncIterator[Backend]:
    url = request.param.format(root=tmp_path, name=f"leaves-{secrets.token_hex(4)}")
    backend = open_backend(url, remote_leases=True)
    await backend.create("q")
    yield backend
    await backend.aclose()


async def settled(backend: Backend, app: MqApp, client: Client) -> None:
    """Check that the message is in the response or ready with its tries unchanged, and remove it."""
    stats = await backend.stats("q")
    assert (stats.ready, stats.leased) == (1 - client.messages, client.messages)
    assert len(app.leases) == client.messages
    if not client.messages:
        (lease,) = await backend.lease("q", 1, 30.0)
        assert lease.message.tries == 0
    await backend.delete("q")
    await backend.create("q")
    app.leases._held.clear()


@pytest.mark.parametrize(("method", "path", "query"), POLLS)
@pytest.mark.parametrize("leaves_first", [True, False])
async def test_a_client_that_leaves_as_a_message_arrives_loses_none(backend, method, path, query, leaves_first):
    app = create_app(backend, reaps=False)
    received = 0
    for turns in range(20):
        client = Client(method, path, query)
        request = asyncio.create_task(client.ask(app))
        await wait_until_blocked(request)
        if leaves_first:
            client.left.set()
            await backend.publish("q", [Draft(body=b"x")])
        else:
            await backend.publish("q", [Draft(body=b"x")])
            for _ in range(turns):
                await asyncio.sleep(0)
            client.left.set()
        async with asyncio.timeout(40):
            await request
        received += client.messages
        await settled(backend, app, client)
    assert received == 0 or not leaves_first


@pytest.mark.parametrize(("method", "path", "query"), POLLS)
async def test_a_request_that_the_server_cancels_as_a_message_arrives_loses_none(backend, method, path, query):
    app = create_app(backend, reaps=False)
    for turns in range(20):
        client = Client(method, path, query)
        request = asyncio.create_task(client.ask(app))
        await wait_until_blocked(request)
        await backend.publish("q", [Draft(body=b"x")])
        for _ in range(turns):
            await asyncio.sleep(0)
        request.cancel()
        await asyncio.wait([request])
        assert request.cancelled() or client.messages
        await settled(backend, app, client)


@pytest.mark.parametrize(
    ("method", "path", "query", "body"),
    [*[(*poll, b"") for poll in POLLS], ("POST", "/-/wait", b"", b'{"queues":["q"],"timeout":45}')],
)
async def test_a_cancelled_request_is_no_client_that_left(backend, method, path, query, body):
    app = create_app(backend, reaps=False)
    client = Client(method, path, query, body)
    request = asyncio.create_task(client.ask(app))
    await wait_until_blocked(request)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert client.sent == []


async def test_a_wait_ends_when_its_client_leaves(backend):
    client = Client("POST", "/-/wait", b"", b'{"queues":["q"],"timeout":45}')
    request = asyncio.create_task(client.ask(create_app(backend, reaps=False)))
    await wait_until_blocked(request)
    client.left.set()
    async with asyncio.timeout(40):
        await request
    assert client.sent[0]["status"] == 204


async def test_an_error_of_the_store_in_a_poll_is_answered_as_in_any_other_request():
    class Broken(MemoryBackend):
        async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
            raise BackendUnavailable("the store does not answer")

    app = create_app(Broken("broken"), reaps=False)
    for method, path, query in POLLS:
        client = Client(method, path, query)
        await client.ask(app)
        assert client.sent[0]["status"] == 503


def test_a_connection_that_is_closed_during_a_poll_leaves_the_message_to_the_next_client():
    polls = Polls(f"leaves-{secrets.token_hex(4)}")
    request = b"%s HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with served(polls) as server:
        for number in range(10):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(request % b"GET /q/messages?wait=45")
                wait_for(lambda: polls.running == 1, "the server waits for a message")
            wait_for(lambda: polls.running == 0, "the server has noticed that the client left")
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(b"POST /q/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\n%d" % number)
                assert client.recv(4096).startswith(b"HTTP/1.1 201")
                client.sendall(request % b"GET /q/messages")
                answer = b""
                while not answer.endswith(b"\r\n\r\n%d" % number):
                    answer += client.recv(4096)
                assert answer.startswith(b"HTTP/1.1 200")
                assert b"x-message-tries: 0" in answer.lower()
