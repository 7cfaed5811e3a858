"""Clients that leave as a message arrives, over real connections: a message that nobody has read is ready again."""

from __future__ import annotations

import json
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from tests.fault.loops import LOOPS
from tests.support.depth import DEPTH
from tests.support.processes import environment
from tests.support.servers import RedisServer
from tests.support.serving import Served, served
from tests.support.waiting import PATIENCE, wait_for

POLLS = [b"GET /q/messages?wait=60&visibility_timeout=600", b"POST /-/q/lease?wait=60&visibility_timeout=600"]
RESET = struct.pack("ii", 1, 0)


@contextmanager
def store_url(scheme: str, tmp_path: Path) -> Iterator[str]:
    if scheme == "redis":
        with RedisServer() as redis:
            yield redis.url
    else:
        yield f"file://{tmp_path}/root?sync=off"


@pytest.fixture(params=["file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with store_url(request.param, tmp_path) as url:
        yield url


@pytest.fixture(params=LOOPS)
def server(request: pytest.FixtureRequest, url: str) -> Iterator[Served]:
    backend: Backend = open_backend(url, remote_leases=True)
    with served(backend, loop_factory=LOOPS[request.param]) as running:
        ask(running, "PUT", "/q")
        yield running


def ask(server: Served, method: str, path: str, body: bytes = b"") -> httpx.Response:
    return httpx.request(method, server.url + path, content=body, timeout=PATIENCE, trust_env=False)


def count(server: Served) -> tuple[int, int]:
    """The numbers of ready and of leased messages."""
    stats = ask(server, "GET", "/-/q/stats").json()
    return stats["ready"], stats["leased"]


def poll(server: Served, line: bytes, *headers: bytes) -> socket.socket:
    """A connection whose request waits for a message."""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    client.sendall(b"\r\n".join([line + b" HTTP/1.1", b"Host: localhost", *headers, b"", b""]))
    wait_for(lambda: len(server.app.leases.polls) == 1, "the server waits for a message")
    return client


def read_answer(client: socket.socket) -> bytes:
    """A whole answer: the server sends the headers first, and the body a moment later."""
    answer = b""
    while not (found := re.search(rb"(?is)content-length: (\d+).*?\r\n\r\n", answer)) or (
        len(answer) < found.end() + int(found[1])
    ):
        more = client.recv(1 << 16)
        assert more, answer
        answer += more
    return answer


def close(client: socket.socket) -> None:
    client.close()


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    client.close()


@pytest.mark.parametrize("line", POLLS, ids=["mq", "additions"])
@pytest.mark.parametrize("leave", [close, reset])
def test_a_message_that_arrives_as_its_client_leaves_is_released(
    server: Served, line: bytes, leave: Callable[[socket.socket], None]
) -> None:
    publish = b"POST /q/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx"
    for number in range(10 * DEPTH):
        client = poll(server, line, *([b"Connection: close"] if number % 2 else []))
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as publisher:
            publisher.sendall(publish)
            # The client leaves at another moment of the publish each time.
            for _ in range(number * 5000):
                pass
            leave(client)
            assert publisher.recv(1000).startswith(b"HTTP/1.1 201 ")
        wait_for(lambda: count(server) == (1, 0), "the message is ready again")
        assert ask(server, "DELETE", "/q").status_code == 200
        assert ask(server, "PUT", "/q").status_code == 201


@pytest.mark.parametrize("size", [1, 8 << 20])
@pytest.mark.parametrize("headers", [(), (b"Connection: close",)], ids=["kept", "closed"])
def test_a_message_that_arrived_and_was_not_read_is_released(url: str, size: int, headers: tuple[bytes, ...]) -> None:
    with served(open_backend(url, remote_leases=True), body_limit=10 << 20) as server:
        ask(server, "PUT", "/q")
        client = poll(server, POLLS[0], *headers)
        assert ask(server, "POST", "/q/messages", b"x" * size).status_code == 201
        assert client.recv(1, socket.MSG_PEEK)
        client.close()
        wait_for(lambda: count(server) == (1, 0), "the message is ready again")


def test_a_client_that_reads_nothing_loses_its_message_with_its_connection(url: str) -> None:
    backend = open_backend(url, remote_leases=True)
    with served(backend, bounds={"response_deadline": 0.2}, body_limit=40 << 20) as server:
        ask(server, "PUT", "/q")
        client = poll(server, POLLS[0])
        assert ask(server, "POST", "/q/messages", b"x" * (32 << 20)).status_code == 201
        wait_for(lambda: count(server) == (1, 0), "the message is ready again")
        client.close()


@pytest.mark.parametrize("line", POLLS, ids=["mq", "additions"])
@pytest.mark.parametrize("headers", [(), (b"Connection: close",)], ids=["kept", "closed"])
def test_a_client_that_has_read_its_message_keeps_it_without_its_connection(
    server: Served, line: bytes, headers: tuple[bytes, ...]
) -> None:
    client = poll(server, line, *headers)
    assert ask(server, "POST", "/q/messages", b"x").status_code == 201
    answer = read_answer(client)
    client.close()
    wait_for(lambda: not server.server.server_state.connections, "the server knows the end of the connection")
    assert count(server) == (0, 1)
    if line is POLLS[0]:
        found = dict(re.findall(rb"(x-lease-token|x-message-id): (\S+)", answer))
        held, token = found[b"x-message-id"].decode(), found[b"x-lease-token"].decode()
    else:
        (grant,) = json.loads(answer.partition(b"\r\n\r\n")[2])
        held, token = grant["message"]["id"], str(grant["token"])
    path = f"{server.url}/q/messages/{held}"
    done = httpx.delete(path, headers={"X-Lease-Token": token}, timeout=PATIENCE, trust_env=False)
    assert done.status_code == 202


@contextmanager
def serving(url: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process of `qworker serve`, which must end well, and its port."""
    command = [sys.executable, "-m", "qworker", "serve", url, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stderr is not None
        try:
            found = re.search(rb"http://127.0.0.1:(\d+)", process.stderr.readline())
            assert found is not None
            yield process, int(found[1])
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


WAITS = [*POLLS, b"POST /-/wait"]


@pytest.mark.parametrize("line", WAITS, ids=["mq", "additions", "wait"])
def test_polls_are_answered_at_once_when_the_server_gets_a_signal(url: str, line: bytes) -> None:
    body = b'{"queues":["q"],"timeout":60}' if line is WAITS[2] else b""
    with serving(url) as (process, port):
        with socket.create_connection(("127.0.0.1", port), timeout=25) as client:
            client.sendall(b"PUT /q HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 201 ")
            client.sendall(b"%b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (line, len(body), body))
            process.send_signal(signal.SIGTERM)
            answer = client.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 20")
        assert b"connection: close" in answer
