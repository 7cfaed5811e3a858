"""One connection of redis-py, lent to one call at a time.

redis-py connects, logs in, speaks TLS and parses. A call through its client would cost three times as much CPU as a
call through one of its connections, and would not say whether a command was sent. So calls use connections, and decide
themselves what is repeated: redis-py's retries are off. No two calls share a connection, so a call that is cancelled or
fails with answers outstanding ends its own connection and no other.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, cast

import hiredis
from redis.asyncio import Connection as TcpConnection
from redis.asyncio import SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from qworker.errors import BackendError, BackendUnavailable
from qworker.kit.network import error_text
from qworker_redis.error_replies import ConnectionLost, Reply, to_error
from qworker_redis.options import Address, Options, UnixAddress

__all__ = ["Argument", "Connection", "connect", "connection_settings", "connection_type", "pack", "reason_of"]

Argument = bytes | str | int | float
# Takes a question, and waits until its answer is yes or it is better to sleep. See `SpinWait.poll`.
Poll = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]

# Its own annotation has one argument and no result. redis-py's own packing is in Python.
pack = cast("Callable[[tuple[Argument, ...]], bytes]", hiredis.pack_command)  # pyright: ignore[reportUnknownMemberType]

_ASKING = pack(("ASKING",))


class Connection:
    """A connection that is open and logged in.

    Args:
        link: The connection of redis-py.
        address: The server, for messages.
        timeout: Seconds for each answer. See `Lender`, which ends calls whose answer is overdue.
        version: The server's version. (0, 0): unknown.

    Attributes:
        deadline: The loop's time at which the call that uses the connection must have its answers.
        asking: Whether each command asks for a slot that is being moved to this server.
    """

    def __init__(self, link: AbstractConnection, address: Address, timeout: float, version: tuple[int, int]) -> None:
        self.address = address
        self.version = version
        self.deadline = math.inf
        self.asking = False
        # redis-py types only a part of it.
        self._link: Any = link
        self._loop = asyncio.get_running_loop()
        self._timeout = timeout
        # The task of the call that waits for answers, and how often it was cancelled before.
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        # Why this side has ended that call.
        self._lost: str | None = None

    @property
    def alive(self) -> bool:
        """Whether this side has not ended the connection."""
        connected: bool = self._link.is_connected
        return connected

    @property
    def takes_flags(self) -> bool:
        """Whether the server reads the flags in the first line of a script, as Redis 7 and later do."""
        return not (0, 0) < self.version < (7, 0)

    async def is_usable(self) -> bool:
        """Return whether an idle connection can be lent: the server has not closed it, and has sent nothing."""
        try:
            return not await self._link.can_read()
        except RedisError:
            return False

    async def send(self, *arguments: Argument, within: float = 0.0) -> Reply:
        """Send a command and return its answer.

        Args:
            arguments: The command.
            within: Seconds that the command itself may block, on top of the timeout.

        Raises:
            ConnectionLost: There is no answer. The command may have been carried out.
            BackendError: The server's error.
        """
        return await self.send_packed(pack(arguments), within=within)

    async def send_packed(self, command: bytes, *, within: float = 0.0, poll: Poll | None = None) -> Reply:
        """Send a packed command. `poll` looks for the answer before the task sleeps until it arrives."""
        if self.asking:
            (reply,) = await self.send_all([command], within=within)
            if isinstance(reply, BackendError):
                raise reply
            return reply
        link = self._link
        self._begin(within)
        try:
            await link.send_packed_command(command, check_health=False)
            if poll is not None:
                await poll(link.can_read)
            return cast("Reply", await link.read_response())
        except ResponseError as error:
            raise to_error(error) from error
        except RedisError as error:
            raise self._to_lost(error) from error
        except BaseException as error:
            await self._abandon(error)
            raise
        finally:
            self._task, self.deadline = None, math.inf

    async def send_all(self, commands: Sequence[bytes], *, within: float = 0.0) -> list[Reply]:
        """Send packed commands in one trip. Return for each its answer or the server's error, which is not raised.

        Raises:
            ConnectionLost: An answer is missing. Any of the commands may have been carried out.
        """
        link = self._link
        if self.asking:
            commands = [part for command in commands for part in (_ASKING, command)]
        replies: list[Reply] = []
        self._begin(within)
        try:
            await link.send_packed_command(commands, check_health=False)
            for _ in commands:
                try:
                    replies.append(await link.read_response())
                except ResponseError as error:
                    replies.append(to_error(error))
        except RedisError as error:
            raise self._to_lost(error) from error
        except BaseException as error:
            await self._abandon(error)
            raise
        finally:
            self._task, self.deadline = None, math.inf
        return replies[1::2] if self.asking else replies

    async def post(self, *arguments: Argument) -> None:
        """Send a command whose answer another task receives.

        Raises:
            ConnectionLost: The connection is lost.
        """
        try:
            await self._link.send_packed_command(pack(arguments), check_health=False)
        except RedisError as error:
            raise self._to_lost(error) from error

    async def receive(self) -> Reply:
        """Wait for the next message of a connection with subscriptions, without an end.

        Raises:
            ConnectionLost: The connection is lost.
            BackendError: The server refuses a subscription.
        """
        self._begin(math.inf)
        try:
            return cast("Reply", await self._link.read_response())
        except ResponseError as error:
            raise to_error(error) from error
        except RedisError as error:
            raise self._to_lost(error) from error
        except BaseException as error:
            await self._abandon(error)
            raise
        finally:
            self._task, self.deadline = None, math.inf

    def _begin(self, within: float) -> None:
        task = asyncio.current_task()
        assert task is not None, "calls run in tasks"
        self._task, self._cancelling = task, task.cancelling()
        self.deadline = self._loop.time() + self._timeout + within

    async def _abandon(self, error: BaseException) -> None:
        """End the connection of a call that is cancelled, because the next call would read its answers.

        Raises:
            ConnectionLost: This side has ended the call, not its caller.
        """
        await self._link.disconnect(nowait=True)
        task = self._task
        if self._lost is not None and task is not None and task.uncancel() <= self._cancelling:
            raise ConnectionLost(f"the connection to {self.address} was lost: {self._lost}", sent=True) from error

    def _to_lost(self, error: RedisError) -> BackendError:
        """Return the error of a call whose connection redis-py has ended."""
        if error.status_code is not None:
            # An answer after which redis-py ends a connection, such as LOADING.
            return to_error(error)
        return ConnectionLost(f"the connection to {self.address} was lost: {reason_of(error)}", sent=True)

    async def close(self, *, wait: bool = False) -> None:
        """End the connection, while no call uses it.

        Args:
            wait: Whether to wait until it is closed on both sides, which TLS requires of an orderly end.
        """
        try:
            await self._link.disconnect(nowait=not wait)
        except RedisTimeoutError:
            # The server does not answer. Nothing is left to do.
            return

    def end_call(self, reason: str) -> None:
        """End the call that waits for answers, if there is one. It fails with `ConnectionLost`.

        The call is cancelled, because closing the connection would first wait until all is sent, which a server that
        is stopped never allows.
        """
        if self._task is not None and self._lost is None:
            self._lost = reason
            self._task.cancel()

    def end_overdue_call(self) -> None:
        """End the call because its answers are not there in time."""
        self.end_call(f"no answer within {self._timeout:g} s")


def reason_of(error: BaseException) -> str:
    """Return the reason of an error of redis-py as a short text."""
    if isinstance(error, InvalidResponse):
        return f"it does not speak the Redis protocol ({error})"
    cause = next((each for each in _chain(error) if isinstance(each, OSError)), None)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({cause.verify_message}): name its authority with ?tls_ca=FILE"
    if cause is not None:
        return error_text(cause)
    text = str(error).rstrip(".")
    return "closed by the server" if "closed by server" in text else text


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Return an error and what it wraps: redis-py wraps what happens while it connects, up to twice."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


class _TlsConnection(SSLConnection):
    """A connection with a context of ours.

    The context that redis-py makes from a file of authorities also trusts all authorities of the system.
    """

    def __init__(self, *, tls: ssl.SSLContext, **settings: Any) -> None:
        super().__init__(**settings)  # pyright: ignore[reportUnknownMemberType]
        self.ssl_context.context = tls


def connection_type(options: Options, *, unix: bool = False) -> type[AbstractConnection]:
    """Return the class of redis-py's connections for a URL."""
    if unix:
        return UnixDomainSocketConnection
    return TcpConnection if options.tls is None else _TlsConnection


