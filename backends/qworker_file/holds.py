"""Holds: the symlink `names/hold-<hash>` keeps an id taken until the time that is its text, also without a message.

The item carries the end of the hold, and its first lease makes the symlink. If the publish made it, a publisher that
dies before its message is visible would leave a hold without a message. If the ack made it, a worker that dies after
the ack would leave a message without a hold, and its id would be stored and run again.

A hold that was freed while its message is stored has the text `-` and its end: no lease makes it again. For releases
that do not know this text, there is no hold.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence

from qworker.kit.files import remove_entry, try_unlink
from qworker.kit.store_errors import FULL
from qworker_file.id_place import item_at, locate, make_link, replace_link
from qworker_file.layout import QueueDir
from qworker_file.names import given_id, hold_end_ms, hold_name, may_lack_link

__all__ = ["free_holds", "has_ended", "held_until", "is_held", "keep_hold"]


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
    try:
        # Each step leaves what `free_holds` has written in the meantime.
        while abs(_read_number(files.names, target)) < end_ms and not make_link(files, str(end_ms), target):
            _remove_shorter(files, end_ms, target)
    except OSError as error:
        # It must be possible to drain a full disk. The next lease stores it, and while the message exists, its id is
        # taken anyway.
        if error.errno not in FULL:
            raise


def _remove_shorter(files: QueueDir, end_ms: int, target: str) -> None:
    """Remove the hold of an earlier message with this id.

    It is moved away first, because only then it does not change. A process that dies in between leaves no hold: the
    next lease makes it, and the message has its id anyway.
    """
    moved = f"{target}.{secrets.token_hex(4)}"
    try:
        os.rename(target, moved, src_dir_fd=files.names, dst_dir_fd=files.tmp)
    except FileNotFoundError:
        return
    number = _read_number(files.tmp, moved)
    remove_entry(moved, files.tmp)
    if abs(number) >= end_ms:
        replace_link(files, str(number), target)


def is_held(files: QueueDir, message_id: str, now: float) -> bool:
    """Return whether an id is held, by the store's clock."""
    return _read_number(files.names, hold_name(message_id)) > now * 1000


async def free_holds(files: QueueDir, ids: Sequence[str]) -> bool:
    """Free the holds of ids, also those that the first leases of their messages would make.

    Returns:
        Whether names/ has changed.

    Raises:
        OSError: One cannot be freed.
    """
    places = (await locate(files, ids)).places
    changed = False
    for message_id in ids:
        end_ms = hold_end_ms(item_at(places[message_id]) or "") if message_id in places else None
        if end_ms is None:
            changed = try_unlink(hold_name(message_id), files.names) or changed
        else:
            replace_link(files, f"-{end_ms}", hold_name(message_id))
            changed = True
    return changed


async def held_until(files: QueueDir, message_id: str, now: float) -> float | None:
    """Return the Unix seconds until which an id is held. None: there is no hold, or it has ended.

    A message that was not leased yet has its hold in its name.
    """
    stored = _read_number(files.names, hold_name(message_id))
    waiting: int | None = None
    if not may_lack_link(message_id):
        place = (await locate(files, [message_id])).places.get(message_id)
        waiting = None if place is None else hold_end_ms(item_at(place) or "")
    if waiting is not None and waiting <= abs(stored):
        # It is stored, or was freed.
        waiting = None
    end = max(stored, waiting or 0) / 1000
    return end if end > now else None


def has_ended(files: QueueDir, name: str, now: float) -> bool:
    """Return whether an entry of names/ is a hold whose end has passed, by the store's clock. Then nothing needs it."""
    number = _read_number(files.names, name)
    return number != 0 and abs(number) <= now * 1000


def _read_number(directory: int, name: str) -> int:
    """Return the end of a hold, in Unix milliseconds: negative if it was freed, 0 if absent."""
    try:
        text = os.readlink(name, dir_fd=directory)
    except OSError as error:
        # Another program's file can have its name.
        if error.errno in {errno.ENOENT, errno.EINVAL}:
            return 0
        raise
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() else 0
