"""Limits of connections: their number, the time in which a request must arrive, and the size of its headers.

uvicorn does not have these limits. Without them, a few slow clients could occupy the server or its memory without end.
"""

from __future__ import annotations

import asyncio
import enum
from http import HTTPStatus
from typing import Any, ClassVar, cast

from qworker.asgi.protocol import WholeProtocol, refusal
from qworker.kit.network import client_group

__all__ = ["LimitedProtocol", "limited_protocol"]

_TOO_SLOW = refusal(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive in time: send it at once")
_TOO_LONG = refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the headers are too long: send fewer or shorter ones")
_TOO_MANY = refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections: close some, or try again later")
_TOO_MANY_HERE = refusal(
    HTTPStatus.SERVICE_UNAVAILABLE, "too many connections from this address: close some, or try again later"
)

# The share of the connections from which on they are short.
_SHORT = 0.75
# Seconds for the headers, and for a body before its connection can be closed, while connections are short.
_SHORT_DEADLINE_S = 2.0
# Bytes that a client must read within the deadline of a response.
_SLOWEST = 1 << 16


class _Phase(enum.Enum):
    """The part of a request that is arriving."""

    IDLE = 0
    HEADERS = 1
    BODY = 2


class _HeadersTooLongError(Exception):
    """Stops the parser."""


class LimitedProtocol(WholeProtocol):
    """The protocol with limits."""

    # The maximum number of connections. Further ones take the place of one that waits for its client, or are refused.
    most: ClassVar[int] = 1000
    # The same for the connections from one address. None: no limit of its own.
    most_per_address: ClassVar[int | None] = None
    # The deadlines are in seconds.
    header_deadline: ClassVar[float] = 10.0
    body_deadline: ClassVar[float] = 30.0
    # For each part of a response that the client does not read.
    response_deadline: ClassVar[float] = 30.0
    # For the whole connection. None: it can have any number of requests.
    connection_deadline: ClassVar[float | None] = None
    # Maximum bytes of a request line and its headers.
    longest_header: ClassVar[int] = 32 * 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self._unsent_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._phase = _Phase.IDLE
        # The phase of the timer.
        self._timed = _Phase.IDLE
        # The time since which the server waits for this client.
        self._waits_since = self.loop.time()
        # The bytes of incomplete headers that arrived before, and the bytes that are parsed now.
        self._header_bytes = 0
        self._new_bytes = 0
        # Whether these include a part of an earlier request.
        self._is_mixed = False

    # -- the number of connections -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a connection, unless there are too many."""
        super().connection_made(cast("asyncio.Transport", transport))
        if self.most_per_address is not None and self._count_here() > self.most_per_address:
            self._turn_away(_TOO_MANY_HERE)
        elif len(self.connections) > self.most and not self._has_room():
            self._turn_away(_TOO_MANY)
        else:
            self._arm(_Phase.HEADERS)
            if self.connection_deadline is not None:
                # A client that does not read its response would keep a connection that is only closed.
                self._end_timer = self.loop.call_later(self.connection_deadline, self.transport.abort)

    def _count_here(self) -> int:
        here = self._group()
        return sum(each._group() == here for each in self._open())  # noqa: SLF001 - of the same class

    def _group(self) -> str:
        return client_group(self.client[0]) if self.client is not None else ""

    def _open(self) -> list[LimitedProtocol]:
        """Return the connections that are not being closed, or whose client must read the rest before."""
        connections = cast("set[LimitedProtocol]", self.connections)
        return [
            each
            for each in connections
            if not each.transport.is_closing() or each.transport.get_write_buffer_size() > 0
        ]

    def _has_room(self) -> bool:
        """Return whether there is a place. If necessary, the connection that waits longest for its client is closed."""
        connections = self._open()
        if len(connections) <= self.most:
            return True
        waiting = [each for each in connections if each is not self and each.waits_for_client]
        if not waiting:
            return False
        min(waiting, key=lambda each: each._waits_since).give_way()  # noqa: SLF001 - of the same class
        return True

    @property
    def waits_for_client(self) -> bool:
        """Whether the server waits for a request, or has waited long for its body."""
        if self.transport.is_closing():
            return False
        if self._phase is _Phase.BODY:
            return self.loop.time() - self._waits_since >= _SHORT_DEADLINE_S
        # A client that still reads its response has its own deadline.
        return not self.is_answering and not self.transport.get_write_buffer_size()

    def give_way(self) -> None:
        """Close this connection, because another client needs the place."""
        if self._phase is _Phase.IDLE or self.is_refused:
            self.abort_unread()
        else:
            self._turn_away(_TOO_SLOW)

    def _turn_away(self, response: bytes) -> None:
        """Close a connection, and try to say why."""
        self._disarm()
        if not self.is_answering:
            self.transport.write(response)
        self.transport.close()
        self._watch_unsent()

    # -- the time and the size of requests ---------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and start a timer if the request is incomplete. One that arrives at once needs no timer."""
        if self.is_refused:
            return
        self._new_bytes = len(data)
        self._is_mixed = self._phase is _Phase.BODY
        super().data_received(data)
        if self._phase is _Phase.HEADERS and self._count_header_bytes() > self.longest_header:
            self.refuse(_TOO_LONG)
        elif self._phase is _Phase.IDLE and self.is_answering:
            self._header_bytes = 0
            self._disarm()
        elif self._phase is _Phase.BODY:
            self._expect(_Phase.BODY)
        else:
            # The parser skips empty lines before a request. They must not keep a connection either.
            self._expect(_Phase.HEADERS)

    def on_message_begin(self) -> None:
        """Handle the first byte of a request."""
        self._phase = _Phase.HEADERS
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Handle the end of the headers."""
        arrived = self._header_bytes + self._new_bytes
        if arrived > self.longest_header and self._header_size() > self.longest_header:
            self.refuse(_TOO_LONG)
            raise _HeadersTooLongError
        self._phase = _Phase.BODY
        self._header_bytes = 0
        self._is_mixed = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Handle the end of the request. Another request can follow."""
        self._phase = _Phase.IDLE
        super().on_message_complete()

    def _count_header_bytes(self) -> int:
        """Count the bytes of incomplete headers."""
        self._header_bytes = self._header_size() if self._is_mixed else self._header_bytes + self._new_bytes
        return self._header_bytes

    def _header_size(self) -> int:
        """Return the size of the parsed headers. The bytes that have arrived can include a part of a body."""
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def refuse(self, response: bytes) -> None:
        """Refuse what is arriving."""
        self._disarm()
        super().refuse(response)
        self._watch_unsent()

    def _expect(self, phase: _Phase) -> None:
        """Start the timer of a phase, unless it runs already: a client that sends slowly gets no more time."""
        if self._timed is not phase and not self.is_refused:
            self._disarm()
            self._arm(phase)

    def _arm(self, phase: _Phase) -> None:
        self._timed = phase
        self._waits_since = self.loop.time()
        if phase is _Phase.BODY:
            self._timer = self.loop.call_later(self.body_deadline, self.refuse, _TOO_SLOW)
        else:
            self._timer = self.loop.call_later(min(_SHORT_DEADLINE_S, self.header_deadline), self._check_headers)

    def _check_headers(self) -> None:
        left = self._waits_since + self.header_deadline - self.loop.time()
        if left <= 0 or len(self.connections) > _SHORT * self.most:
            self.refuse(_TOO_SLOW)
        else:
            self._timer = self.loop.call_later(min(_SHORT_DEADLINE_S, left), self._check_headers)

    def _disarm(self) -> None:
        self._timed = _Phase.IDLE
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- the time of responses ---------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Stop sending, because the client does not read."""
        super().pause_writing()
        self._watch_unsent()

    def on_response_complete(self) -> None:
        """Handle the end of a response, which the client may not have read."""
        self._waits_since = self.loop.time()
        super().on_response_complete()
        if self._phase is not _Phase.IDLE:
            # The next request is arriving, and has its own deadline.
            self._unset_keepalive_if_required()
        self._watch_unsent()

    def _watch_unsent(self) -> None:
        """Start the timer of the response if a part of it cannot be sent."""
        if self._unsent_timer is None and not self._is_lost:
            self._unsent = self.transport.get_write_buffer_size()
            if self._unsent:
                self._unsent_timer = self.loop.call_later(self.response_deadline, self._check_unsent)

    def _check_unsent(self) -> None:
        self._unsent_timer = None
        if self.transport.get_write_buffer_size() > max(0, self._unsent - _SLOWEST):
            self.abort_unread()
        else:
            self._watch_unsent()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        self._disarm()
        for timer in (self._end_timer, self._unsent_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)


def limited_protocol(
    *,
    most: int = 1000,
    most_per_address: int | None = None,
    header_deadline: float = 10.0,
    body_deadline: float = 30.0,
    response_deadline: float = 30.0,
    connection_deadline: float | None = None,
    longest_header: int = 32 * 1024,
) -> type[LimitedProtocol]:
    """Return a protocol class with these limits.

    Args:
        most: Maximum number of connections at once.
        most_per_address: Maximum number of connections from one address. None: no limit.
        header_deadline: Seconds from the first byte of a request to the end of its headers.
        body_deadline: Seconds from the end of the headers to the end of the body.
        response_deadline: Seconds in which the client must read 64 KiB of a response, or its rest.
        connection_deadline: Seconds from the connection to the end of its response. None: no limit.
        longest_header: Maximum bytes of the request line and the headers.
    """
    return type(
        "LimitedProtocol",
        (LimitedProtocol,),
        {
            "most": most,
            "most_per_address": most_per_address,
            "header_deadline": header_deadline,
            "body_deadline": body_deadline,
            "response_deadline": response_deadline,
            "connection_deadline": connection_deadline,
            "longest_header": longest_header,
        },
    )
