"""The connections to one server, each lent to one call at a time.

Idle connections are in a list. redis-py's own pool would lock, count and check a connection each time that it is lent,
which costs as much as a command.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from qworker.errors import BackendError
from qworker_redis.connection import Connection
from qworker_redis.error_replies import ConnectionLost
from qworker_redis.options import Address
from qworker_redis.spin_wait import SpinWait

__all__ = ["Lender"]

# Connections for commands that do not block. Calls of one kind for one queue are sent one after another, so a busy
# process needs about three.
_MOST = 16
# An overdue answer is noticed after at most this part of the timeout, in seconds at least the second value.
_CHECK_EVERY, _SHORTEST = 0.25, 0.02
_CLOSED = "this backend was closed"


class Lender:
    """The connections to one server.

    Args:
        address: The server.
        timeout: Seconds for an answer.
        connect: Opens a connection.
        check: Refuses a server on which queues are not safe. It gets the first connection, also after each failure.

    Attributes:
        spin_wait: Decides whether small calls poll.
    """

    def __init__(
        self,
        address: Address,
        timeout: float,
        connect: Callable[[], Awaitable[Connection]],
        check: Callable[[Connection], Awaitable[None]] | None = None,
    ) -> None:
        self.address = address
        self.spin_wait = SpinWait()
        self._timeout = timeout
        self._connect = connect
        self._check = check
        self._is_checked = check is None
        self._idle: list[Connection] = []
        # All open connections, lent or idle, and those of them that commands block on.
        self._open: set[Connection] = set()
        self._blocked: set[Connection] = set()
        # Connections that are being opened, and calls that wait for one.
        self._opening = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_closed = False
        self._closing: set[asyncio.Task[None]] = set()
        self._watch: asyncio.TimerHandle | None = None

    async def take_idle(self) -> Connection | None:
        """Lend a connection that is open, if there is one."""
        while self._idle:
            connection = self._idle.pop()
            if await connection.is_usable():
                if self._watch is None:
                    self._start_watch()
                return connection
            self._open.discard(connection)
            await connection.close()
        return None

    async def take(self, *, blocking: bool = False) -> Connection:
        """Lend a connection until `give`.

        Args:
            blocking: Whether the command may block for long. The number of these connections has no limit.

        Raises:
            BackendUnavailable: The server cannot be reached.
            PermissionDenied: It refuses this user.
        """
        while (connection := await self.take_idle()) is None:
            if blocking or len(self._open) - len(self._blocked) + self._opening < _MOST:
                connection = await self._connect_one()
                break
            await self._wait_for_idle()
        if blocking:
            self._blocked.add(connection)
        return connection

    async def _connect_one(self) -> Connection:
        self._opening += 1
        try:
            return await self._connect_and_check()
        except BackendError as error:
            # The calls that wait would only find the same, one after another.
            self._fail_waiting(error)
            raise
        except BaseException:
            self._wake_one()
            raise
        finally:
            self._opening -= 1

    async def _connect_and_check(self) -> Connection:
        connection = await self._connect()
        if self._is_closed:
            await connection.close(wait=True)
            raise ConnectionLost(_CLOSED, sent=False)
        # From now on its deadlines are watched, also those of the check.
        self._open.add(connection)
        if self._watch is None:
            self._start_watch()
        if self._check is not None and not self._is_checked:
            try:
                await self._check(connection)
            except BaseException as error:
                self._open.discard(connection)
                await connection.close(wait=True)
                if isinstance(error, ConnectionLost):
                    # What was sent is not the call of the caller.
                    raise ConnectionLost(str(error), sent=False) from error
                raise
            self._is_checked = True
        return connection

    async def _wait_for_idle(self) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self._wake_one()
            raise

    def give(self, connection: Connection) -> None:
        """Take a connection back. If it has ended, another one may be opened."""
        if self._blocked:
            self._blocked.discard(connection)
        if self._is_closed:
            task = asyncio.create_task(connection.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        elif connection.alive:
            self._idle.append(connection)
        else:
            self._open.discard(connection)
        if self._waiting:
            self._wake_one()

    def _wake_one(self) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return

    def _fail_waiting(self, error: BackendError) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(error)

    async def drop_idle(self, *, wait: bool = False) -> None:
        """End the idle connections: the server failed, or is not the primary any more. For `wait` see `Connection`."""
        self._is_checked = self._check is None
        idle, self._idle = self._idle, []
        self._open.difference_update(idle)
        await asyncio.gather(*[connection.close(wait=wait) for connection in idle])

    async def aclose(self) -> None:
        """End all connections. Calls that wait for an answer fail."""
        self._is_closed = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        for connection in self._open:
            connection.end_call(_CLOSED)
        self._fail_waiting(ConnectionLost(_CLOSED, sent=False))
        await self.drop_idle(wait=True)

    # -- overdue answers ---------------------------------------------------------------------------------------------

    def _start_watch(self) -> None:
        # One timer for all calls, because a timeout for each would cost as much as the call.
        delay = max(self._timeout * _CHECK_EVERY, _SHORTEST)
        self._watch = asyncio.get_running_loop().call_later(delay, self._end_overdue)

    def _end_overdue(self) -> None:
        self._watch = None
        now = asyncio.get_running_loop().time()
        for connection in self._open:
            if now > connection.deadline:
                connection.end_overdue_call()
        if len(self._open) > len(self._idle):
            self._start_watch()
