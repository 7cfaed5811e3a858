"""One connection to a Redis server: commands are sent when they arrive, and answers come in the same order.

The general client library needs about 150 us of CPU for a command. This code needs about 10 us, because it does only
what queues need.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import hiredis
from hiredis import ProtocolError, Reader, ReplyError

from qworker.errors import BackendError, BackendUnavailable
from qworker.kit.network import error_text
from qworker_redis.error_replies import ConnectionLost, Reply, to_error
from qworker_redis.options import Address, Options, UnixAddress
from qworker_redis.spin_wait import SpinWait

__all__ = ["Argument", "Connection", "connect", "hello_commands", "ignore_result", "pack", "parse_hello", "unreachable"]

Argument = bytes | str | int | float

# Its own annotation has one argument and no result.
pack = cast("Callable[[tuple[Argument, ...]], bytes]", hiredis.pack_command)  # pyright: ignore[reportUnknownMemberType]

# The part of the time for a connection within which its TLS handshake must finish.
_HANDSHAKE = 0.8

_Pending = tuple["asyncio.Future[Reply]", float]


def unreachable(options: Options, address: Address, error: BaseException) -> BackendUnavailable:
    """Return the error that says why there is no connection, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = f"its certificate is not trusted ({error.verify_message}): name its authority with ?tls_ca=FILE"
    elif options.tls is not None and isinstance(error, ssl.SSLError | ConnectionAbortedError):
        # A plain Redis reads the first bytes of TLS as a line, and waits for the end of it.
        reason = "it does not speak TLS on this port: use redis:// (without tls=1) there, or the port for TLS"
    elif options.tls is None and isinstance(error, ConnectionLost) and not isinstance(address, UnixAddress):
        return BackendUnavailable(f"{error}: if it speaks TLS on this port, use rediss:// (or tls=1)")
    else:
        reason = f"{error_text(error)}: check that it is running and that the URL is correct"
    return BackendUnavailable(f"cannot connect to Redis at {address}: {reason}")


class Connection(asyncio.Protocol):
    """A connection.

    Args:
        address: The server, for messages.
        timeout: Seconds after which a missing answer ends the connection. A server that does not answer looks like one
            that is gone.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        self.address = address
        # The version in the answer to HELLO.
        self.version = (0, 0)
        self.spin_wait = SpinWait()
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._reader = Reader(protocolError=ProtocolError, replyError=ReplyError)
        self._pending: deque[_Pending] = deque()
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._lost: str | None = None

    @property
    def alive(self) -> bool:
        """Whether commands can be sent."""
        return self._lost is None

    def send(self, *arguments: Argument, within: float = 0.0) -> asyncio.Future[Reply]:
        """Send a command. The future has its answer or its error.

        If the future is cancelled, the answer is read and dropped. No other command gets it.

        Args:
            arguments: The command.
            within: Seconds that the command itself may block, on top of the timeout.

        Raises:
            ConnectionLost: Nothing was sent.
        """
        return self.send_packed(pack(arguments), within)

    def send_packed(self, command: bytes, within: float = 0.0) -> asyncio.Future[Reply]:
        """Send a command that is packed already."""
        transport = self._transport
        if self._lost is not None or transport is None:
            raise ConnectionLost(self._lost or f"no connection to {self.address}", sent=False)
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._pending.append((future, self._loop.time() + self._timeout + within))
        transport.write(command)
        return future

    def close(self, reason: str = "closed") -> None:
        """Close the connection now. Commands without an answer fail with `ConnectionLost`."""
        if self._lost is None:
            self._lose(f"the connection to {self.address} was lost: {reason}")
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, and start to check for overdue answers."""
        self._transport = cast("asyncio.Transport", transport)
        self._check_answers()

    def data_received(self, data: bytes) -> None:
        """Pass the answers to their commands, in order."""
        reader, pending = self._reader, self._pending
        try:
            reader.feed(data)
            reply: Reply = reader.gets()
            while reply is not False:
                if not pending:
                    self.close("it sent an answer without a request")
                    return
                future = pending.popleft()[0]
                if not future.done():
                    if isinstance(reply, ReplyError):
                        future.set_exception(to_error(reply))
                    else:
                        future.set_result(reply)
                reply = reader.gets()
        except ProtocolError as error:
            self.close(f"it does not speak the Redis protocol ({error})")

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the commands that have no answer."""
        if self._lost is None:
            reason = error_text(exc) if exc is not None else "closed by the server"
            self._lose(f"the connection to {self.address} was lost: {reason}")

    def _lose(self, text: str) -> None:
        self._lost = text
        if self._watch is not None:
            self._watch.cancel()
        while self._pending:
            future = self._pending.popleft()[0]
            if not future.done():
                future.set_exception(ConnectionLost(text, sent=True))

    def _check_answers(self) -> None:
        """Close the connection if the oldest answer is overdue."""
        now = self._loop.time()
        # Answers come in order, so a later command may wait for an earlier one that blocks.
        if self._pending and now > self._pending[0][1]:
            self.close(f"no answer within {self._timeout:g} s")
            return
        self._watch = self._loop.call_later(max(self._timeout / 4, 0.02), self._check_answers)


def hello_commands(options: Options, *, sentinel: bool = False) -> list[tuple[Argument, ...]]:
    """Return the first commands of a connection."""
    password = options.sentinel_password if sentinel else options.password
    hello: list[Argument] = ["HELLO", "2"]
    if password is not None:
        hello += ["AUTH", (None if sentinel else options.username) or "default", password]
    hello += ["SETNAME", "qworker"]
    commands: list[tuple[Argument, ...]] = [tuple(hello)]
    if options.db and not sentinel:
        commands.append(("SELECT", options.db))
    return commands


def parse_hello(reply: Reply) -> tuple[int, int]:
    """Return the server's version from its answer to HELLO."""
    if not isinstance(reply, list):
        return (0, 0)
    words = cast("list[Reply]", reply)
    fields = dict(zip(words[::2], words[1::2], strict=False))
    parts = cast("bytes", fields.get(b"version", b"0.0")).decode(errors="replace").split(".")
    numbers = [int(part) if part.isdigit() else 0 for part in [*parts, "0", "0"]]
    return (numbers[0], numbers[1])


async def connect(options: Options, address: Address) -> Connection:
    """Connect and log in.

    Raises:
        BackendUnavailable: The server cannot be reached, or does not answer.
        PermissionDenied: It refuses this user.
    """
    loop = asyncio.get_running_loop()
    connection: Connection | None = None

    def make() -> Connection:
        nonlocal connection
        connection = Connection(address, options.timeout)
        return connection

    try:
        async with asyncio.timeout(options.timeout):
            if isinstance(address, UnixAddress):
                await loop.create_unix_connection(make, address.path, ssl=options.tls)
            else:
                handshake_timeout = None if options.tls is None else options.timeout * _HANDSHAKE
                await loop.create_connection(
                    make, address.host, address.port, ssl=options.tls, ssl_handshake_timeout=handshake_timeout
                )
            if connection is None:
                raise BackendUnavailable(f"cannot connect to Redis at {address}")
            replies = await asyncio.gather(*[connection.send(*command) for command in hello_commands(options)])
            connection.version = parse_hello(replies[0])
            return connection
    except (OSError, ConnectionLost) as error:
        _drop(connection)
        raise unreachable(options, address, error) from error
    except (BackendError, asyncio.CancelledError):
        _drop(connection)
        raise


def ignore_result(future: asyncio.Future[Any]) -> None:
    """Read the error of a future whose caller may not read it, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()


def _drop(connection: Connection | None) -> None:
    if connection is not None:
        connection.close()
