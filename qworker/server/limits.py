"""Limits of connections: their number, the time in which a request must arrive, and the size of its headers.

uvicorn does not have these limits. Without them, a few slow clients could occupy the server or its memory without end.
"""

from __future__ import annotations

import asyncio
import enum
from typing import Any, ClassVar, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["LimitedProtocol", "limited_protocol"]

_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class _Phase(enum.Enum):
    """The part of a request that is arriving."""

    IDLE = 0
    HEADERS = 1
    BODY = 2


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits."""

    # The maximum number of connections. Further ones are closed immediately.
    most: ClassVar[int] = 1000
    # Both deadlines are in seconds.
    header_deadline: ClassVar[float] = 10.0
    body_deadline: ClassVar[float] = 30.0
    # Maximum bytes of a request line and its headers.
    longest_header: ClassVar[int] = 32 * 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._phase = _Phase.IDLE
        # The phase of the timer.
        self._timed = _Phase.IDLE
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a connection, unless there are too many."""
        super().connection_made(cast("asyncio.Transport", transport))
        if len(self.connections) > self.most:
            self.transport.abort()
            return
        self._arm(_Phase.HEADERS, self.header_deadline)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer."""
        self._disarm()
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
        elif self._phase is _Phase.IDLE:
            self._header_bytes = 0
            self._disarm()
        elif self._timed is not self._phase:
            self._disarm()
            self._arm(self._phase, self.header_deadline if self._phase is _Phase.HEADERS else self.body_deadline)

    def on_message_begin(self) -> None:
        """Handle the first byte of a request."""
        self._phase = _Phase.HEADERS
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Handle the end of the headers."""
        self._phase = _Phase.BODY
        self._header_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Handle the end of the request. Another request can follow."""
        self._phase = _Phase.IDLE
        super().on_message_complete()

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
    *, most: int = 1000, header_deadline: float = 10.0, body_deadline: float = 30.0, longest_header: int = 32 * 1024
) -> type[LimitedProtocol]:
    """Return a protocol class with these limits.

    Args:
        most: Maximum number of connections at once.
        header_deadline: Seconds from the first byte of a request to the end of its headers.
        body_deadline: Seconds from the end of the headers to the end of the body.
        longest_header: Maximum bytes of the request line and the headers.
    """
    return type(
        "LimitedProtocol",
        (LimitedProtocol,),
        {
            "most": most,
            "header_deadline": header_deadline,
            "body_deadline": body_deadline,
            "longest_header": longest_header,
        },
    )
