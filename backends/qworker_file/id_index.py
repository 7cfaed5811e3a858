"""The ids that publishers chose: a message with such an id has a second link in names/, named by the id alone.

`link` never overwrites, so of two publishes of one id only one makes the link (`id_reservation`). A link that is the
last one is free: its message is gone. Other links prove nothing, because a backup can have made them: `id_place` finds
the message. Only a process with the lock of names/ removes a link, because between the check and the removal another
publish could have taken the id.
"""

from __future__ import annotations

import asyncio
import fcntl
import os

from qworker.kit.files import find_inode, has_entry, list_names, try_unlink
from qworker.kit.opening import open_directory, open_entry
from qworker_file.holds import has_ended
from qworker_file.id_place import Located
from qworker_file.layout import QueueDir
from qworker_file.names import index_name, place_name
from qworker_file.replace import finish_replacing
from qworker_file.unique_keys import free_key, is_key_left

__all__ = ["LOCK_PAUSE", "clean_up_index", "free_link", "is_any_in_progress", "lock_index", "remove_id", "unlock"]

# Seconds until another attempt to have what another process has.
LOCK_PAUSE = 0.002


def _try_lock(files: QueueDir) -> int | None:
    """Lock the index between processes and return a descriptor for `_unlock`, or None while another process has it."""
    fd = open_directory(".", files.names)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def unlock(fd: int) -> None:
    """Unlock and close. The lock ends even if a child was forked in the meantime."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def remove_id(files: QueueDir, message_id: str, inode: int, item: str) -> None:
    """Free the id of a message that is gone, and its unique key.

    If it cannot be freed now, `clean_up_index` or the next publish of the id frees it.

    Args:
        files: The queue.
        message_id: The id.
        inode: The message's inode. A link with another inode belongs to a later message.
        item: The message's item.
    """
    fd = _try_lock(files)
    if fd is None:
        return
    try:
        if find_inode(index_name(message_id), files.names) == inode:
            free_key(files, item)
            free_link(files, message_id)
    finally:
        unlock(fd)


def free_link(files: QueueDir, message_id: str) -> None:
    """Remove the record and the link of an id. The caller has the lock of names/."""
    # The link is the last: a record without a link is removed by the clean-up.
    try_unlink(place_name(message_id), files.names)
    try_unlink(index_name(message_id), files.names)


async def clean_up_index(files: QueueDir, now: float) -> int:
    """Free ids whose message is gone and return their number. Those that a backup keeps are freed by a publish.

    Args:
        files: The queue.
        now: Unix seconds, by the store's clock. Holds that have ended are removed.
    """
    names = frozenset(await list_names(files.names))
    count = 0
    # In this order, an id is freed before the key that names it.
    for name in sorted(names):
        kind, _, key = name.partition("-")
        if not _is_left(files, kind, key, now) or (kind in {"at", "unique"} and f"id-{key}" in names):
            continue
        fd = _try_lock(files)
        if fd is None:
            return count
        try:
            if not _is_left(files, kind, key, now):
                continue
            if kind in {"swap", "next"}:
                finish_replacing(files, f"id-{key}")
                # A `next` without a `swap` is another program's.
                try_unlink(name, files.names)
            elif kind in {"hold", "key"}:
                try_unlink(name, files.names)
            else:
                try_unlink(f"unique-{key}", files.names)
                try_unlink(f"at-{key}", files.names)
                count += try_unlink(f"id-{key}", files.names)
        finally:
            unlock(fd)
    return count


def _is_left(files: QueueDir, kind: str, key: str, now: float) -> bool:
    """Return whether a link is the last one of its file, a record or a key has no link, or a hold has ended."""
    if kind == "hold":
        return has_ended(files, f"hold-{key}", now)
    if kind == "key":
        return is_key_left(files, f"key-{key}")
    if kind in {"swap", "next"}:
        # Its publisher died, if no other process has the lock.
        return True
    if kind in {"at", "unique"}:
        return not has_entry(f"id-{key}", files.names)
    if kind != "id":
        return False
    try:
        return os.stat(f"id-{key}", dir_fd=files.names, follow_symlinks=False).st_nlink == 1
    except FileNotFoundError:
        return False


async def lock_index(files: QueueDir) -> int:
    """Lock the given ids between processes; it is held for microseconds, and for one listing."""
    while (fd := _try_lock(files)) is None:
        await asyncio.sleep(LOCK_PAUSE)
    return fd


def is_any_in_progress(files: QueueDir, located: Located) -> bool:
    """Return whether a living process publishes one of the ids now. Files of dead ones are removed."""
    found = False
    for place in located.places.values():
        if place.directory == "tmp":
            if _is_locked(files, place.name):
                found = True
            else:
                # Its publisher died before it was visible.
                try_unlink(place.name, files.tmp)
    return found


def _is_locked(files: QueueDir, name: str) -> bool:
    try:
        fd = open_entry(name, os.O_RDONLY, files.tmp)
    except FileNotFoundError:
        # It was renamed at this moment: check again.
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
