"""Browsing the messages of a topic."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import cast

from qworker.kit.browse import bad_position, place_of, position_of
from qworker.kit.parts import WHOLE, bad_part
from qworker.message import Query, State, StoredMessage
from qworker_redis.browse import browse_pages, format_number, make_stored
from qworker_redis.codec import encode_text
from qworker_redis.connection import Argument
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import Reply
from qworker_redis.rfq.codec import decode_leniently
from qworker_redis.rfq.keys import decode_id

__all__ = ["browse_topic", "parse_stored"]

# A number larger than any time in microseconds and the length of any list.
_MOST = 1 << 60
# A page starts again with the next message in line if its position is not known any more.
_MOVING = frozenset({State.LEASED, State.READY})


def browse_topic(pool: ConnectionPool, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
    """Yield the messages of a state in its order. The only part contains all of them.

    If the message of `after` is not in line any more, it counts as leased: the next message in line comes first.
    """
    return browse_pages(pool, queue, query, _start, parse_stored, _MOVING)


def _start(query: Query) -> tuple[Argument, ...]:
    """Return where a query begins, as arguments of the script `look`.

    Raises:
        UsageError: `after` is not a position, or the part is not the only part.
    """
    if query.part not in {None, WHOLE}:
        raise bad_part(query.part or "")
    place = place_of(query.after)
    if place is None:
        return ()
    if not 0 <= place[0] < _MOST:
        raise bad_position(query.after or "")
    return format_number(place[0]), encode_text(place[1])


def parse_stored(queue: str, reply: Sequence[Reply], positions: bool) -> Iterator[StoredMessage]:
    """Parse an answer of `look`: [1, then for each message: id, value, state, place, claim, error]."""
    for at in range(1, len(reply), 6):
        name, value, state_value, place, claim, error = cast(
            "tuple[bytes, list[Reply], bytes, bytes | int, bytes, bytes]", tuple(reply[at : at + 6])
        )
        state, number = State(state_value.decode()), float(place)
        message = decode_leniently(queue, decode_id(name), value)
        position = position_of((int(number), message.id)) if positions else None
        yield make_stored(message, state, number / 1e6, claim, error, position)
