"""Limits of connections: their number, the time in which a request must arrive, and the size of its headers.

uvicorn does not have these limits. Without them, a few slow clients could occupy the server or its memory without end.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from http import HTTPStatus
from typing import Any, ClassVar, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["LimitedProtocol", "limited_protocol"]

# uvicorn's own loggers are left to the app: it may serve with uvicorn too, and have set them.
_LOGGER = logging.getLogger("qworker.asgi")
# A request that is not valid is the client's fault, and the client is told.
_LOGGER.setLevel(logging.ERROR)


def _refusal(status: HTTPStatus, text: str) -> bytes:
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
    return f"{head}content-length: {len(text) + 1}\r\nconnection: close\r\n\r\n{text}\n".encode()


_TOO_SLOW = _refusal(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive in time: send it at once")
_TOO_LONG = _refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the headers are too long: send fewer or shorter ones")
_TOO_MANY = _refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections: close some, or try again later")


class _Phase(enum.Enum):
    """The part of a request that is arriving."""

    IDLE = 0
    HEADERS = 1
    BODY = 2


class _HeadersTooLongError(Exception):
    """Stops the parser."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits."""

    # The maximum number of connections. Further ones are refused and closed immediately.
    most: ClassVar[int] = 1000
    # The deadlines are in seconds.
    header_deadline: ClassVar[float] = 10.0
    body_deadline: ClassVar[float] = 30.0
    # For the whole connection. None: it can have any number of requests.
    connection_deadline: ClassVar[float | None] = None
    # Maximum bytes of a request line and its headers.
    longest_header: ClassVar[int] = 32 * 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _LOGGER
        self.access_log = False
        self._timer: asyncio.TimerHandle | None = None
        self._end: asyncio.TimerHandle | None = None
        self._phase = _Phase.IDLE
        # The phase of the timer.
        self._timed = _Phase.IDLE
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a connection, unless there are too many."""
        super().connection_made(cast("asyncio.Transport", transport))
        if len(self.connections) > self.most:
            self.transport.write(_TOO_MANY)
            self.transport.close()
            return
        self._arm(_Phase.HEADERS, self.header_deadline)
        if self.connection_deadline is not None:
            # A client that does not read its response would keep a connection that is only closed.
            self._end = self.loop.call_later(self.connection_deadline, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        self._disarm()
        if self._end is not None:
            self._end.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and start a timer if the request is incomplete. One that arrives at once needs no timer."""
        if self.transport.is_closing():
            return
        if self._phase is not _Phase.BODY:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._phase is _Phase.HEADERS and self._header_bytes > self.longest_header:
            self._refuse(_TOO_LONG)
        elif self._phase is _Phase.IDLE and self._is_answering():
            self._header_bytes = 0
            self._disarm()
        elif self._phase is _Phase.BODY:
            self._expect(_Phase.BODY, self.body_deadline)
        else:
            # The parser skips empty lines before a request. They must not keep a connection either.
            self._expect(_Phase.HEADERS, self.header_deadline)

    def on_message_begin(self) -> None:
        """Handle the first byte of a request."""
        self._phase = _Phase.HEADERS
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Handle the end of the headers."""
        if self._header_bytes > self.longest_header and self._header_size() > self.longest_header:
            self._refuse(_TOO_LONG)
            raise _HeadersTooLongError
        self._phase = _Phase.BODY
        self._header_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Handle the end of the request. Another request can follow."""
        self._phase = _Phase.IDLE
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not valid, unless it is refused already."""
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def _header_size(self) -> int:
        """Return the exact size. The bytes that have arrived can include a part of the body."""
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def _is_answering(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and not cycle.response_complete

    def _expect(self, phase: _Phase, seconds: float) -> None:
        """Start the timer of a phase, unless it runs already: a client that sends slowly gets no more time."""
        if self._timed is not phase:
            self._disarm()
            self._arm(phase, seconds)

    def _arm(self, phase: _Phase, seconds: float) -> None:
        self._timed = phase
        self._timer = self.loop.call_later(seconds, self._refuse, _TOO_SLOW)

    def _disarm(self) -> None:
        self._timed = _Phase.IDLE
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, response: bytes) -> None:
        self._disarm()
        if self.transport.is_closing():
            return
        # If an earlier response is being sent, this one would become a part of it.
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(response)
        self.transport.close()


def limited_protocol(
    *,
    most: int = 1000,
    header_deadline: float = 10.0,
    body_deadline: float = 30.0,
    connection_deadline: float | None = None,
    longest_header: int = 32 * 1024,
) -> type[LimitedProtocol]:
    """Return a protocol class with these limits.

    Args:
        most: Maximum number of connections at once.
        header_deadline: Seconds from the first byte of a request to the end of its headers.
        body_deadline: Seconds from the end of the headers to the end of the body.
        connection_deadline: Seconds from the connection to the end of its response. None: no limit.
        longest_header: Maximum bytes of the request line and the headers.
    """
    return type(
        "LimitedProtocol",
        (LimitedProtocol,),
        {
            "most": most,
            "header_deadline": header_deadline,
            "body_deadline": body_deadline,
            "connection_deadline": connection_deadline,
            "longest_header": longest_header,
        },
    )
