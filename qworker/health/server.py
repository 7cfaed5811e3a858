"""The server of the health port. It has its own thread, so it answers while a handler blocks the worker.

Each connection has one request. The time and the size of a request and the number of connections are limited, so that
clients cannot slow down the worker.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from http import HTTPStatus

import msgspec
import structlog

from qworker.asgi.access import Access
from qworker.asgi.interface import Headers, Receive, Scope, Send, get_header, respond
from qworker.asgi.limits import limited_protocol
from qworker.asgi.server import ServerThread
from qworker.health.answers import HealthAnswers

__all__ = ["HealthApp", "HealthServer"]

# Seconds for the whole request and its response.
_DEADLINE_S = 5.0
_MOST_HEADER_BYTES = 8192
_MOST_CONNECTIONS = 64
_GUARDED = {"/metrics", "/stats"}
_TEXT = "text/plain; charset=utf-8"
_COMMON: Headers = [(b"cache-control", b"no-store"), (b"connection", b"close")]

_Answer = tuple[HTTPStatus, Headers, bytes]


class HealthApp:
    """The ASGI application of the health port.

    Args:
        view: The answers.
        token: The token that `/metrics` and `/stats` require as `Authorization: Bearer TOKEN`. None: no token.
    """

    def __init__(self, view: HealthAnswers, token: str | None) -> None:
        self._view = view
        # Anybody who reaches the port may read the metrics, but no web page may.
        self._access = Access(token, public=True)
        self._log = structlog.get_logger("qworker.health")
        self._pages: dict[str, Callable[[Scope], _Answer]] = {
            "/livez": lambda _: _verdict(*view.live()),
            "/readyz": lambda _: _verdict(*view.ready()),
            "/stats": self._stats,
            "/metrics": self._metrics,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        status, headers, body = self._answer(scope)
        await respond(send, status.value, [*headers, *_COMMON], body)

    def _answer(self, scope: Scope) -> _Answer:
        path: str = scope["path"]
        if scope["http_version"] not in {"1.0", "1.1"}:
            return _text(HTTPStatus.BAD_REQUEST, "not an HTTP/1.1 request")
        page = self._pages.get(path)
        if page is None:
            return _text(HTTPStatus.NOT_FOUND, f"not a page: use one of {', '.join(self._pages)}")
        if scope["method"] not in {"GET", "HEAD"}:
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "GET or HEAD", (b"allow", b"GET, HEAD"))
        refusal = self._access.refusal(scope) if path in _GUARDED else None
        if refusal is not None:
            return HTTPStatus(refusal[0]), refusal[1], refusal[2]
        try:
            return page(scope)
        except Exception as error:  # noqa: BLE001 - one page that fails must not silence the probes
            self._log.error("health_page_failed", path=path, error=repr(error))
            return _text(HTTPStatus.INTERNAL_SERVER_ERROR, "failed: see the log")

    def _stats(self, _scope: Scope) -> _Answer:
        stats = self._view.stats()
        if stats is None:
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, "the queues have not been checked yet")
        return _page("application/json", msgspec.json.encode(stats) + b"\n")

    def _metrics(self, scope: Scope) -> _Answer:
        accept = (get_header(scope, b"accept") or b"").decode("latin-1")
        body, content_type = self._view.metrics(accept)
        return _page(content_type, body)


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
        log = structlog.get_logger("qworker.health")
        self.port: int = listener.getsockname()[1]
        protocol = limited_protocol(
            most=_MOST_CONNECTIONS,
            header_deadline=deadline,
            body_deadline=deadline,
            connection_deadline=deadline,
            longest_header=_MOST_HEADER_BYTES,
        )
        self._thread = ServerThread(
            HealthApp(view, token),
            protocol,
            listener,
            name="qworker-health",
            on_failure=lambda error: log.error("health_server_failed", error=repr(error)),
        )

    def close(self) -> None:
        """Close the server. From any other thread."""
        self._thread.close()


def _verdict(good: bool, text: str) -> _Answer:
    return _text(HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, text)


def _text(status: HTTPStatus, text: str, *headers: tuple[bytes, bytes]) -> _Answer:
    return status, [(b"content-type", _TEXT.encode()), *headers], f"{text}\n".encode()


def _page(content_type: str, body: bytes) -> _Answer:
    return HTTPStatus.OK, [(b"content-type", content_type.encode())], body
