"""The history of a qworker server, over HTTP: the server keeps the events that a worker here records."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
import structlog

from qworker import log_events as events
from qworker.errors import BackendError, UsageError
from qworker.history.batch import EventBatch, encode_batch
from qworker.history.event import Event
from qworker.history.store import HistoryStore
from qworker.names import check_queue, printable
from qworker_mq.server_client import ServerClient, decode

__all__ = ["RemoteHistory"]

# Batches that wait to be sent. If there are more, the oldest are dropped.
_MOST_WAITING = 200
# Batches in one request.
_MOST_SENT = 20
# Seconds until a server that refused is tried again, and for which `aclose` waits.
_PAUSE, _CLOSE = 30.0, 2.0


class _Page(msgspec.Struct):
    events: list[Event]
    after: str | None


class RemoteHistory(HistoryStore):
    """A history that a server keeps.

    Args:
        server: The server.
    """

    def __init__(self, server: ServerClient) -> None:
        self._server = server
        self._waiting: deque[EventBatch] = deque(maxlen=_MOST_WAITING)
        self._sender: asyncio.Task[None] | None = None
        self._paused = False
        self._log: Any = structlog.get_logger("qworker.history")

    def describe_retention(self) -> str:
        """Return that the server keeps the events."""
        return "kept by the server"

    # -- writing -----------------------------------------------------------------------------------------------------

    def append(self, batches: Sequence[EventBatch]) -> None:
        """Queue events for the background sender."""
        self._waiting.extend(batches)
        if self._waiting and self._sender is None:
            self._sender = asyncio.get_running_loop().create_task(self._send_all(), name="qworker-history-sender")

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                some = [self._waiting.popleft() for _ in range(min(_MOST_SENT, len(self._waiting)))]
                try:
                    await self._server.ask("POST", "/-/-history", [msgspec.Raw(encode_batch(batch)) for batch in some])
                except (BackendError, UsageError, OSError) as error:
                    self._pause(error)
                    await asyncio.sleep(_PAUSE)
                else:
                    self._resume()
        finally:
            self._sender = None

    def _pause(self, error: Exception) -> None:
        if not self._paused:
            self._paused = True
            fields = {events.ERROR_TYPE: type(error).__name__, events.ERROR: printable(str(error))}
            self._log.warning(events.HISTORY_PAUSED, server=self._server.url, **fields)

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._log.warning(events.HISTORY_RESUMED, server=self._server.url)

    async def aclose(self) -> None:
        """Wait up to 2 s for the batch that is being sent."""
        if self._sender is not None:
            sender = self._sender
            if not self._paused:
                await asyncio.wait([sender], timeout=_CLOSE)
            sender.cancel()
            await asyncio.wait([sender])

    # -- reading -----------------------------------------------------------------------------------------------------

    async def logs(self) -> list[str]:
        """Return the logs of the server."""
        return decode(await self._server.ask("GET", "/-/-history"), list[str])

    async def read(self, log: str, after: str | None, limit: int) -> tuple[list[Event], str | None]:
        """Read one page from the server, of at most 1000 events."""
        query = {"limit": min(limit, 1000), **({} if after is None else {"after": after})}
        page = decode(await self._server.ask("GET", f"/-/-history/{check_queue(log)}?{urlencode(query)}"), _Page)
        return page.events, page.after

    async def delete_before(self, log: str, position: str) -> None:
        """Ask the server to remove the events."""
        await self._server.ask("POST", f"/-/-history/{check_queue(log)}/forget", {"until": position})

    async def for_message(self, queue: str, message_id: str) -> list[Event]:
        """Ask the server for the events."""
        target = f"/-/{check_queue(queue)}/messages/{quote(message_id, safe='')}/history"
        return decode(await self._server.ask("GET", target), list[Event])
