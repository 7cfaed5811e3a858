"""Connections to the servers that have the queues now. A call is repeated until its retry timeout has passed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import structlog

from qworker.errors import BackendError, BackendUnavailable
from qworker_redis.connection import Argument, Connection, connect, ignore_result, pack
from qworker_redis.error_replies import ConnectionLost, NoScript, Redirected, Reply
from qworker_redis.keys import NATIVE
from qworker_redis.options import Address, Options
from qworker_redis.scripts import ScriptSet
from qworker_redis.server_info import ServerInfo, read_server_info, require_safe
from qworker_redis.topology import Topology, queue_slot

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

__all__ = ["Attempt", "ConnectionPool"]

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0
_MOST_REDIRECTIONS = 8

# A connection, and whether an earlier attempt of the same call may have been carried out.
Attempt = Callable[[Connection, bool], Awaitable[Reply]]


@lru_cache(4096)
def _head(scripts: ScriptSet, name: str, queue: str, flags: bool, extra: int) -> tuple[Argument, ...]:
    """Return a command up to the keys that differ between calls."""
    found = scripts.get(name, flags=flags)
    keys = [scripts.key(queue, part) for part in found.keys[: len(found.keys) - extra]]
    return ("EVALSHA", found.sha, len(found.keys), *keys)


@lru_cache(4096)
def _packed_head(scripts: ScriptSet, name: str, queue: str, flags: bool, mark: str, arguments: int) -> bytes:
    """Return a command up to its arguments, packed."""
    head = (*_head(scripts, name, queue, flags, 1), scripts.key(queue, mark))
    # Its first line contains the number of parts.
    return b"*%d\r\n%b" % (len(head) + arguments, pack(head).partition(b"\r\n")[2])


class ConnectionPool:
    """The connections of one backend: one to each server for commands that do not block, more for those that block.

    Args:
        options: The options of the connections.
        topology: Finds the server of a queue.
        scripts: The scripts of the protocol.
    """

    def __init__(self, options: Options, topology: Topology, scripts: ScriptSet = NATIVE) -> None:
        self._options = options
        self._topology = topology
        self._scripts = scripts
        self._connections: dict[Address, Connection] = {}
        self._connecting: dict[Address, asyncio.Task[Connection]] = {}
        self._spare: dict[Address, list[Connection]] = {}
        self._blocked: set[Connection] = set()
        self._log: Any = structlog.get_logger("qworker.redis").bind(url=options.shown)
        self._down_since: float | None = None
        # This rises with each close: an opening that began before it is ended.
        self._opening = 0
        # The server that was reached last.
        self.server_info: ServerInfo | None = None

    async def aclose(self) -> None:
        """End all connections."""
        self._opening += 1
        for task in tuple(self._connecting.values()):
            task.cancel()
        self._connecting.clear()
        for connection in (
            *self._connections.values(),
            *self._blocked,
            *(each for spare in self._spare.values() for each in spare),
        ):
            connection.close()
        self._connections.clear()
        self._spare.clear()

    # -- calls -------------------------------------------------------------------------------------------------------

    async def run_script(
        self,
        name: str,
        queue: str,
        arguments: Sequence[Argument],
        extra: Sequence[str] = (),
        *,
        retry_timeout: float | None = None,
    ) -> Reply:
        """Run a script that can be repeated.

        Raises:
            BackendUnavailable: The retry timeout has passed.
        """

        def attempt(connection: Connection, again: bool) -> Awaitable[Reply]:
            del again
            return self.evaluate(connection, name, queue, arguments, extra)

        return await self.repeat(queue_slot(queue), attempt, retry_timeout=retry_timeout)

    async def evaluate(
        self, connection: Connection, name: str, queue: str, arguments: Sequence[Argument], extra: Sequence[str] = ()
    ) -> Reply:
        """Run a script once. Send its source if the server does not know it (any more)."""
        command = self.script_command(connection, name, queue, arguments, extra)
        try:
            return await connection.send(*command)
        except NoScript:
            source = self._scripts.get(name, flags=not (0, 0) < connection.version < (7, 0)).source
            return await connection.send("EVAL", source, *command[2:])

    async def evaluate_packed(
        self, connection: Connection, name: str, queue: str, mark: str, arguments: tuple[bytes, ...]
    ) -> Reply:
        """Evaluate a small call. The parts that all calls with one `mark` have in common are packed once."""
        flags = not (0, 0) < connection.version < (7, 0)
        command = _packed_head(self._scripts, name, queue, flags, mark, len(arguments))
        try:
            packed = b"".join([b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments])
            return await connection.spin_wait.answer(connection.send_packed(command + packed))
        except NoScript:
            return await self.evaluate(connection, name, queue, arguments, (mark,))

    def script_command(
        self, connection: Connection, name: str, queue: str, arguments: Sequence[Argument], extra: Sequence[str]
    ) -> tuple[Argument, ...]:
        """Return a script call as a command, by digest. `extra` replaces the last keys of the header."""
        head = _head(self._scripts, name, queue, not (0, 0) < connection.version < (7, 0), len(extra))
        return (*head, *[self._scripts.key(queue, part) for part in extra], *arguments)

    async def command(self, slot: int, *arguments: Argument) -> Reply:
        """Send a command that can be repeated to the server of a slot.

        Raises:
            BackendUnavailable: The retry timeout has passed.
        """

        async def attempt(connection: Connection, again: bool) -> Reply:
            del again
            return await connection.send(*arguments)

        return await self.repeat(slot, attempt)

    async def repeat(
        self, slot: int, attempt: Attempt, *, retry_timeout: float | None = None, sent: bool = False
    ) -> Reply:
        """Make a call, and repeat it until it is answered.

        Args:
            slot: The slot of the queue.
            attempt: Makes the call once.
            retry_timeout: Seconds until it fails. None: the retry timeout of the URL.
            sent: Whether the call may have been carried out before.

        Raises:
            ConnectionLost: The time has passed. `sent` says whether the call may have been carried out.
            BackendError: The store's answer.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._options.retry_timeout if retry_timeout is None else retry_timeout)
        opening = self._opening
        failures, redirections = 0, 0
        asking: Address | None = None
        while True:
            connection: Connection | None = None
            try:
                connection = self.open_connection(slot) if asking is None else None
                if connection is None:
                    connection = await (self.get_connection(slot) if asking is None else self._connection_to(asking))
                if asking is not None:
                    connection.send("ASKING").add_done_callback(ignore_result)
                    asking = None
                reply = await attempt(connection, sent)
                if self._down_since is not None:
                    self._record_recovery(self._down_since)
                return reply
            except Redirected as error:
                asking = self._follow_redirect(error, slot, connection)
                redirections += 1
                if error.code != "READONLY" and redirections <= _MOST_REDIRECTIONS:
                    continue
                failed: BackendUnavailable = error
            except BackendUnavailable as error:
                sent = sent or (isinstance(error, ConnectionLost) and error.sent)
                self._record_failure(error, slot, connection)
                failed = error
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(failures, 10)) * (0.5 + random.random() / 2)
            failures += 1
            if self._opening != opening or loop.time() + pause > deadline:
                raise ConnectionLost(str(failed), sent=sent) from failed
            await asyncio.sleep(pause)

    def _follow_redirect(self, error: Redirected, slot: int, connection: Connection | None) -> Address | None:
        """Use a redirection. Return the address to ask once, for a slot that is being moved."""
        if connection is None:
            return None
        target = self._topology.learn_redirect(error, connection.address)
        if error.code == "READONLY":
            self._topology.invalidate(slot, connection.address)
            connection.close("it is not the primary any more")
            self._record_failure(error, slot, connection)
        return target if error.code == "ASK" else None

    def _record_failure(self, error: BackendUnavailable, slot: int, connection: Connection | None) -> None:
        address = connection.address if connection is not None else self._topology.known(slot)
        if address is not None and (connection is None or not connection.alive):
            self._topology.invalidate(slot, address)
        if self._down_since is None:
            self._down_since = asyncio.get_running_loop().time()
            self._log.warning("redis_unavailable", error=str(error))

    def _record_recovery(self, since: float) -> None:
        self._down_since = None
        self._log.warning("redis_recovered", seconds=round(asyncio.get_running_loop().time() - since, 3))

    # -- connections -------------------------------------------------------------------------------------------------

    async def get_connection(self, slot: int) -> Connection:
        """Return the shared connection to the server that has a slot. Connect if needed.

        Raises:
            BackendUnavailable: It cannot be reached.
            PermissionDenied: It refuses this user.
            BackendError: It may lose queues.
        """
        return await self._connection_to(await self._address(slot))

    def open_connection(self, slot: int) -> Connection | None:
        """Return the shared connection of a slot if it is open."""
        address = self._topology.known(slot)
        connection = None if address is None else self._connections.get(address)
        return connection if connection is not None and connection.alive else None

    def healthy_connection(self, slot: int) -> Connection | None:
        """Return the connection of a slot if the last call was answered. It may have been lost since."""
        address = self._topology.known(slot) if self._down_since is None else None
        return None if address is None else self._connections.get(address)

    async def _address(self, slot: int) -> Address:
        known = self._topology.known(slot)
        return known if known is not None else await asyncio.to_thread(self._topology.discover, slot)

    async def _connection_to(self, address: Address) -> Connection:
        connection = self._connections.get(address)
        if connection is not None and connection.alive:
            return connection
        task = self._connecting.get(address)
        if task is None:
            task = self._connecting[address] = asyncio.create_task(self._connect(address))
            task.add_done_callback(ignore_result)
        # If a call is cancelled here, the other calls still get the connection.
        return await asyncio.shield(task)

    async def _connect(self, address: Address) -> Connection:
        opening = self._opening
        try:
            connection = await connect(self._options, address)
            try:
                info = await read_server_info(connection)
                require_safe(info)
            except BaseException:
                connection.close()
                raise
            if self._opening != opening:
                connection.close()
                raise ConnectionLost("this backend was closed", sent=False)
            self.server_info = info
            self._connections[address] = connection
            return connection
        finally:
            if self._connecting.get(address) is asyncio.current_task():
                del self._connecting[address]

    @asynccontextmanager
    async def blocking_connection(self, slot: int) -> AsyncGenerator[Connection]:
        """Open a separate connection for the caller, for a command that blocks.

        After an error or a cancellation the connection is closed, because no caller reads its answers.
        """
        # The shared connection is opened first: it knows which server has the slot and whether that server is safe.
        address = (await self.get_connection(slot)).address
        spare = self._spare.setdefault(address, [])
        connection: Connection | None = None
        while spare and connection is None:
            candidate = spare.pop()
            connection = candidate if candidate.alive else None
        if connection is None:
            connection = await connect(self._options, address)
        opening = self._opening
        self._blocked.add(connection)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        else:
            if connection.alive and self._opening == opening:
                self._spare.setdefault(address, []).append(connection)
            else:
                connection.close()
        finally:
            self._blocked.discard(connection)

    def learn_from(self, error: BackendError, slot: int, connection: Connection) -> None:
        """Use an error on a connection of `blocking_connection` to update the topology."""
        if isinstance(error, Redirected):
            self._follow_redirect(error, slot, connection)
        elif isinstance(error, BackendUnavailable):
            self._record_failure(error, slot, connection)