def connection_settings(options: Options, *, sentinel: bool = False) -> dict[str, Any]:
    """Return the settings of redis-py's connections for a URL, without the address."""
    settings: dict[str, Any] = {
        # The readers of maps expect lists.
        "protocol": 2,
        # A timeout for each read would cost a task on Python 3.11. Each call has one deadline instead.
        "socket_timeout": None,
        "socket_connect_timeout": options.timeout,
        # A lease that is sent twice would lease twice.
        "retry": Retry(NoBackoff(), 0),
        # CLIENT SETINFO would be another command that users must be permitted.
        "driver_info": None,
    }
    if options.tls is not None:
        settings["tls"] = options.tls
    if sentinel:
        return {**settings, "password": options.sentinel_password}
    if options.credentials is not None:
        settings["credential_provider"] = options.credentials
    else:
        settings |= {"username": options.username, "password": options.password}
    return {**settings, "db": options.db}


async def connect(options: Options, address: Address) -> Connection:
    """Connect and log in.

    Raises:
        BackendUnavailable: The server cannot be reached, or does not answer.
        PermissionDenied: It refuses this user.
    """
    version = (0, 0)

    async def greet(connection: Any) -> None:
        nonlocal version
        if not unix:
            # On a Unix socket redis-py has logged in already.
            await connection.on_connect()
        await connection.send_command("HELLO", 2, "SETNAME", "qworker")
        version = _parse_hello(await connection.read_response())

    unix = isinstance(address, UnixAddress)
    where: dict[str, Any] = (
        {"path": address.path} if isinstance(address, UnixAddress) else {"host": address.host, "port": address.port}
    )
    link: Any = connection_type(options, unix=unix)(**connection_settings(options), **where, redis_connect_func=greet)
    try:
        async with asyncio.timeout(options.timeout):
            await link.connect()
    except (RedisError, OSError) as error:
        await link.disconnect(nowait=True)
        raise _refused(options, address, error) from error
    except BaseException:
        await link.disconnect(nowait=True)
        raise
    return Connection(link, address, options.timeout, version)


