"""Holds: the symlink `names/hold-<hash>` keeps an id taken until the time that is its text, also without a message.

The item carries the end of the hold, and its first lease makes the symlink. If the publish made it, a publisher that
dies before its message is visible would leave a hold without a message. If the ack made it, a worker that dies after
the ack would leave a message without a hold, and its id would be stored and run again.
"""

from __future__ import annotations

import errno
import os

from qworker.kit.store_errors import FULL
from qworker_file.id_place import item_at, locate, replace_link
from qworker_file.layout import QueueDir
from qworker_file.names import given_id, hold_end_ms, hold_name, may_lack_link

__all__ = ["held_until", "is_held", "keep_hold", "read_end_ms"]


def keep_hold(files: QueueDir, item: str, now: float) -> None:
    """Store the hold of a leased item, if it has one that has not ended. Idempotent.

    Args:
        files: The queue.
        item: The item.
        now: Unix seconds, by the store's clock.

    Raises:
        OSError: It cannot be stored.
    """
    end_ms = hold_end_ms(item)
    if end_ms is None or end_ms <= now * 1000:
        return
    message_id = given_id(item)
    assert message_id is not None, item
    target = hold_name(message_id)
    if (read_end_ms(files, target) or 0) >= end_ms:
        return
    try:
        replace_link(files, str(end_ms), target)
    except OSError as error:
        # It must be possible to drain a full disk. The next lease stores it, and while the message exists, its id is
        # taken anyway.
        if error.errno not in FULL:
            raise


def is_held(files: QueueDir, message_id: str, now: float) -> bool:
    """Return whether an id is held, by the store's clock."""
    return (read_end_ms(files, hold_name(message_id)) or 0) > now * 1000


async def held_until(files: QueueDir, message_id: str, now: float) -> float | None:
    """Return the Unix seconds until which an id is held. None: there is no hold, or it has ended.

    A message that was not leased yet has its hold in its name.
    """
    ends = [read_end_ms(files, hold_name(message_id))]
    if not may_lack_link(message_id):
        place = (await locate(files, [message_id])).places.get(message_id)
        ends.append(None if place is None else hold_end_ms(item_at(place) or ""))
    end = max([end_ms / 1000 for end_ms in ends if end_ms is not None], default=0.0)
    return end if end > now else None


def read_end_ms(files: QueueDir, name: str) -> int | None:
    """Return the end of the hold with a name in names/, in Unix milliseconds; None if it is not a hold."""
    try:
        text = os.readlink(name, dir_fd=files.names)
    except OSError as error:
        # Another program's file can have its name.
        if error.errno in {errno.ENOENT, errno.EINVAL}:
            return None
        raise
    return int(text) if text.isascii() and text.isdigit() else None
