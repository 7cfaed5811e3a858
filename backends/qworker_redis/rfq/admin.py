"""The part of the backend that looks after topics, and what rfq's own commands do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import ClassVar, Literal, cast

from qworker.clock import Clock
from qworker.errors import BackendError
from qworker.kit.browse import bad_position, place_of, position_of
from qworker.kit.parts import WHOLE, bad_part
from qworker.message import FinishedMessage, Message, Query, QueueStats, State, StoredMessage
from qworker.names import check_queue, printable
from qworker_redis.admin import Administration, encode_text, ids_and_times, in_batches
from qworker_redis.connection import Argument, Connection
from qworker_redis.error_replies import Reply
from qworker_redis.rfq.codec import fields_of, packed, readable
from qworker_redis.rfq.ids import new_ids, published_at
from qworker_redis.rfq.keys import PARTS, parse_topic, rfq_key
from qworker_redis.scripts import queue_key
from qworker_redis.topology import queue_slot

__all__ = ["List", "RfqAdministration"]

# rfq's two lists of a topic.
List = Literal["backlog", "nextlog"]

_BATCH = 500
_SCAN = 1000
# More than any time in microseconds, and than a list can have.
_MOST = 1 << 60


class RfqAdministration(Administration):
    """Topics as administrators see them."""

    _clock: Clock
    # A page begins again with the next in line where its place is not known any more.
    _moving: ClassVar[frozenset[State]] = frozenset({State.LEASED, State.READY})

    # The keys of topics are others than those that are read in shares.

    async def queues(self) -> list[str]:
        """The names of all topics: those with a list of rfq's, and those that qworker made."""
        return await self._topics_with("backlog", "nextlog", "meta")

    async def topics(self) -> list[str]:
        """The topics that rfq knows: those with a list."""
        return await self._topics_with("backlog", "nextlog")

    async def _topics_with(self, *parts: str) -> list[str]:
        found = await asyncio.gather(*[self._scan(part) for part in parts])
        return sorted({topic for topics in found for topic in topics})

    async def _scan(self, part: str) -> set[str]:
        topics: set[str] = set()
        cursor = b"0"
        while True:
            reply = await self._command(
                0, "SCAN", cursor, "MATCH", rfq_key("*", part), "COUNT", _SCAN, "TYPE", _type(part)
            )
            cursor, keys = cast("tuple[bytes, list[bytes]]", reply)
            topics |= {topic for key in keys if (topic := parse_topic(key, part)) is not None}
            if cursor == b"0":
                return topics

    async def _list_queue(self, queue: str) -> None:
        """Nothing: topics are found by their keys."""

    async def delete(self, queue: str) -> None:
        """Remove a topic and every message in it, whoever holds it. Idempotent."""
        check_queue(queue)
        for state in (State.READY, State.LEASED, State.DELAYED, State.FAILED):
            while cast("int", await self._pool.run_script("remove", queue, (state.value, _BATCH))) > 0:
                pass
        keys = [rfq_key(queue, part) for part in ("backlog", "nextlog", *PARTS)]
        if self.history.enabled:
            keys.append(queue_key(queue, "history"))
        await self._command(queue_slot(queue), "UNLINK", *keys)

    async def stats(self, queue: str) -> QueueStats:
        """Count a topic; what other consumers work on counts as leased."""
        ready, leased, delayed, done, fail, down, now, oldest = cast(
            "tuple[int, int, int, int, int, int, int, list[bytes]]", await self._found("stats", queue, ())
        )
        since: float | None = None
        if oldest:
            since = int(oldest[1]) / 1e6 if oldest[1] else published_at(oldest[0].decode(errors="replace"))
        return QueueStats(
            queue=queue,
            ready=ready,
            leased=leased,
            delayed=delayed,
            done=done,
            failed=fail,
            oldest_age_s=None if since is None else max(0.0, now / 1e6 - since),
            paused=bool(down),
            retention={"failed": self._options.keep_failed.describe()},
        )

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Look at messages of a state.

        After a message that is not in line any more, those that are in line begin with the next one: it is taken for leased.
        """
        if query.part not in {None, WHOLE}:
            raise bad_part(query.part or "")
        async for page in Administration.browse(self, queue, query):
            yield page

    def _place(self, query: Query) -> tuple[Argument, ...]:
        place = place_of(query.after)
        if place is None:
            return ()
        if not 0 <= place[0] < _MOST:
            raise bad_position(query.after or "")
        return f"{place[0]:.0f}", encode_text(place[1])

    def _stored(self, queue: str, reply: Sequence[Reply]) -> Iterator[StoredMessage]:
        return _stored(queue, reply, positions=True)

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """One: the keys of a topic are others than those that are read in shares."""
        await self._found("stats", queue, ())
        return [WHOLE]

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Look at messages."""
        found: list[StoredMessage] = []
        for batch in in_batches(ids):
            named = [one.encode(errors="surrogateescape") for one in batch]
            found += _stored(queue, await self._found("look", queue, ("id", *named)))
        return found

    async def _remove_unchanged(self, queue: str, found: Sequence[FinishedMessage]) -> int:
        failed = [one for one in found if one.state is State.FAILED]
        return await self._counted("remove", queue, ("unchanged", *ids_and_times(failed)))

    # -- rfq's commands ----------------------------------------------------------------------------------------------

    async def listed(self, topic: str, which: List) -> list[str]:
        """The ids in one of the lists, from its head: the next in line comes last."""
        ids: list[str] = []
        while True:
            page = await self._command(0, "LRANGE", rfq_key(check_queue(topic), which), len(ids), len(ids) + 9999)
            some = [_text(name) for name in cast("list[bytes]", page)]
            ids += some
            if len(some) < 10_000:
                return ids

    async def lengths(self, topic: str) -> tuple[int, int]:
        """How many are in the backlog, and how many in the nextlog."""
        asked = [self._command(0, "LLEN", rfq_key(check_queue(topic), part)) for part in ("backlog", "nextlog")]
        backlog, nextlog = await asyncio.gather(*asked)
        return cast("int", backlog), cast("int", nextlog)

    async def purge_list(self, topic: str, which: List) -> list[str]:
        """Delete the messages of one of the lists, from its tail; their ids."""
        ids: list[str] = []
        # Not more than there are now, or this might never end.
        left = self._length(which, await self.lengths(topic))
        while left > 0:
            arguments: list[Argument] = [which, min(left, _BATCH)]
            reply = await self._pool.run_script("remove", topic, arguments)
            some = [] if reply == -1 else [_text(name) for name in cast("list[bytes]", reply)]
            ids += some
            left = left - len(some) if some else 0
        return ids

    @staticmethod
    def _length(which: List, lengths: tuple[int, int]) -> int:
        return lengths[0] if which == "backlog" else lengths[1]

    async def publish_fields(self, topic: str, fields: Mapping[str, str], *, front: bool) -> str:
        """Store a map as it is, at the end of the line or in front; its id.

        Raises:
            InvalidArguments: a field is no text.
        """
        (message_id,) = new_ids(1, self._clock.time())
        names_and_values = [part for item in fields.items() for part in item]
        # Seen before it is sent: an error in a transaction would leave half of it.
        packed(names_and_values)
        flat = [part.encode() for part in names_and_values]
        key = rfq_key(check_queue(topic), "message") + b":" + message_id.encode()
        backlog = rfq_key(topic, "backlog")

        async def attempt(connection: Connection, again: bool) -> Reply:
            if again and await connection.send("EXISTS", key):
                return None
            connection.send("MULTI").add_done_callback(_forget)
            connection.send("HSET", key, *flat).add_done_callback(_forget)
            connection.send("RPUSH" if front else "LPUSH", backlog, message_id).add_done_callback(_forget)
            return await connection.send("EXEC")

        await self._pool.repeat(queue_slot(topic), attempt)
        return message_id

    async def harvest(self, topic: str) -> list[str]:
        """Move everything in the nextlog, whoever works on it, back to the backlog; the ids."""
        nextlog, backlog = rfq_key(check_queue(topic), "nextlog"), rfq_key(topic, "backlog")
        ids: dict[bytes, None] = {}
        while (name := cast("bytes | None", await self._command(0, "RPOPLPUSH", nextlog, backlog))) is not None:
            if name in ids:
                break
            ids[name] = None
        return [_text(name) for name in ids]

    async def peek(self, topic: str, message_id: str) -> dict[str, str] | None:
        """The map of a message; None when there is none.

        Raises:
            BackendError: it is no map of text to text.
        """
        name = message_id.encode(errors="surrogateescape")
        raw = cast(
            "list[bytes]", await self._command(0, "HGETALL", rfq_key(check_queue(topic), "message") + b":" + name)
        )
        try:
            return fields_of(raw) or None
        except UnicodeDecodeError as error:
            raise BackendError(f"the message {printable(message_id)} is not a map of text to text: {error}") from error

    async def server_version(self) -> str:
        """What the server says that it is."""
        info = cast("bytes", await self._command(0, "INFO", "server")).decode(errors="replace")
        lines = (line.partition(":") for line in info.splitlines())
        return next((value for name, _, value in lines if name == "redis_version"), "unknown")


def _forget(future: asyncio.Future[Reply]) -> None:
    """Take the error of a command whose transaction tells it once more."""
    if not future.cancelled():
        future.exception()


def _type(part: str) -> str:
    return "hash" if part == "meta" else "list"


def _text(name: bytes) -> str:
    return name.decode(errors="surrogateescape")


def _stored(queue: str, reply: Sequence[Reply], *, positions: bool = False) -> Iterator[StoredMessage]:
    for at in range(1, len(reply), 6):
        name, value, state, place, claim, error = cast(
            "tuple[bytes, list[Reply], bytes, bytes | int, bytes, bytes]", tuple(reply[at : at + 6])
        )
        where, number = State(state.decode()), float(place)
        when = number / 1e6
        message: Message = readable(queue, _text(name), value)
        yield StoredMessage(
            message=message,
            state=where,
            due_at=when if where is State.DELAYED else None,
            expires_at=when if where is State.LEASED and when else None,
            finished_at=when if where is State.FAILED else None,
            holder=claim.decode().partition(" ")[2].rpartition("/")[0] or None,
            error=error.decode(errors="replace") or None,
            position=position_of((int(number), message.id)) if positions else None,
        )