def _parse_hello(reply: Reply) -> tuple[int, int]:
    """Return the server's version from its answer to HELLO."""
    if not isinstance(reply, list):
        return (0, 0)
    words = cast("list[Reply]", reply)
    fields = dict(zip(words[::2], words[1::2], strict=False))
    parts = cast("bytes", fields.get(b"version", b"0.0")).decode(errors="replace").split(".")
    numbers = [int(part) if part.isdigit() else 0 for part in [*parts, "0", "0"]]
    return (numbers[0], numbers[1])


def _refused(options: Options, address: Address, error: BaseException) -> BackendError:
    """Return the error that says why there is no connection, and what to do."""
    chain = list(_chain(error))
    for each in chain:
        if isinstance(each, RedisError) and (each.status_code is not None or isinstance(each, ResponseError)):
            return to_error(each)
    cause = next((each for each in chain if isinstance(each, OSError)), None)
    plain = options.tls is None and not isinstance(address, UnixAddress)
    if isinstance(cause, ssl.SSLCertVerificationError):
        reason = reason_of(error)
    elif options.tls is not None and isinstance(cause, ssl.SSLError | TimeoutError):
        # A plain Redis reads the first bytes of TLS as a line, and waits for the end of it.
        reason = f"{reason_of(error)}: if it does not speak TLS on this port, use redis:// (without tls=1)"
    elif plain and (cause is None or isinstance(cause, ConnectionResetError | BrokenPipeError)):
        reason = f"{reason_of(error)}: if it speaks TLS on this port, use rediss:// (or tls=1)"
    else:
        reason = f"{reason_of(error)}: check that it is running and that the URL is correct"
    return BackendUnavailable(f"cannot connect to Redis at {address}: {reason}")
