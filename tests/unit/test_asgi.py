"""The server of `qworker serve` and of the health port: its limits, how it ends, and what it leaves alone."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from qworker.asgi.interface import Receive, Scope, Send, read_body, respond, wait_for_disconnect
from qworker.asgi.limits import limited_protocol
from qworker.asgi.server import ServerThread
from qworker.health.address import listen
from tests.support.waiting import PATIENCE, wait_for

NAME = "asgi-under-test"
BIG = 32 << 20


class App:
    """Answers with the length of the body, with many bytes, or not at all. With `?keep` the connection stays open."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        # Those of the last request, after its body.
        self.headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(scope["path"])
        body = await read_body(scope, receive, 1 << 20)
        self.headers = list(scope["headers"])
        if scope["path"] == "/held":
            await wait_for_disconnect(receive)
            return
        answer = bytes(BIG) if scope["path"] == "/big" else b"%d" % len(body)
        await respond(send, 200, [] if scope["query_string"] == b"keep" else [(b"connection", b"close")], answer)


@contextmanager
def serving(app: App, **limits: Any) -> Iterator[int]:
    """The port of a server in a thread, which ends with the block."""
    listener = listen(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    failures: list[Exception] = []
    server = ServerThread(app, limited_protocol(**limits), listener, name=NAME, on_failure=failures.append)
    try:
        yield port
    finally:
        server.close()
    assert not is_running()
    assert not failures
    assert listener.fileno() == -1


def is_running() -> bool:
    return NAME in {thread.name for thread in threading.enumerate()}


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def read_all(connection: socket.socket) -> bytes:
    """What arrives until the server closes, also by a reset."""
    received = bytearray()
    try:
        while part := connection.recv(1 << 20):
            received += part
    except ConnectionResetError:
        pass
    return bytes(received)


def exchange(port: int, request: bytes) -> bytes:
    with connect(port) as connection:
        connection.sendall(request)
        return read_all(connection)


def test_headers_that_arrive_in_one_piece_are_limited_too() -> None:
    app = App()
    head = b"GET /a HTTP/1.1\r\nX: " + b"x" * 2000 + b"\r\n\r\n"
    with serving(app, longest_header=1000) as port:
        answer = exchange(port, head)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert answer.endswith(b"\r\n\r\nthe headers are too long: send fewer or shorter ones\n")
        assert not app.asked


def test_a_long_body_behind_short_headers_is_no_long_header() -> None:
    request = b"POST /a HTTP/1.1\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000
    with serving(App(), longest_header=1000) as port:
        assert exchange(port, request).endswith(b"\r\n\r\n2000")


def test_a_connection_beyond_the_limit_is_told_why() -> None:
    app = App()
    with serving(app, most=2) as port:
        held = [connect(port), connect(port)]
        for connection in held:
            connection.sendall(b"GET /held HTTP/1.1\r\n\r\n")
        wait_for(lambda: app.asked == ["/held", "/held"], "the requests")
        answer = exchange(port, b"GET /a HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert answer.endswith(b"\r\n\r\ntoo many connections: close some, or try again later\n")
        held.pop().close()
        wait_for(lambda: exchange(port, b"GET /a HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200 "), "a free place")
        held.pop().close()


def test_a_client_that_does_not_read_its_response_frees_its_place_at_the_deadline() -> None:
    app = App()
    with serving(app, most=1, connection_deadline=1.0) as port, connect(port) as idle:
        idle.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        wait_for(lambda: app.asked == ["/big"], "the request")
        wait_for(lambda: exchange(port, b"GET /a HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200 "), "a free place")
        assert len(read_all(idle)) < BIG


def test_the_end_waits_for_no_client() -> None:
    app = App()
    with serving(app) as port:
        silent, half, unread = connect(port), connect(port), connect(port)
        half.sendall(b"POST /half HTTP/1.1\r\nContent-Length: 9\r\n\r\nhal")
        unread.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        wait_for(lambda: sorted(app.asked) == ["/big", "/half"], "the requests")
    assert read_all(silent) == b""
    assert read_all(half) == b""
    assert len(read_all(unread)) < BIG
    for connection in (silent, half, unread):
        connection.close()


def test_a_client_that_reads_nothing_frees_its_place_on_a_connection_without_a_deadline() -> None:
    app = App()
    with serving(app, most=1, response_deadline=0.2) as port, connect(port) as idle:
        idle.sendall(b"GET /big?keep HTTP/1.1\r\n\r\n")
        wait_for(lambda: app.asked == ["/big"], "the request")
        wait_for(lambda: exchange(port, b"GET /a HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200 "), "a free place")
        assert len(read_all(idle)) < BIG


def test_a_client_that_still_reads_its_response_gives_way_to_nobody() -> None:
    app = App()
    with serving(app, most=1, response_deadline=PATIENCE) as port, connect(port) as slow:
        slow.sendall(b"GET /big?keep HTTP/1.1\r\n\r\n")
        received = len(slow.recv(1000))
        assert exchange(port, b"GET /a HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 503 ")
        while received < BIG:
            received += len(slow.recv(1 << 20))


def test_a_server_that_cannot_listen_says_so() -> None:
    listener = listen(("127.0.0.1", 0))
    listener.close()
    failures: list[Exception] = []
    server = ServerThread(App(), limited_protocol(), listener, name=NAME, on_failure=failures.append)
    wait_for(lambda: failures, "the failure")
    server.close()
    assert isinstance(failures[0], OSError)
    assert not is_running()


def test_the_logging_and_the_environment_of_the_process_are_left_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEB_CONCURRENCY", "auto")
    caplog.set_level(logging.INFO)
    loggers = [logging.getLogger(name) for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")]
    handler = logging.NullHandler()
    for logger in loggers:
        monkeypatch.setattr(logger, "handlers", [handler])
    before = [(logger.level, logger.propagate, logger.disabled) for logger in loggers]
    with serving(App()) as port:
        assert exchange(port, b"GET /a HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200 ")
        assert exchange(port, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
        upgrade = b"GET /a HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        assert exchange(port, upgrade).startswith(b"HTTP/1.1 200 ")
    assert [(logger.level, logger.propagate, logger.disabled) for logger in loggers] == before
    assert all(logger.handlers == [handler] for logger in loggers)
    assert not caplog.records
