"""The operations of the rfq package's commands on the two lists of a topic."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal, cast

from qworker.clock import Clock
from qworker.errors import BackendError
from qworker.names import check_existing_queue, printable
from qworker_redis.admin import BATCH
from qworker_redis.connection import Argument, Connection, pack
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import Reply
from qworker_redis.rfq.admin import list_topics
from qworker_redis.rfq.codec import pack_fields, to_fields
from qworker_redis.rfq.ids import new_ids
from qworker_redis.rfq.keys import decode_id, rfq_key
from qworker_redis.topology import queue_slot

__all__ = ["List", "RfqCommands"]

List = Literal["backlog", "nextlog"]

# Ids that one command lists.
_PAGE = 10_000


class RfqCommands:
    """The commands, for one backend.

    Args:
        pool: The connections of the backend.
        clock: The time of new ids.
    """

    def __init__(self, pool: ConnectionPool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock

    async def topics(self) -> list[str]:
        """Return the topics that rfq knows: those with a list."""
        return await list_topics(self._pool, ("backlog", "nextlog"))

    async def list_ids(self, topic: str, which: List) -> list[str]:
        """Return the ids in one of the lists, from its head. The next one in line comes last."""
        ids: list[str] = []
        while True:
            key = rfq_key(check_existing_queue(topic), which)
            page = await self._pool.command(0, "LRANGE", key, len(ids), len(ids) + _PAGE - 1)
            some = [decode_id(name) for name in cast("list[bytes]", page)]
            ids += some
            if len(some) < _PAGE:
                return ids

    async def lengths(self, topic: str) -> tuple[int, int]:
        """Return the number of messages in the backlog and in the nextlog."""
        asked = [
            self._pool.command(0, "LLEN", rfq_key(check_existing_queue(topic), part)) for part in ("backlog", "nextlog")
        ]
        backlog, nextlog = await asyncio.gather(*asked)
        return cast("int", backlog), cast("int", nextlog)

    async def purge_list(self, topic: str, which: List) -> list[str]:
        """Delete the messages of one of the lists, from its tail, and return their ids."""
        ids: list[str] = []
        # No more messages than there are now, or this might never end.
        left = (await self.lengths(topic))[which == "nextlog"]
        while left > 0:
            arguments: list[Argument] = [which, min(left, BATCH)]
            reply = await self._pool.run_script("remove", topic, arguments)
            some = [] if reply == -1 else [decode_id(name) for name in cast("list[bytes]", reply)]
            ids += some
            left = left - len(some) if some else 0
        return ids

    async def publish(self, topic: str, fields: Mapping[str, str], *, front: bool) -> str:
        """Store a map as it is, at the end of the line or in front of it, and return its id.

        Raises:
            InvalidArguments: A field is not a text.
        """
        (message_id,) = new_ids(1, self._clock.time())
        names_and_values = [part for item in fields.items() for part in item]
        # The fields are checked before they are sent: an error in a transaction would leave half of it.
        pack_fields(names_and_values)
        flat = [part.encode() for part in names_and_values]
        key = rfq_key(check_existing_queue(topic), "message") + b":" + message_id.encode()
        backlog = rfq_key(topic, "backlog")

        async def attempt(connection: Connection, again: bool) -> Reply:
            if again and await connection.send("EXISTS", key):
                return None
            # EXEC reports the errors of all commands.
            push = "RPUSH" if front else "LPUSH"
            commands: list[tuple[Argument, ...]] = [
                ("MULTI",),
                ("HSET", key, *flat),
                (push, backlog, message_id),
                ("EXEC",),
            ]
            replies = await connection.send_all([pack(command) for command in commands])
            if isinstance(replies[-1], BackendError):
                raise replies[-1]
            return replies[-1]

        await self._pool.repeat(queue_slot(topic), attempt)
        return message_id

    async def harvest(self, topic: str) -> list[str]:
        """Move everything in the nextlog back to the backlog, whether its consumers are alive or not.

        Return the ids.
        """
        nextlog, backlog = rfq_key(check_existing_queue(topic), "nextlog"), rfq_key(topic, "backlog")
        ids: dict[bytes, None] = {}
        while (name := cast("bytes | None", await self._pool.command(0, "RPOPLPUSH", nextlog, backlog))) is not None:
            if name in ids:
                break
            ids[name] = None
        return [decode_id(name) for name in ids]

    async def peek(self, topic: str, message_id: str) -> dict[str, str] | None:
        """Return the map of a message, or None if it does not exist.

        Raises:
            BackendError: It is not a map of text to text.
        """
        name = message_id.encode(errors="surrogateescape")
        key = rfq_key(check_existing_queue(topic), "message") + b":" + name
        raw = cast("list[bytes]", await self._pool.command(0, "HGETALL", key))
        try:
            return to_fields(raw) or None
        except UnicodeDecodeError as error:
            raise BackendError(f"the message {printable(message_id)} is not a map of text to text: {error}") from error

    async def server_version(self) -> str:
        """Return the version that the server reports."""
        info = cast("bytes", await self._pool.command(0, "INFO", "server")).decode(errors="replace")
        lines = (line.partition(":") for line in info.splitlines())
        return next((value for name, _, value in lines if name == "redis_version"), "unknown")
