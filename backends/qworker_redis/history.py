"""The history in Redis: one capped stream for each queue, `{qworker:Q}:history`. An entry holds one record of events.

Records are sent in the background. The worker does not wait for their answers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, cast

import msgspec
import structlog

from qworker import log_events as events
from qworker.clock import Clock
from qworker.errors import BackendError, BackendUnavailable
from qworker.history.batch import EventBatch, decode_batch, decode_with, encode_batch
from qworker.history.event import Event
from qworker.history.store import HistoryOptions, HistoryStore, parse_position, sort_by_time
from qworker.names import check_existing_queue, printable
from qworker_redis.connection import Argument, pack
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import ConnectionLost, Redirected, Reply
from qworker_redis.keys import queue_key
from qworker_redis.topology import queue_slot

__all__ = ["RedisHistory"]

_FIELD = b"b"
# In a position: all events of the entry were returned.
_ALL = 999_999
# Entries in one XRANGE.
_ENTRIES = 16
# The fewest and the most entries of a stream, whatever their size.
_FEWEST, _MOST = 200, 200_000
# Records that wait until they can be sent. If there are more, the oldest are dropped.
_MOST_WAITING = 1000
# Records in one trip.
_MOST_SENT = 100
# Seconds between two trims by age; until a store that refused is tried again; and for which `aclose` waits.
_TRIMMING, _PAUSE, _CLOSE = 60.0, 30.0, 1.0


class RedisHistory(HistoryStore):
    """A history of streams.

    Args:
        pool: The backend's connections.
        options: How long events are kept.
        clock: The backend's clock.
        queues: Returns the names of all queues.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        options: HistoryOptions,
        *,
        clock: Clock,
        queues: Callable[[], Awaitable[list[str]]],
    ) -> None:
        self.enabled = options.enabled
        self._pool = pool
        self._options = options
        self._clock = clock
        self._queues = queues
        self._sending: asyncio.Task[None] | None = None
        self._waiting: deque[tuple[str, bytes]] = deque(maxlen=_MOST_WAITING)
        # Bytes of an average record, from which the number of entries is computed.
        self._usual = 1000.0
        self._trimmed_at: dict[str, float] = {}
        # Monotonic seconds: nothing is sent before this time. 0: the store works.
        self._paused_until = 0.0
        self._log: Any = structlog.get_logger("qworker.redis")

    def describe_retention(self) -> str:
        """Return the age and the size that are kept for each queue."""
        return f"{self._options.describe_retention()} per queue" if self.enabled else self._options.describe_retention()

    # -- writing -----------------------------------------------------------------------------------------------------

    def append(self, batches: Sequence[EventBatch]) -> None:
        """Send records in the background, in order. While the server cannot be reached, they wait."""
        if not self.enabled or self._clock.monotonic() < self._paused_until:
            return
        self._waiting.extend([(batch.queue, encode_batch(batch)) for batch in batches])
        if self._sending is None and self._pool.is_up:
            self._sending = asyncio.create_task(self._send_waiting())
            self._sending.add_done_callback(self._on_sent)

    async def _send_waiting(self) -> None:
        """Send the records that wait: one trip for those of one queue that follow one another."""
        while self._waiting:
            queue = self._waiting[0][0]
            payloads: list[bytes] = []
            while self._waiting and self._waiting[0][0] == queue and len(payloads) < _MOST_SENT:
                payloads.append(self._waiting.popleft()[1])
            try:
                replies = await self._pool.send_once(queue_slot(queue), self._commands(queue, payloads))
            except BackendUnavailable as error:
                # If they were sent, it is unknown which of them are stored, and a record must not appear twice.
                if not (isinstance(error, ConnectionLost) and error.sent):
                    self._waiting.extendleft((queue, payload) for payload in reversed(payloads))
                raise
            self._check(replies[: len(payloads)])

    def _commands(self, queue: str, payloads: Sequence[bytes]) -> list[bytes]:
        key, now = queue_key(queue, "history"), self._clock.monotonic()
        for payload in payloads:
            self._usual += (len(payload) - self._usual) / 64
        most = min(_MOST, max(_FEWEST, int(self._options.size / self._usual)))
        commands = [pack(("XADD", key, "MAXLEN", "~", most, "*", _FIELD, payload)) for payload in payloads]
        if now - self._trimmed_at.get(queue, float("-inf")) > _TRIMMING:
            self._trimmed_at[queue] = now
            oldest = int((self._clock.time() - self._options.age) * 1000)
            # If it fails, the next trim, a minute later, tries again.
            commands.append(pack(("XTRIM", key, "MINID", "~", max(0, oldest))))
        return commands

    def _check(self, replies: Sequence[Reply]) -> None:
        """Pause if the server refuses records."""
        error = next((reply for reply in replies if isinstance(reply, BackendError)), None)
        if error is None:
            if self._paused_until:
                self._paused_until = 0.0
                self._log.warning(events.HISTORY_RESUMED)
        elif not isinstance(error, Redirected):
            # The store has no memory, or denies permission.
            if not self._paused_until:
                fields = {events.ERROR_TYPE: type(error).__name__, events.ERROR: printable(str(error))}
                self._log.warning(events.HISTORY_PAUSED, **fields)
            self._paused_until = self._clock.monotonic() + _PAUSE

    def _on_sent(self, task: asyncio.Task[None]) -> None:
        self._sending = None
        error = None if task.cancelled() else task.exception()
        # Other users of a lost connection report it.
        if error is not None and not isinstance(error, BackendUnavailable):
            self._check([error])

    async def aclose(self) -> None:
        """Wait up to 1 s until the records are sent."""
        await self._flush()

    async def _flush(self) -> None:
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=_CLOSE)

    # -- reading -----------------------------------------------------------------------------------------------------

    async def logs(self) -> list[str]:
        """Return the queues that have a stream."""
        names = await self._queues()
        return [
            name for name in names if await self._pool.command(queue_slot(name), "EXISTS", queue_key(name, "history"))
        ]

    async def logs_of(self, queues: Sequence[str]) -> list[str]:
        """Return the queues: each has its own stream."""
        return list(queues)

    async def read(self, log: str, after: str | None, limit: int) -> tuple[list[Event], str | None]:
        """Read the entries of a queue's stream.

        A position is the id of an entry and how many of its events were returned.
        """
        found: list[Event] = []
        place, skip = _parsed(after)
        while len(found) < limit:
            entries = await self._entries(log, place, skip)
            if not entries:
                break
            for own, payload in entries:
                given = _events(payload)
                first = skip if own == place else 0
                some = given[first : first + limit - len(found)]
                found += some
                if first + len(some) < len(given):
                    return found, _position(own, first + len(some))
                after = _position(own, _ALL)
            place, skip = entries[-1][0], _ALL
        return found, after

    async def read_batches(self, log: str, after: str | None, limit: int) -> tuple[list[EventBatch], str | None]:
        """Read the entries of a queue's stream as they are stored."""
        found: list[EventBatch] = []
        place, skip = _parsed(after)
        while len(found) < limit and (entries := await self._entries(log, place, skip)):
            for own, payload in entries[: limit - len(found)]:
                if (batch := decode_batch(payload)) is not None:
                    found.append(batch)
                place, skip = own, _ALL
                after = _position(own, _ALL)
        return found, after

    async def read_back(
        self, log: str, before: str | None, limit: int, needles: Collection[bytes] = ()
    ) -> tuple[list[EventBatch], str | None]:
        """Read the entries of a queue's stream from the last one on, without decoding those without the needles."""
        end = "+"
        if before is not None:
            place, given = _parsed(before)
            end = f"{'' if given == _ALL else '('}{place[0]}-{place[1]}"
        entries = await self._last_entries(log, end, limit)
        batches = decode_with([payload for _, payload in entries], needles)
        return batches, _position(entries[-1][0], 0) if len(entries) == limit else None

    async def last_position(self, log: str) -> str | None:
        """Read the stream's last entry only."""
        last = await self._last_entries(log, "+", 1)
        return _position(last[0][0], _ALL) if last else None

    async def for_message(self, queue: str, message_id: str) -> list[Event]:
        """Search the queue's stream, without decoding entries that do not contain the id."""
        needle = msgspec.json.encode(message_id)
        found: list[Event] = []
        place, skip = (0, 0), 0
        while entries := await self._entries(queue, place, skip):
            for _, payload in entries:
                if needle in payload:
                    found += [one for one in _events(payload) if one.id == message_id]
            place, skip = entries[-1][0], _ALL
        return sort_by_time(found)

    async def _entries(self, queue: str, place: tuple[int, int], given: int) -> list[tuple[tuple[int, int], bytes]]:
        """Read some entries of a stream, starting at a place. Those that this process has appended are there."""
        await self._flush()
        start = f"{'(' if given == _ALL else ''}{place[0]}-{place[1]}"
        key = queue_key(check_existing_queue(queue), "history")
        reply = await self._pool.command(queue_slot(queue), "XRANGE", key, start, "+", "COUNT", _ENTRIES)
        return _entries_in(reply)

    async def _last_entries(self, queue: str, end: str, limit: int) -> list[tuple[tuple[int, int], bytes]]:
        """Read the last entries of a stream up to an id, the newest first."""
        key = queue_key(check_existing_queue(queue), "history")
        await self._flush()
        return _entries_in(await self._pool.command(queue_slot(queue), "XREVRANGE", key, end, "-", "COUNT", limit))

    async def delete_before(self, log: str, position: str) -> None:
        """Trim the stream."""
        (moment, number), given = _parsed(position)
        first = f"{moment}-{number + 1 if given == _ALL else number}"
        arguments: list[Argument] = ["XTRIM", queue_key(check_existing_queue(log), "history"), "MINID", "=", first]
        await self._pool.command(queue_slot(log), *arguments)


def _entries_in(reply: Reply) -> list[tuple[tuple[int, int], bytes]]:
    found: list[tuple[tuple[int, int], bytes]] = []
    for name, fields in cast("list[tuple[bytes, list[bytes]]]", reply):
        moment, _, number = name.partition(b"-")
        found.append(((int(moment), int(number)), fields[1] if fields[:1] == [_FIELD] else b""))
    return found


def _events(payload: bytes) -> list[Event]:
    batch = decode_batch(payload)
    return [] if batch is None else batch.events()


def _position(place: tuple[int, int], given: int) -> str:
    return f"{place[0]:020d}-{place[1]:010d}-{given:06d}"


def _parsed(text: str | None) -> tuple[tuple[int, int], int]:
    """Return the place of an entry, and how many of its events were returned.

    Raises:
        UsageError: It is not a position.
    """
    if text is None:
        return (0, 0), 0
    moment, number, given = parse_position(text, 3)
    return (moment, number), given
