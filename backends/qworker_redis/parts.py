"""Reading a whole state in shares of its ids.

Every share lists all ids, which is cheap, and gets the messages of its own. Sets are walked by `ZSCAN`, which misses nothing that stays. The
list of ready ids is read from its end: what leases take from its front moves the rest towards the part that is not read yet.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import cast

from qworker.kit.browse import at_most
from qworker.kit.parts import PAGE_BYTES, PAGE_MESSAGES, Share, shares
from qworker.message import Query, State, StoredMessage
from qworker.names import check_queue
from qworker_redis.admin import Administration, parse_stored
from qworker_redis.error_replies import Reply
from qworker_redis.scripts import queue_key
from qworker_redis.topology import queue_slot

__all__ = ["BulkReading"]

# Ids that one command lists, and messages that one gets: a server does nothing else meanwhile.
_LISTED = 2000
_READ = 500
# A member of `sorted` begins with its place (lua/common.lua).
_PLACE_BYTES = 18

# An id, and the time that its state's set has for it.
_Row = tuple[bytes, bytes]


class BulkReading(Administration):
    """The part of the backend that is read by many at once."""

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Shares of the ids."""
        await self._found("stats", queue, ())
        return shares(count)

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Look at messages of a state, in its order or in a share."""
        if query.part is None:
            found = super().browse(queue, query)
        else:
            found = at_most(query.limit, self._share(queue, query.state, Share.parse(query.part)))
        async for page in found:
            yield page

    async def _share(self, queue: str, state: State, share: Share) -> AsyncIterator[list[StoredMessage]]:
        # Moves what is due, and says where there is no queue.
        await self._found("look", queue, ("id",))
        rewritten = await self._rewritten(queue) if state is State.READY else frozenset[bytes]()
        seen: set[bytes] = set()
        page: list[StoredMessage] = []
        size = 0
        async for rows in self._rows(queue, state):
            mine = [row for row in rows if row[0] not in seen and share.has(row[0].decode())]
            seen.update(row[0] for row in mine)
            for first in range(0, len(mine), _READ):
                for stored in await self._read(queue, state, mine[first : first + _READ], rewritten):
                    page.append(stored)
                    size += len(stored.message.body)
                if len(page) >= PAGE_MESSAGES or size >= PAGE_BYTES:
                    yield page
                    page, size = [], 0
        if page:
            yield page

    async def _of(self, queue: str, command: str, part: str, *arguments: str | int | bytes) -> Reply:
        return await self._command(queue_slot(queue), command, queue_key(queue, part), *arguments)

    async def _rewritten(self, queue: str) -> frozenset[bytes]:
        """Ids that the list of ready ones may name although their messages are elsewhere: removed, and perhaps published again."""
        return frozenset(cast("list[bytes]", await self._of(check_queue(queue), "HKEYS", "gone")))

    async def _rows(self, queue: str, state: State) -> AsyncIterator[list[_Row]]:
        if state is not State.READY:
            async for rows in self._scanned(queue, state.value):
                yield rows
            return
        stop = cast("int", await self._of(queue, "LLEN", "ready"))
        while stop > 0:
            start = max(0, stop - _LISTED)
            ids = cast("list[bytes]", await self._of(queue, "LRANGE", "ready", start, stop - 1))
            yield [(one, b"0") for one in reversed(ids)]
            stop = start
        async for rows in self._scanned(queue, "sorted"):
            yield [(member[_PLACE_BYTES:], b"0") for member, _ in rows]

    async def _scanned(self, queue: str, part: str) -> AsyncIterator[list[_Row]]:
        cursor = b"0"
        while True:
            reply = cast("tuple[bytes, list[bytes]]", await self._of(queue, "ZSCAN", part, cursor, "COUNT", _LISTED))
            cursor, rows = reply
            yield list(zip(rows[::2], rows[1::2], strict=True))
            if cursor == b"0":
                return

    async def _read(
        self, queue: str, state: State, rows: Sequence[_Row], rewritten: frozenset[bytes]
    ) -> list[StoredMessage]:
        """The messages of some rows that are still there."""
        sure = [row for row in rows if row[0] not in rewritten]
        found = await self._read_verified(queue, state, sure)
        unsure = [name.decode() for name, _ in rows if name in rewritten]
        if unsure:
            found += [stored for stored in await self.find(queue, unsure) if stored.state is state]
        return found

    async def _read_verified(self, queue: str, state: State, rows: Sequence[_Row]) -> list[StoredMessage]:
        ids = [name for name, _ in rows]
        if not ids:
            return []
        values = cast("list[bytes | None]", await self._of(queue, "HMGET", "msg", *ids))
        claims = cast("list[bytes | None]", await self._of(queue, "HMGET", "claims", *ids))
        errors = cast("list[bytes | None]", await self._of(queue, "HMGET", "errors", *ids))
        flat: list[Reply] = [1]
        for (name, time), value, claim, error in zip(rows, values, claims, errors, strict=True):
            if value is not None:
                flat += [name, value, state.value.encode(), time, claim or b"", error or b""]
        return list(parse_stored(queue, flat))
