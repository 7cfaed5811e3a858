"""Making messages ready whose lease has expired or which are due."""

from __future__ import annotations

from qworker.kit.store_errors import store_errors
from qworker_sq.channel import Channel
from qworker_sq.ledger import RowKind

__all__ = ["reap_channel"]


async def reap_channel(channel: Channel) -> int:
    """Make expired and due messages ready and return their number."""
    with store_errors(f"reap {channel.topic.name}"):
        async with channel.section():
            now = channel.topic.clock.time()
            expired = channel.ledger.expired(now)
            if expired:
                channel.append([[RowKind.EXPIRE, expired]])
            count = len(expired) + channel.ledger.make_due(now)
        if count:
            channel.topic.wake()
    return count
