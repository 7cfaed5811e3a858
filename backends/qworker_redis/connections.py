"""Connections that come back: to whatever server has a queue now, for as long as a call has patience."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import structlog

from qworker.errors import BackendError, BackendUnavailable
from qworker_redis.connection import Argument, Wire, connect, pack
from qworker_redis.error_replies import ConnectionLost, NoScript, Redirected, Reply
from qworker_redis.options import Address, Options
from qworker_redis.scripts import NATIVE, ScriptSet
from qworker_redis.server_info import ServerFacts, inspect, refuse
from qworker_redis.topology import Topology, slot_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

__all__ = ["Attempt", "Links"]

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0
_MOST_REDIRECTIONS = 8

# A connection, and whether an earlier attempt of the same call may have been carried out.
Attempt = Callable[[Wire, bool], Awaitable[Reply]]


@lru_cache(4096)
def _head(scripts: ScriptSet, name: str, queue: str, flags: bool, extra: int) -> tuple[Argument, ...]:
    """A command up to the keys that differ from call to call."""
    found = scripts.get(name, flags=flags)
    keys = [scripts.key(queue, part) for part in found.keys[: len(found.keys) - extra]]
    return ("EVALSHA", found.sha, len(found.keys), *keys)


@lru_cache(4096)
def _packed_head(scripts: ScriptSet, name: str, queue: str, flags: bool, mark: str, arguments: int) -> bytes:
    """A command up to its arguments, packed."""
    head = (*_head(scripts, name, queue, flags, 1), scripts.key(queue, mark))
    # Its first line counts what follows.
    return b"*%d\r\n%b" % (len(head) + arguments, pack(head).partition(b"\r\n")[2])


class Links:
    """The connections of one backend: one per server for everything that answers at once, and more for waiting.

    Args:
        options: how to connect.
        places: which server has a queue.
        scripts: what is run there.
    """

    def __init__(self, options: Options, places: Topology, scripts: ScriptSet = NATIVE) -> None:
        self._options = options
        self._places = places
        self._scripts = scripts
        self._wires: dict[Address, Wire] = {}
        self._connecting: dict[Address, asyncio.Task[Wire]] = {}
        self._resting: dict[Address, list[Wire]] = {}
        self._waiting: set[Wire] = set()
        self._log: Any = structlog.get_logger("qworker.redis").bind(url=options.shown)
        self._down_since: float | None = None
        # Rises with each close: whatever began before ends.
        self._opening = 0
        # Of the server that was reached last.
        self.facts: ServerFacts | None = None

    async def aclose(self) -> None:
        """End all connections."""
        self._opening += 1
        for task in tuple(self._connecting.values()):
            task.cancel()
        self._connecting.clear()
        for wire in (
            *self._wires.values(),
            *self._waiting,
            *(w for resting in self._resting.values() for w in resting),
        ):
            wire.close()
        self._wires.clear()
        self._resting.clear()

    # -- calls -------------------------------------------------------------------------------------------------------

    async def script(
        self,
        name: str,
        queue: str,
        arguments: Sequence[Argument],
        extra: Sequence[str] = (),
        *,
        patience: float | None = None,
    ) -> Reply:
        """Run a script that may be repeated.

        Raises:
            BackendUnavailable: patience is at its end.
        """

        def attempt(wire: Wire, again: bool) -> Awaitable[Reply]:
            del again
            return self.evaluate(wire, name, queue, arguments, extra)

        return await self.repeat(slot_of(queue), attempt, patience=patience)

    async def evaluate(
        self, wire: Wire, name: str, queue: str, arguments: Sequence[Argument], extra: Sequence[str] = ()
    ) -> Reply:
        """Run a script once, and teach it to a server that does not know it (any more)."""
        command = self.command_of(wire, name, queue, arguments, extra)
        try:
            return await wire.send(*command)
        except NoScript:
            source = self._scripts.get(name, flags=not (0, 0) < wire.version < (7, 0)).source
            return await wire.send("EVAL", source, *command[2:])

    async def evaluate_marked(
        self, wire: Wire, name: str, queue: str, mark: str, arguments: tuple[bytes, ...]
    ) -> Reply:
        """`evaluate` for small calls that come one by one: what is the same in those of one `mark` is packed once."""
        flags = not (0, 0) < wire.version < (7, 0)
        command = _packed_head(self._scripts, name, queue, flags, mark, len(arguments))
        try:
            packed = b"".join([b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments])
            return await wire.polling.answer(wire.send_packed(command + packed))
        except NoScript:
            return await self.evaluate(wire, name, queue, arguments, (mark,))

    def command_of(
        self, wire: Wire, name: str, queue: str, arguments: Sequence[Argument], extra: Sequence[str]
    ) -> tuple[Argument, ...]:
        """A script call as a command: by digest. `extra` are keys that stand in place of the last ones of the header."""
        head = _head(self._scripts, name, queue, not (0, 0) < wire.version < (7, 0), len(extra))
        return (*head, *[self._scripts.key(queue, part) for part in extra], *arguments)

    async def repeat(self, slot: int, attempt: Attempt, *, patience: float | None = None, sent: bool = False) -> Reply:
        """Make a call, again and again until it is answered.

        Args:
            slot: of the queue that it is about.
            attempt: makes it once.
            patience: seconds until it is given up; by default those of the URL.
            sent: it may have been carried out before.

        Raises:
            ConnectionLost: patience is at its end; `sent` tells whether the call may have been carried out.
            BackendError: the store's answer.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._options.retry_timeout if patience is None else patience)
        opening = self._opening
        failures, redirections = 0, 0
        asking: Address | None = None
        while True:
            wire: Wire | None = None
            try:
                wire = self.at_hand(slot) if asking is None else None
                if wire is None:
                    wire = await (self.wire(slot) if asking is None else self._wire_at(asking))
                if asking is not None:
                    wire.send("ASKING").add_done_callback(_forget)
                    asking = None
                reply = await attempt(wire, sent)
                if self._down_since is not None:
                    self._recovered(self._down_since)
                return reply
            except Redirected as error:
                asking = self._follow(error, slot, wire)
                redirections += 1
                if error.code != "READONLY" and redirections <= _MOST_REDIRECTIONS:
                    continue
                failed: BackendUnavailable = error
            except BackendUnavailable as error:
                sent = sent or (isinstance(error, ConnectionLost) and error.sent)
                self._failed(error, slot, wire)
                failed = error
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(failures, 10)) * (0.5 + random.random() / 2)
            failures += 1
            if self._opening != opening or loop.time() + pause > deadline:
                raise ConnectionLost(str(failed), sent=sent) from failed
            await asyncio.sleep(pause)

    def _follow(self, error: Redirected, slot: int, wire: Wire | None) -> Address | None:
        """Learn from a redirection; the address to ask once, for a slot on its way."""
        if wire is None:
            return None
        target = self._places.moved(error, wire.address)
        if error.code == "READONLY":
            self._places.doubt(slot, wire.address)
            wire.close("it is not the primary any more")
            self._failed(error, slot, wire)
        return target if error.code == "ASK" else None

    def _failed(self, error: BackendUnavailable, slot: int, wire: Wire | None) -> None:
        address = wire.address if wire is not None else self._places.known(slot)
        if address is not None and (wire is None or not wire.alive):
            self._places.doubt(slot, address)
        if self._down_since is None:
            self._down_since = asyncio.get_running_loop().time()
            self._log.warning("redis_unavailable", error=str(error))

    def _recovered(self, since: float) -> None:
        self._down_since = None
        self._log.warning("redis_recovered", seconds=round(asyncio.get_running_loop().time() - since, 3))

    # -- connections -------------------------------------------------------------------------------------------------

    async def wire(self, slot: int) -> Wire:
        """The shared connection to the server that has a slot.

        Raises:
            BackendUnavailable: it cannot be reached.
            PermissionDenied: it refuses this user.
            BackendError: it is no place for queues.
        """
        return await self._wire_at(await self._address(slot))

    def at_hand(self, slot: int) -> Wire | None:
        """The shared connection of a slot, if there is one already."""
        address = self._places.known(slot)
        wire = None if address is None else self._wires.get(address)
        return wire if wire is not None and wire.alive else None

    def undisturbed(self, slot: int) -> Wire | None:
        """The same, if the last call was answered, though it may be lost since: whoever takes it has no outage to tell of."""
        address = self._places.known(slot) if self._down_since is None else None
        return None if address is None else self._wires.get(address)

    async def _address(self, slot: int) -> Address:
        known = self._places.known(slot)
        return known if known is not None else await asyncio.to_thread(self._places.discover, slot)

    async def _wire_at(self, address: Address) -> Wire:
        wire = self._wires.get(address)
        if wire is not None and wire.alive:
            return wire
        task = self._connecting.get(address)
        if task is None:
            task = self._connecting[address] = asyncio.create_task(self._connect(address))
            task.add_done_callback(_forget)
        # Whoever is cancelled here does not take the connection away from the others.
        return await asyncio.shield(task)

    async def _connect(self, address: Address) -> Wire:
        opening = self._opening
        try:
            wire = await connect(self._options, address)
            try:
                facts = await inspect(wire)
                refuse(facts)
            except BaseException:
                wire.close()
                raise
            if self._opening != opening:
                wire.close()
                raise ConnectionLost("this backend was closed", sent=False)
            self.facts = facts
            self._wires[address] = wire
            return wire
        finally:
            if self._connecting.get(address) is asyncio.current_task():
                del self._connecting[address]

    @asynccontextmanager
    async def resting(self, slot: int) -> AsyncGenerator[Wire]:
        """A connection of the caller's own, for a command that blocks.

        Leaving it with an error or a cancellation ends the connection: its answers are nobody's any more.
        """
        # Through the shared one first, which knows where the slot is and whether the server will do.
        address = (await self.wire(slot)).address
        spare = self._resting.setdefault(address, [])
        wire: Wire | None = None
        while spare and wire is None:
            candidate = spare.pop()
            wire = candidate if candidate.alive else None
        if wire is None:
            wire = await connect(self._options, address)
        opening = self._opening
        self._waiting.add(wire)
        try:
            yield wire
        except BaseException:
            wire.close()
            raise
        else:
            if wire.alive and self._opening == opening:
                self._resting.setdefault(address, []).append(wire)
            else:
                wire.close()
        finally:
            self._waiting.discard(wire)

    def redirected(self, error: BackendError, slot: int, wire: Wire) -> None:
        """Learn from an error on a connection of `resting`."""
        if isinstance(error, Redirected):
            self._follow(error, slot, wire)
        elif isinstance(error, BackendUnavailable):
            self._failed(error, slot, wire)


def _forget(future: asyncio.Future[Any]) -> None:
    """Take the error of a future that others may or may not have waited for."""
    if not future.cancelled():
        future.exception()
