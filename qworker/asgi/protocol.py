"""uvicorn's protocol, but each request is read whole, and answered in its order.

uvicorn takes the body of a request that offers another protocol (`Upgrade`) for the next request. It also answers a
request that is not valid before the requests ahead of it, and does not report responses that no client has read.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import struct
import termios
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from qworker.asgi.interface import UNREAD

__all__ = ["WholeProtocol", "refusal"]

# uvicorn's own loggers are left to the app: it may serve with uvicorn too, and have set them.
_LOGGER = logging.getLogger("qworker.asgi")
# A request that is not valid is the client's fault, and the client is told.
_LOGGER.setLevel(logging.ERROR)

# Seconds in which a client that was refused can stop to send. If the connection were closed before, the client would
# get a reset in place of the response.
_LINGER_S = 1.0


def refusal(status: HTTPStatus, text: str) -> bytes:
    """Return a response after which the connection is closed."""
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
    return f"{head}content-length: {len(text) + 1}\r\nconnection: close\r\n\r\n{text}\n".encode()


_NOT_VALID = refusal(HTTPStatus.BAD_REQUEST, "the request is not valid HTTP/1.1: check the client")


class _NoTunnelError(Exception):
    """Stops the parser: nothing behind CONNECT is HTTP."""


class WholeProtocol(HttpToolsProtocol):
    """uvicorn's protocol with whole requests and ordered responses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _LOGGER
        self.access_log = False
        # Whether the current request offers another protocol. Then the parser skips its body.
        self._has_offer = False
        self._has_headers = False
        # The response that ends the connection, while responses ahead of it are not complete.
        self._last: bytes | None = None
        self._lingering: asyncio.TimerHandle | None = None
        # What to call if the last response was not read.
        self._unread: list[Callable[[], None]] = []
        self._extensions: dict[str, dict[object, object]] = {UNREAD: {"call": self._call_if_unread}}
        self._is_lost = False
        # Whether the connection ended before all of a response was sent.
        self._is_cut = False

    # -- parsing -----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Feed the parser. A request that offers another protocol is parsed again without the offer."""
        if self.is_refused:
            return
        self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = self._head_without_offer() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                continue
            except httptools.HttpParserError:
                self.refuse(_NOT_VALID)
            break
        if self._has_begun():
            # The application may refuse the request before its body has arrived.
            self._end_in_order()

    def _head_without_offer(self) -> bytes:
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """Begin a request. Its client has read the response before, unless it sends requests ahead."""
        self._has_offer = self._has_headers = False
        if self._unread and not self.is_answering:
            self._unread.clear()
        super().on_message_begin()
        self.scope["extensions"] = self._extensions

    def on_headers_complete(self) -> None:
        """Start the request, unless it must be parsed again."""
        self._has_headers = True
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise _NoTunnelError
            self._has_offer = True
            return
        super().on_headers_complete()
        # Trailers are dropped: they must not say who sends the request, or what it is.
        self.headers = []
        if not self.cycle.keep_alive:
            self._end_in_order()

    def on_message_complete(self) -> None:
        """End the request."""
        if not self._has_offer:
            super().on_message_complete()

    # -- answering ---------------------------------------------------------------------------------------------------

    @property
    def is_answering(self) -> bool:
        """Whether a response is not complete."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and not cycle.response_complete

    @property
    def is_refused(self) -> bool:
        """Whether nothing more is read."""
        return self._last is not None or self._lingering is not None or self.transport.is_closing()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not valid."""
        del msg
        self.refuse(_NOT_VALID)

    def refuse(self, response: bytes) -> None:
        """Answer what is arriving after the responses ahead of it, and close the connection."""
        if self.is_refused:
            return
        if not self._has_begun():
            if self.is_answering:
                self._last = response
            else:
                self._end(response)
            return
        cycle = self.cycle
        if self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
            self._last = response
        elif cycle.response_started:
            # If an earlier part of its own response was sent, this one would become a part of it.
            self.transport.close()
        else:
            cycle.disconnected = True
            cycle.message_event.set()
            self._end(response)

    def _has_begun(self) -> bool:
        """Whether the application has the request that is arriving: its body is incomplete."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return self._has_headers and not self._has_offer and cycle is not None and cycle.more_body

    def on_response_complete(self) -> None:
        """Send the next response, unless this one was the last."""
        if self._lingering is not None:
            return
        is_last = self._last is not None and not self.pipeline
        super().on_response_complete()
        if is_last and not self.transport.is_closing():
            assert self._last is not None
            self._end(self._last)

    def _end(self, response: bytes) -> None:
        self._unset_keepalive_if_required()
        self.transport.write(response)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._lingering = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _end_in_order(self) -> None:
        """Let `end_after_response` close the connection after the response to the current request."""
        self.cycle.transport = cast("asyncio.Transport", _LastTransport(self))

    def end_after_response(self) -> None:
        """Close the connection. A client that still sends, or must have read the response, closes it first."""
        if (self._unread or self._has_begun()) and not self.is_refused and self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.resume_reading()
            self._lingering = self.loop.call_later(_LINGER_S, self.transport.close)
        else:
            self.transport.close()

    # -- responses that nobody has read ------------------------------------------------------------------------------

    def _call_if_unread(self, function: Callable[[], None]) -> None:
        """Call a function if the connection ends before the client has read the response that was just sent."""
        if self._is_lost:
            function()
        else:
            self._unread.append(function)

    def eof_received(self) -> None:
        """Close the connection: a client that ends its side has left."""
        # What is sent from now on is dropped.
        self._is_cut = self.is_answering

    def abort_unread(self) -> None:
        """Close the connection immediately, although the client may not have read everything."""
        self._is_cut = self.transport.get_write_buffer_size() > 0
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the requests, and report the response that was not read."""
        self._is_lost = True
        if self._lingering is not None:
            self._lingering.cancel()
        unread, self._unread = self._unread, []
        is_unread = bool(unread) and (
            exc is not None or self._is_cut or self.is_answering or _has_left_early(self.transport)
        )
        super().connection_lost(exc)
        if is_unread:
            for function in unread:
                function()


class _LastTransport:
    """The transport of the last request of a connection."""

    __slots__ = ("_protocol", "is_closing", "write")

    def __init__(self, protocol: WholeProtocol) -> None:
        self._protocol = protocol
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        self._protocol.end_after_response()


def _has_left_early(transport: asyncio.Transport) -> bool:
    """Return whether the client ended the connection before its machine had everything that was sent."""
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as sock:
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            # The client's machine refused a part, because no program reads it.
            return True
        (unconfirmed,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
        try:
            return unconfirmed > 0 and not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            # The server closes it, and the rest is on its way.
            return False
        except OSError:
            return True
