"""The HTTP/1.1 server of the health port. It has its own thread, so it answers while a handler blocks the worker.

Each connection has one request. The time and the size of a request and the number of connections are limited, so that
clients cannot slow down the worker.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus

import msgspec
import structlog

from qworker.health.answers import HealthAnswers
from qworker.health.exposition import CONTENT_TYPE

__all__ = ["HealthServer"]

# Seconds for the whole request and its response.
_DEADLINE_S = 5.0
_MOST_HEADER_BYTES = 8192
_MOST_CONNECTIONS = 64
_GUARDED = {"/metrics", "/stats"}
_JSON = "application/json"
_TEXT = "text/plain; charset=utf-8"


class _Answer(msgspec.Struct, frozen=True):
    status: HTTPStatus
    body: bytes
    kind: str = _TEXT
    headers: tuple[str, ...] = ()


def _said(status: HTTPStatus, text: str, *headers: str) -> _Answer:
    return _Answer(status, f"{text}\n".encode(), headers=headers)


class HealthServer:
    """The server. It starts when it is created, and runs until `close`.

    Args:
        listener: A listening socket, which the server closes.
        view: The answers.
        token: The token that `/metrics` and `/stats` require as `Authorization: Bearer TOKEN`. None: no token.
        deadline: Seconds for a whole request.
    """

    def __init__(
        self, listener: socket.socket, view: HealthAnswers, *, token: str | None = None, deadline: float = _DEADLINE_S
    ) -> None:
        self._listener = listener
        self._view = view
        self._token = None if token is None else token.encode()
        self._deadline = deadline
        self._open = 0
        self._loop = asyncio.SelectorEventLoop()
        self._ended = asyncio.Event()
        self._log = structlog.get_logger("qworker.health")
        self._pages: dict[str, Callable[[], _Answer]] = {
            "/livez": lambda: self._verdict(*view.live()),
            "/readyz": lambda: self._verdict(*view.ready()),
            "/stats": self._stats,
            "/metrics": lambda: _Answer(HTTPStatus.OK, view.metrics().encode(), CONTENT_TYPE),
        }
        self._thread = threading.Thread(target=self._run, name="qworker-health", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        number: int = self._listener.getsockname()[1]
        return number

    def close(self) -> None:
        """Close the server. From any other thread."""
        if self._thread.is_alive():
            try:
                self._loop.call_soon_threadsafe(self._ended.set)
            except RuntimeError:
                # The loop of the server has just closed.
                pass
            self._thread.join(self._deadline)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:  # noqa: BLE001 - the thread's end must be seen, and the probes fail of themselves
            self._log.error("health_server_failed", error=repr(error))
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._listener, limit=_MOST_HEADER_BYTES)
        await self._ended.wait()
        server.close()
        # Open connections are closed now.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        # asyncio closes a connection in the next turn of the loop.
        await asyncio.sleep(0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            async with asyncio.timeout(self._deadline):
                crowded = self._open > _MOST_CONNECTIONS
                answer = _said(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections") if crowded else None
                head = b"" if crowded else await self._head(reader)
                writer.write(_encode(answer or self._answer(head), with_body=not head.startswith(b"HEAD ")))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            # The client was too slow or has disconnected, or the server is closing.
            pass
        finally:
            self._open -= 1
            writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return b""

    def _answer(self, head: bytes) -> _Answer:
        request, *fields = head.decode("latin-1").split("\r\n")
        words = request.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _said(HTTPStatus.BAD_REQUEST, f"not an HTTP/1.1 request of at most {_MOST_HEADER_BYTES} bytes")
        method, target, _ = words
        path = target.partition("?")[0]
        page = self._pages.get(path)
        if page is None:
            return _said(HTTPStatus.NOT_FOUND, f"not a page: use one of {', '.join(self._pages)}")
        if method not in {"GET", "HEAD"}:
            return _said(HTTPStatus.METHOD_NOT_ALLOWED, "GET or HEAD", "Allow: GET, HEAD")
        if path in _GUARDED and not self._admitted(fields):
            return _said(HTTPStatus.UNAUTHORIZED, "send Authorization: Bearer TOKEN", "WWW-Authenticate: Bearer")
        try:
            return page()
        except Exception as error:  # noqa: BLE001 - one page that fails must not silence the probes
            self._log.error("health_page_failed", path=path, error=repr(error))
            return _said(HTTPStatus.INTERNAL_SERVER_ERROR, "failed: see the log")

    def _admitted(self, fields: list[str]) -> bool:
        if self._token is None:
            return True
        for field in fields:
            name, _, value = field.partition(":")
            if name.strip().lower() == "authorization":
                scheme, _, given = value.strip().partition(" ")
                return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._token)
        return False

    def _verdict(self, good: bool, text: str) -> _Answer:
        return _said(HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, text)

    def _stats(self) -> _Answer:
        stats = self._view.stats()
        if stats is None:
            return _said(HTTPStatus.SERVICE_UNAVAILABLE, "the queues have not been checked yet")
        return _Answer(HTTPStatus.OK, msgspec.json.encode(stats) + b"\n", _JSON)


def _encode(answer: _Answer, *, with_body: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.kind}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "Connection: close",
        *answer.headers,
    ]
    head = "\r\n".join(lines).encode() + b"\r\n\r\n"
    return head + answer.body if with_body else head
