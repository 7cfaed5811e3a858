"""Connections to the servers that have the queues now. A call is repeated until its retry timeout has passed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from typing import Any, cast

import structlog

from qworker.errors import BackendUnavailable, QueueDamaged
from qworker_redis.connection import Argument, Connection, connect, pack
from qworker_redis.error_replies import ConnectionLost, NoScript, Redirected, Reply
from qworker_redis.keys import NATIVE
from qworker_redis.lender import Lender
from qworker_redis.options import Address, Options
from qworker_redis.scripts import ScriptSet
from qworker_redis.server_info import ServerInfo, read_server_info, require_primary, require_safe
from qworker_redis.topology import Topology, queue_slot
from qworker_redis.wrong_type import damage_of, find_wrong_keys

__all__ = ["Attempt", "ConnectionPool", "ignore_result"]

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
    """The connections of one backend.

    Args:
        options: The options of the connections.
        topology: Finds the server of a queue.
        scripts: The scripts of the protocol.
        is_logged: Whether the beginning and the end of an outage are logged.
    """

    def __init__(
        self, options: Options, topology: Topology, scripts: ScriptSet = NATIVE, *, is_logged: bool = True
    ) -> None:
        self._options = options
        self._topology = topology
        self._scripts = scripts
        self._lenders: dict[Address, Lender] = {}
        self._discovering: asyncio.Task[Address] | None = None
        self._log: Any = structlog.get_logger("qworker.redis").bind(url=options.shown) if is_logged else None
        self._down_since: float | None = None
        # This rises with each close: calls that began before it end.
        self._closed = 0
        # The server that was reached last.
        self.server_info: ServerInfo | None = None

    async def open(self, slot: int) -> None:
        """Connect to the server of a slot, and refuse one that may lose queues.

        Raises:
            BackendUnavailable: It cannot be reached.
            PermissionDenied: It refuses this user, or may lose queues.
        """
        lender = await self._lender(slot)
        lender.give(await lender.take())

    async def aclose(self) -> None:
        """End all connections."""
        self._closed += 1
        if self._discovering is not None:
            self._discovering.cancel()
        while self._lenders:
            await self._lenders.popitem()[1].aclose()

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
            try:
                return await connection.send(*command)
            except NoScript:
                source = self._scripts.get(name, flags=connection.takes_flags).source
                return await connection.send("EVAL", source, *command[2:])
        except QueueDamaged as error:
            raise damage_of(queue, await find_wrong_keys(connection, self._scripts, queue)) from error

    async def run_packed(self, name: str, queue: str, mark: str, arguments: tuple[bytes, ...]) -> Reply:
        """Run a small script once, on a connection that is open already, and poll for its answer.

        The parts that all calls with one `mark` have in common are packed once.

        Raises:
            ConnectionLost: No connection is idle, the last call failed, or there is no answer.
        """
        address = self._topology.known(queue_slot(queue)) if self._down_since is None else None
        lender = None if address is None else self._lenders.get(address)
        connection = None if lender is None else await lender.take_idle()
        if lender is None or connection is None:
            raise ConnectionLost("no connection is idle", sent=False)
        head = _packed_head(self._scripts, name, queue, connection.takes_flags, mark, len(arguments))
        spin_wait = lender.spin_wait
        packed = b"".join([b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments])
        try:
            reply = await connection.send_packed(
                head + packed, poll=spin_wait.poll if spin_wait.is_worth_it() else None
            )
            spin_wait.answered()
            return reply
        except NoScript:
            return await self.evaluate(connection, name, queue, arguments, (mark,))
        except QueueDamaged as error:
            raise damage_of(queue, await find_wrong_keys(connection, self._scripts, queue)) from error
        finally:
            lender.give(connection)

    async def find_wrong_keys(self, queue: str) -> list[tuple[str, str]]:
        """Return the keys of a queue that have another type than they must have: each, and that type in words."""

        def attempt(connection: Connection, again: bool) -> Awaitable[Reply]:
            del again
            return find_wrong_keys(connection, self._scripts, queue)

        return cast("list[tuple[str, str]]", await self.repeat(queue_slot(queue), attempt))

    def script_command(
        self, connection: Connection, name: str, queue: str, arguments: Sequence[Argument], extra: Sequence[str]
    ) -> tuple[Argument, ...]:
        """Return a script call as a command, by digest. `extra` replaces the last keys of the header."""
        head = _head(self._scripts, name, queue, connection.takes_flags, len(extra))
        return (*head, *[self._scripts.key(queue, part) for part in extra], *arguments)

    async def command(self, slot: int, *arguments: Argument) -> Reply:
        """Send a command that can be repeated to the server of a slot.

        Raises:
            BackendUnavailable: The retry timeout has passed.
        """

        def attempt(connection: Connection, again: bool) -> Awaitable[Reply]:
            del again
            return connection.send(*arguments)

        return await self.repeat(slot, attempt)

    async def send_once(self, slot: int, commands: Sequence[bytes]) -> list[Reply]:
        """Send packed commands in one trip, once. Return for each its answer or the server's error.

        Raises:
            BackendUnavailable: The server of the slot cannot be reached, or there is no answer.
        """
        lender = await self._lender(slot)
        connection = await lender.take()
        try:
            return await connection.send_all(commands)
        finally:
            lender.give(connection)

    @property
    def is_up(self) -> bool:
        """Whether the last call was answered."""
        return self._down_since is None and self.server_info is not None

    # -- repeating ---------------------------------------------------------------------------------------------------

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
        closed = self._closed
        failures, redirections = 0, 0
        asking: Address | None = None
        while True:
            lender: Lender | None = None
            try:
                lender = await self._lender(slot) if asking is None else self._lender_of(asking)
                reply = await self._attempt(lender, attempt, sent, asking=asking is not None)
                if self._down_since is not None:
                    self._record_recovery(self._down_since)
                return reply
            except Redirected as error:
                asking = await self._follow_redirect(error, slot, lender)
                redirections += 1
                if error.code != "READONLY" and redirections <= _MOST_REDIRECTIONS:
                    continue
                failed: BackendUnavailable = error
            except BackendUnavailable as error:
                sent = sent or (isinstance(error, ConnectionLost) and error.sent)
                await self._record_failure(error, slot, lender)
                asking, failed = None, error
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(failures, 10)) * (0.5 + random.random() / 2)
            failures += 1
            if self._closed != closed or loop.time() + pause > deadline:
                raise ConnectionLost(str(failed), sent=sent) from failed
            await asyncio.sleep(pause)

    async def _attempt(self, lender: Lender, attempt: Attempt, sent: bool, *, asking: bool) -> Reply:
        connection = await lender.take()
        connection.asking = asking
        try:
            return await attempt(connection, sent)
        finally:
            connection.asking = False
            lender.give(connection)

    async def _follow_redirect(self, error: Redirected, slot: int, lender: Lender | None) -> Address | None:
        """Use a redirection. Return the address to ask once, for a slot that is being moved."""
        if lender is None:
            return None
        target = self._topology.learn_redirect(error, lender.address)
        if error.code == "READONLY":
            await self._record_failure(error, slot, lender)
        return target if error.code == "ASK" else None

    async def _record_failure(self, error: BackendUnavailable, slot: int, lender: Lender | None) -> None:
        if lender is not None:
            await lender.drop_idle()
            self._topology.invalidate(slot, lender.address)
        if self._down_since is None:
            self._down_since = asyncio.get_running_loop().time()
            if self._log is not None:
                self._log.warning("redis_unavailable", error=str(error))

    def _record_recovery(self, since: float) -> None:
        self._down_since = None
        if self._log is not None:
            self._log.warning("redis_recovered", seconds=round(asyncio.get_running_loop().time() - since, 3))

    # -- connections -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def blocking_connection(self, slot: int) -> AsyncGenerator[Connection]:
        """Lend a connection for a command that blocks.

        Raises:
            BackendUnavailable: The server cannot be reached.
        """
        lender = await self._lender(slot)
        connection: Connection | None = None
        try:
            connection = await lender.take(blocking=True)
            yield connection
        except Redirected as error:
            await self._follow_redirect(error, slot, lender)
            raise
        except BackendUnavailable as error:
            await self._record_failure(error, slot, lender)
            raise
        finally:
            if connection is not None:
                lender.give(connection)

    async def _lender(self, slot: int) -> Lender:
        """Return the connections to the server that has a slot."""
        known = self._topology.known(slot)
        return self._lender_of(await self._discover(slot) if known is None else known)

    def _lender_of(self, address: Address) -> Lender:
        lender = self._lenders.get(address)
        if lender is None:
            opens = partial(connect, self._options, address)
            lender = self._lenders[address] = Lender(address, self._options.timeout, opens, self._check)
        return lender

    async def _discover(self, slot: int) -> Address:
        """Find the server of a slot. Calls that need one at the same time ask once."""
        if self._discovering is None:
            self._discovering = asyncio.create_task(self._topology.discover(slot))
            self._discovering.add_done_callback(self._on_discovered)
        discovering = self._discovering
        try:
            # If a call is cancelled here, the others still get the answer.
            await asyncio.shield(discovering)
        except asyncio.CancelledError:
            if not discovering.cancelled():
                raise
            raise ConnectionLost("this backend was closed", sent=False) from None
        known = self._topology.known(slot)
        return await self._topology.discover(slot) if known is None else known

    def _on_discovered(self, task: asyncio.Task[Address]) -> None:
        self._discovering = None
        ignore_result(task)

    async def _check(self, connection: Connection) -> None:
        info = await read_server_info(connection)
        require_safe(info)
        if self._options.mode == "sentinel":
            require_primary(info)
        self.server_info = info


def ignore_result(future: asyncio.Future[Any]) -> None:
    """Read the error of a future whose caller may not read it, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()
