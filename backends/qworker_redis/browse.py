"""Browsing: the messages of a state in its order, a page by one script call, and messages by their ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import cast

from qworker.errors import BackendError
from qworker.kit.browse import bad_position, place_of, position_of
from qworker.kit.parts import PAGE_BYTES, in_pages
from qworker.message import Message, Query, State, StoredMessage
from qworker_redis.admin import read_rows
from qworker_redis.codec import decode, encode_text
from qworker_redis.connection import Argument
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import Reply
from qworker_redis.keys import queue_key
from qworker_redis.topology import queue_slot

__all__ = [
    "FIRST",
    "Parse",
    "browse_in_order",
    "browse_pages",
    "count_at_once",
    "find",
    "format_number",
    "held_until",
    "key_holder",
    "make_stored",
    "parse_stored",
]

# Messages in one script call, which blocks all other clients of the server.
_BATCH = 500
# The number of messages in one call before their size is known.
FIRST = 10
# The most rows of a list.
_MOST_ROWS = 1 << 48
# States in which a message can be seen twice: a lease that is extended moves back in the order.
_MOVING = frozenset({State.LEASED})

# Parses an answer of the script `look`: the queue, the answer, and whether messages get positions.
Parse = Callable[[str, Sequence[Reply], bool], Iterator[StoredMessage]]


def browse_in_order(pool: ConnectionPool, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
    """Yield the messages of a state in its order."""
    return browse_pages(pool, queue, query, _start, parse_stored, _MOVING)


async def browse_pages(
    pool: ConnectionPool,
    queue: str,
    query: Query,
    start: Callable[[Query], tuple[Argument, ...]],
    parse: Parse,
    moving: frozenset[State],
) -> AsyncIterator[list[StoredMessage]]:
    """Yield the messages of a state in its order. A page is one call, and begins where the one before it ended.

    Args:
        pool: The connections of the backend.
        queue: Name of the queue.
        query: The query.
        start: Returns the arguments of the script `look` that say where the first page begins.
        parse: Parses the answers of the script.
        moving: The states in which a page can show a message again.
    """
    left, count = query.limit, FIRST
    after = start(query)
    given: set[str] = set()
    while True:
        wanted = count if left is None else min(count, left)
        reply = await read_rows(pool, "look", queue, (query.state.value, wanted, int(query.newest), *after))
        seen = [stored for stored in parse(queue, reply, True) if stored.message.id not in given]
        given.update([stored.message.id for stored in seen] if query.state in moving else [])
        async for page in in_pages(seen):
            yield page
        left = None if left is None else left - len(seen)
        if reply[0] == 1 or left == 0:
            return
        after = tuple(cast("list[bytes | int]", reply[0]))
        count = count_at_once(seen)


def count_at_once(seen: Sequence[StoredMessage]) -> int:
    """Return how many messages to read next: not more than a page holds, estimated from the last messages."""
    size = sum(len(stored.message.body) for stored in seen) // max(1, len(seen))
    return max(1, min(_BATCH, PAGE_BYTES // max(1, size)))


def _start(query: Query) -> tuple[Argument, ...]:
    """Return where a query begins, as arguments of the script `look`.

    Raises:
        UsageError: `after` is not a position.
    """
    place = place_of(query.after)
    if place is None:
        return ("e", "", "", "") if query.state is State.READY else ()
    number, text = place
    if query.state is not State.READY:
        return format_number(number), encode_text(text)
    kind, *rest = text.split("~")
    if kind not in {"l", "s"} or len(rest) != 2 or (number >= 0) != bool(rest[0]) or number > _MOST_ROWS:
        raise bad_position(query.after or "")
    return kind, (format_number(number) if rest[0] else ""), *map(encode_text, rest)


async def find(pool: ConnectionPool, queue: str, ids: Sequence[str], parse: Parse) -> list[StoredMessage]:
    """Return messages by their ids."""
    unique = list(dict.fromkeys(map(encode_text, ids)))
    found: list[StoredMessage] = []
    first = 0
    while True:
        batch = unique[first : first + _BATCH]
        reply = await read_rows(pool, "look", queue, ("id", *batch))
        found += parse(queue, reply, False)
        # An answer with large bodies has fewer messages.
        first += len(batch) if reply[0] == 1 else cast("list[int]", reply[0])[0]
        if first >= len(unique):
            return found


async def held_until(pool: ConnectionPool, queue: str, message_id: str) -> float | None:
    """Return the Unix seconds until which a hold keeps an id taken. None: there is no hold, or it has ended."""
    slot = queue_slot(queue)
    score = await pool.command(slot, "ZSCORE", queue_key(queue, "holds"), encode_text(message_id))
    if score is None:
        return None
    end = float(cast("bytes", score)) / 1e6
    seconds, microseconds = cast("list[bytes]", await pool.command(slot, "TIME"))
    return end if end > int(seconds) + int(microseconds) / 1e6 else None


async def key_holder(pool: ConnectionPool, queue: str, key: str) -> str | None:
    """Return the id of the message that has a key of a queue. None: the key is free."""
    field = key.encode(errors="surrogateescape")
    found = await pool.command(queue_slot(queue), "HGET", queue_key(queue, "keys"), field)
    return None if found is None else cast("bytes", found).decode(errors="surrogateescape")


def format_number(number: float) -> str:
    """Format a number of `place_of` for a script."""
    return f"{number:.0f}"


def parse_stored(queue: str, reply: Sequence[Reply], positions: bool) -> Iterator[StoredMessage]:
    """Parse an answer of `look`: [1, then for each message: id, value, state, place, claim, error]."""
    rows = cast("Sequence[bytes]", reply)
    for at in range(1, len(rows), 6):
        name, value, state_value, place, claim, error = rows[at : at + 6]
        message_id, state = name.decode(), State(state_value.decode())
        when = 0.0 if state is State.READY else float(place) / 1e6
        try:
            message = decode(queue, message_id, value)
        except BackendError:
            # The message is shown as it is, so that it can be seen and removed.
            message = Message(id=message_id, queue=queue, body=value)
        position = _position(state, message_id, place.decode()) if positions else None
        yield make_stored(message, state, when, claim, error, position)


def make_stored(
    message: Message, state: State, when: float, claim: bytes, error: bytes, position: str | None
) -> StoredMessage:
    """Make a stored message. `when` is the time that orders its state, in seconds. 0: no time."""
    return StoredMessage(
        message=message,
        state=state,
        due_at=when if state is State.DELAYED else None,
        expires_at=when or None if state is State.LEASED else None,
        finished_at=when if state in {State.DONE, State.FAILED} else None,
        holder=claim.decode().partition(" ")[2].rpartition("/")[0] or None,
        error=error.decode(errors="replace") or None,
        position=position,
    )


def _position(state: State, message_id: str, place: str) -> str:
    if state is not State.READY:
        return position_of((int(float(place)), message_id))
    kind, number, rest = place.split("~", 2)
    return position_of((int(number or -1), f"{kind}~{rest}"))
