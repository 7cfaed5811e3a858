"""Reading a complete state in shares of its ids.

Every share lists all ids, which is cheap, and reads the messages of its own. Sets are read by `ZSCAN`, which misses no
member that stays. The list of ready ids is read from its end: leases take ids from its front and so move the rest
towards the part that is not read yet.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import cast

from qworker.kit.browse import at_most
from qworker.kit.parts import PAGE_BYTES, PAGE_MESSAGES, HashShare
from qworker.message import Query, State, StoredMessage
from qworker.names import check_existing_queue
from qworker_redis.admin import read_rows
from qworker_redis.browse import FIRST, count_at_once, find, parse_stored
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import Reply
from qworker_redis.keys import queue_key
from qworker_redis.topology import queue_slot

__all__ = ["browse_share"]

# Ids that one command lists. A command blocks all other clients of the server.
_LISTED = 2000
# A member of `sorted` begins with its place (lua/common.lua).
_PLACE_BYTES = 18

# An id, and the time that its state's set has for it.
_Row = tuple[bytes, bytes]


async def browse_share(pool: ConnectionPool, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
    """Yield the messages of a part, in any order.

    Raises:
        UsageError: The part of the query is not a share.
    """
    share = HashShare.parse(query.part or "")
    async for page in at_most(query.limit, _ShareReader(pool, queue, query.state).read(share)):
        yield page


class _ShareReader:
    def __init__(self, pool: ConnectionPool, queue: str, state: State) -> None:
        self._pool = pool
        self._queue = check_existing_queue(queue)
        self._state = state
        # Messages that the next command reads.
        self._count = FIRST

    async def read(self, share: HashShare) -> AsyncIterator[list[StoredMessage]]:
        # This call makes due messages ready, and checks whether the queue exists.
        await read_rows(self._pool, "look", self._queue, ("id",))
        # Ids of rows of `ready` whose message is in another place: it was removed, and perhaps published again.
        stale = frozenset(
            cast("list[bytes]", await self._command("HKEYS", "gone")) if self._state is State.READY else ()
        )
        seen: set[bytes] = set()
        page: list[StoredMessage] = []
        size = 0
        async for rows in self._rows():
            mine = [row for row in rows if row[0] not in seen and share.has(row[0].decode())]
            seen.update(row[0] for row in mine)
            while mine:
                found = await self._read(mine[: self._count], stale)
                mine = mine[self._count :]
                self._count = count_at_once(found) if found else self._count
                page += found
                size += sum(len(stored.message.body) for stored in found)
                if len(page) >= PAGE_MESSAGES or size >= PAGE_BYTES:
                    yield page
                    page, size = [], 0
        if page:
            yield page

    async def _command(self, command: str, part: str, *arguments: str | int | bytes) -> Reply:
        return await self._pool.command(queue_slot(self._queue), command, queue_key(self._queue, part), *arguments)

    async def _rows(self) -> AsyncIterator[list[_Row]]:
        if self._state is not State.READY:
            async for rows in self._scan(self._state.value):
                yield rows
            return
        stop = cast("int", await self._command("LLEN", "ready"))
        while stop > 0:
            start = max(0, stop - _LISTED)
            ids = cast("list[bytes]", await self._command("LRANGE", "ready", start, stop - 1))
            yield [(one, b"0") for one in reversed(ids)]
            stop = start
        async for rows in self._scan("sorted"):
            yield [(member[_PLACE_BYTES:], b"0") for member, _ in rows]

    async def _scan(self, part: str) -> AsyncIterator[list[_Row]]:
        cursor = b"0"
        while True:
            reply = cast("tuple[bytes, list[bytes]]", await self._command("ZSCAN", part, cursor, "COUNT", _LISTED))
            cursor, rows = reply
            yield list(zip(rows[::2], rows[1::2], strict=True))
            if cursor == b"0":
                return

    async def _read(self, rows: Sequence[_Row], stale: frozenset[bytes]) -> list[StoredMessage]:
        """Return the messages of some rows that are still there."""
        found = await self._read_verified([row for row in rows if row[0] not in stale])
        unsure = [name.decode() for name, _ in rows if name in stale]
        if unsure:
            messages = await find(self._pool, self._queue, unsure, parse_stored)
            found += [stored for stored in messages if stored.state is self._state]
        return found

    async def _read_verified(self, rows: Sequence[_Row]) -> list[StoredMessage]:
        ids = [name for name, _ in rows]
        if not ids:
            return []
        values = cast("list[bytes | None]", await self._command("HMGET", "msg", *ids))
        claims = cast("list[bytes | None]", await self._command("HMGET", "claims", *ids))
        errors = cast("list[bytes | None]", await self._command("HMGET", "errors", *ids))
        flat: list[Reply] = [1]
        for (name, time), value, claim, error in zip(rows, values, claims, errors, strict=True):
            if value is not None:
                flat += [name, value, self._state.value.encode(), time, claim or b"", error or b""]
        return list(parse_stored(self._queue, flat, False))
