"""The subscriptions of the calls that wait for cells: one connection, as long as there are such calls."""

from __future__ import annotations

import asyncio
from typing import cast

from qworker.errors import BackendError, PermissionDenied
from qworker_redis.cells import is_sharded
from qworker_redis.connection import Connection
from qworker_redis.store import RedisStore

__all__ = ["CellHub"]

# Seconds for which the connection stays after the last wait: most waits follow one another.
_LINGER = 5.0
# Seconds to wait for a confirmation. Without it, the looks find a change.
_CONFIRM = 1.0
# Seconds until a server that does not permit subscriptions is asked again.
_REFUSED = 60.0


class CellHub:
    """The subscriptions to one server.

    Args:
        store: The store of the backend.
        slot: A slot of the server.
    """

    def __init__(self, store: RedisStore, slot: int) -> None:
        self._store = store
        self._slot = slot
        # The events of the calls that wait, by channel; and the channels that the server has confirmed.
        self._listeners: dict[bytes, set[asyncio.Event]] = {}
        self._confirmed: dict[bytes, asyncio.Event] = {}
        self._connection: Connection | None = None
        self._prefix = ""
        self._reading: asyncio.Task[None] | None = None
        self._ending: asyncio.TimerHandle | None = None
        # The loop's time.
        self._refused_until = 0.0

    async def subscribe(self, channel: bytes, woken: asyncio.Event) -> None:
        """Subscribe to a channel, and wait until the server has confirmed it. It is called again before each look."""
        self._listeners.setdefault(channel, set()).add(woken)
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if asyncio.get_running_loop().time() < self._refused_until:
            return
        confirmed = self._confirmed.get(channel)
        if confirmed is None:
            confirmed = self._confirmed[channel] = asyncio.Event()
            await self._send("SUBSCRIBE", channel)
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        if not confirmed.is_set():
            try:
                async with asyncio.timeout(_CONFIRM):
                    await confirmed.wait()
            except TimeoutError:
                return

    def unsubscribe(self, channel: bytes, woken: asyncio.Event) -> None:
        """End what `subscribe` began. Idempotent."""
        listeners = self._listeners.get(channel)
        if listeners is None:
            return
        listeners.discard(woken)
        if not listeners:
            del self._listeners[channel]
            self._confirmed.pop(channel, None)
            self._store.start_task(self._leave(channel))
        if not self._listeners and self._ending is None:
            self._ending = asyncio.get_running_loop().call_later(_LINGER, self._end)

    async def aclose(self) -> None:
        """End the subscriptions, and wake all calls."""
        for listeners in self._listeners.values():
            for woken in listeners:
                woken.set()
        if self._ending is not None:
            self._ending.cancel()
        self._end()
        if self._reading is not None:
            await asyncio.wait([self._reading])

    def _end(self) -> None:
        self._ending = None
        if self._reading is not None:
            self._reading.cancel()

    async def _leave(self, channel: bytes) -> None:
        # Another call may have subscribed again.
        if channel not in self._listeners:
            await self._send("UNSUBSCRIBE", channel)

    async def _send(self, command: str, channel: bytes) -> None:
        if self._connection is not None:
            try:
                await self._connection.post(f"{self._prefix}{command}", channel)
            except BackendError:
                # The reader finds that the connection is lost.
                return

    async def _read(self) -> None:
        """Read the messages until the connection is lost or nothing waits. The next look begins again."""
        try:
            async with self._store.pool.blocking_connection(self._slot) as connection:
                try:
                    self._prefix = "S" if is_sharded(self._store, connection) else ""
                    self._connection = connection
                    for channel in tuple(self._listeners):
                        await self._send("SUBSCRIBE", channel)
                    while True:
                        self._report(cast("list[bytes]", await connection.receive()))
                finally:
                    self._connection = None
                    # Another call cannot use a connection with subscriptions.
                    await connection.close()
        except PermissionDenied:
            self._refused_until = asyncio.get_running_loop().time() + _REFUSED
        except BackendError:
            # The calls that wait look again within a second, which reports an outage.
            return
        finally:
            self._reading = None
            for confirmed in self._confirmed.values():
                # Nothing will be confirmed: these calls look now.
                confirmed.set()
            self._confirmed.clear()

    def _report(self, message: list[bytes]) -> None:
        kind, channel = message[0], message[1]
        if kind.endswith(b"unsubscribe"):
            return
        if kind.endswith(b"subscribe"):
            confirmed = self._confirmed.get(channel)
            if confirmed is not None:
                confirmed.set()
            return
        for woken in self._listeners.get(channel, ()):
            woken.set()
