"""Unique keys: the symlink `names/key-<hash>` names the message that has a key.

A key counts only while that message waits or is leased, which its link, its place and its name show (`id_place`). So no
step has to free a key, and no death can leave one taken: a symlink whose message is not visible, has finished, or is
gone is void, and the next publish replaces it. A key that is free from the first lease on is freed by the rename of
that lease, which changes the mark in the item's name. Only a process with the lock of names/ lets a message have a key,
so two messages never have it.
"""

from __future__ import annotations

import errno
import os
from enum import Enum
from urllib.parse import quote, unquote

from qworker.kit.files import try_unlink
from qworker.message import Draft
from qworker.unique import Unique
from qworker_file.app_keys import free_app_key
from qworker_file.id_place import Located, is_unchanged, item_at, locate, read_status, recorded_place, replace_link
from qworker_file.layout import QueueDir
from qworker_file.names import (
    given_id,
    has_key,
    is_app_mark,
    is_started_mark,
    key_link_name,
    key_mark,
    key_record_name,
    mark_in,
    without_letters,
)

__all__ = [
    "Holder",
    "find_holder",
    "free_key",
    "give_key",
    "holder_of",
    "is_key_left",
    "keep_key",
    "key_of",
    "make_mark",
    "record_key",
    "state_of",
]


class Holder(Enum):
    """Whether a message has a key.

    VOID: it does not. LIVE: it does. UNSURE: it must be located first, or is published now.
    """

    VOID = "void"
    LIVE = "live"
    UNSURE = "unsure"


def make_mark(draft: Draft) -> str:
    """Return the mark of a draft's unique key in its item's name; empty without a key."""
    if draft.unique_key is None:
        return ""
    unique = draft.unique or Unique()
    return key_mark(draft.unique_key, started=unique.until == "started", app=unique.scope == "app")


def keep_key(files: QueueDir, message_id: str, key: str, mark: str) -> None:
    """Let a message have a key. The caller has the lock of names/, and the key is free.

    Raises:
        OSError: It cannot be stored.
    """
    record_key(files, message_id, key)
    give_key(files, message_id, mark)


def record_key(files: QueueDir, message_id: str, key: str) -> None:
    """Record the key of a message.

    Raises:
        OSError: It cannot be stored.
    """
    replace_link(files, quote(key, safe="", errors="surrogateescape"), key_record_name(message_id))


def give_key(files: QueueDir, message_id: str, mark: str) -> None:
    """Do the same for a message whose key is recorded.

    Raises:
        OSError: It cannot be stored.
    """
    replace_link(files, message_id, key_link_name(mark))


def holder_of(files: QueueDir, mark: str) -> str | None:
    """Return the id in the symlink of a key. The message may not have the key any more."""
    return _read(files, key_link_name(mark))


async def find_holder(files: QueueDir, key: str) -> str | None:
    """Return the id of the message that has a key, or that is published with it now. None: the key is free.

    Raises:
        OSError: A directory cannot be read.
    """
    mark = key_mark(key, started=False)
    holder = holder_of(files, mark)
    if holder is None:
        return None
    state = state_of(files, holder, mark, await locate(files, [holder]))
    return None if state is Holder.VOID else holder


def state_of(files: QueueDir, holder: str, mark: str, located: Located) -> Holder:
    """Return whether a message has the key of a mark. The caller has the lock of names/.

    Args:
        files: The queue.
        holder: The id of the message.
        mark: The mark of the key.
        located: What was found of it before, without the lock. A lease that was found has the key: it had it while the
            caller's call was under way.
    """
    status = read_status(files, holder)
    if status is None or status.st_nlink == 1:
        return Holder.VOID
    place = recorded_place(files, holder, status.st_ino) or located.places.get(holder)
    if place is None:
        return Holder.VOID if is_unchanged(located.gone.get(holder), status) else Holder.UNSURE
    if place.directory == "tmp":
        # Without this record its publisher has not taken the key yet, and will find that another message has it.
        recorded = _read(files, key_record_name(holder))
        own = "" if recorded is None else key_mark(_to_key(recorded), started=False, app=is_app_mark(mark))
        return Holder.UNSURE if without_letters(own) == without_letters(mark) else Holder.VOID
    has_ended = place.directory in {"fail", "done"}
    return Holder.LIVE if not has_ended and has_key(item_at(place) or "", mark) else Holder.VOID


def key_of(files: QueueDir, item: str) -> tuple[str | None, Unique | None]:
    """Return the unique key of an item and its options; None without one."""
    if (mark := mark_in(item)) is None:
        return None, None
    key = _read(files, key_record_name(given_id(item) or ""))
    unique = Unique(until="started" if is_started_mark(mark) else "done", scope="app" if is_app_mark(mark) else "queue")
    return None if key is None else _to_key(key), unique.stored()


def free_key(files: QueueDir, item: str) -> None:
    """Remove the symlinks of an item's key, whose message is gone. The caller has the lock of names/."""
    mark = mark_in(item)
    message_id = given_id(item)
    if mark is None or message_id is None:
        return
    if is_app_mark(mark):
        free_app_key(files, message_id, mark)
    elif holder_of(files, mark) == message_id:
        try_unlink(key_link_name(mark), files.names)
    try_unlink(key_record_name(message_id), files.names)


def is_key_left(files: QueueDir, name: str) -> bool:
    """Return whether the message that a symlink of a key names is gone."""
    holder = _read(files, name)
    if holder is None:
        return False
    status = read_status(files, holder)
    return status is None or status.st_nlink == 1


def _to_key(recorded: str) -> str:
    return unquote(recorded, errors="surrogateescape")


def _read(files: QueueDir, name: str) -> str | None:
    try:
        return os.readlink(name, dir_fd=files.names)
    except OSError as error:
        # Another program's file can have its name.
        if error.errno in {errno.ENOENT, errno.EINVAL}:
            return None
        raise
