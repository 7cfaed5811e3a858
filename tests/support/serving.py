"""A server of the test's own, on a free port, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any

import msgspec
import uvicorn

from qworker.asgi.limits import limited_protocol
from qworker.asgi.server import bind
from qworker.backend import Backend
from qworker.server.app import MqApp, create_app
from qworker.server.server import serve

# The status, headers and body.
Response = tuple[int, http.client.HTTPMessage, bytes]


class Served(msgspec.Struct):
    """A running server."""

    port: int
    app: MqApp
    server: uvicorn.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def served(
    backend: Backend,
    *,
    bounds: dict[str, Any] | None = None,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    **options: Any,
) -> Generator[Served]:
    """Serve `backend` until the block ends; then the backend is closed."""
    app = create_app(backend, **options)
    listener = bind("127.0.0.1", 0)
    port: int = listener.getsockname()[1]
    ready: queue.SimpleQueue[uvicorn.Server | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(serve(app, listener, protocol=limited_protocol(**(bounds or {})), ready=ready.put))
        except BaseException as error:
            ready.put(error)
            raise

    thread = threading.Thread(target=run, name="served", daemon=True)
    thread.start()
    server = ready.get(timeout=50)
    if isinstance(server, BaseException):
        raise server
    try:
        yield Served(port, app, server)
    finally:
        server.should_exit = True
        # Connections that a failed test left open.
        server.force_exit = True
        thread.join(timeout=50)
        assert not thread.is_alive(), "the server does not end"


def ask(server: Served, method: str, path: str, body: bytes | None = None, **headers: str) -> Response:
    """Send one request. In the names of headers, `_` stands for `-`."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=50)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()
