"""The ids that publishers chose: a message with such an id has a second link in names/, named by the id alone.

`link` never overwrites, so of two publishes of one id only one makes the link. A link that is the last one is free: its
message is gone. Other links prove nothing, because a backup can have made them: `id_place` finds the message. Only a
process with the lock of names/ removes a link, because between the check and the removal another publish could have
taken the id.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Sequence

from qworker.kit.files import find_inode, has_entry, link_file, list_names, try_unlink
from qworker.kit.opening import open_directory, open_entry
from qworker_file.holds import has_ended, is_held
from qworker_file.id_place import Located, Place, is_unchanged, locate, read_status, record_place, recorded_place
from qworker_file.layout import QueueDir
from qworker_file.loads import staged_files
from qworker_file.names import index_name, may_lack_link, parse_delay, parse_id, parse_lease, place_name
from qworker_file.publish_plan import Plan

__all__ = ["clean_up_index", "remove_id", "reserve_ids"]

_LOCK_PAUSE = 0.002


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


def _unlock(fd: int) -> None:
    """Unlock and close. The lock ends even if a child was forked in the meantime."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def remove_id(files: QueueDir, message_id: str, inode: int) -> None:
    """Free the id of a message that is gone.

    If it cannot be freed now, `clean_up_index` or the next publish of the id frees it.

    Args:
        files: The queue.
        message_id: The id.
        inode: The message's inode. A link with another inode belongs to a later message.
    """
    fd = _try_lock(files)
    if fd is None:
        return
    try:
        if find_inode(index_name(message_id), files.names) == inode:
            _free(files, message_id)
    finally:
        _unlock(fd)


def _free(files: QueueDir, message_id: str) -> None:
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
    for name in names:
        kind, _, key = name.partition("-")
        if not _is_left(files, kind, key, now) or (kind == "at" and f"id-{key}" in names):
            continue
        fd = _try_lock(files)
        if fd is None:
            return count
        try:
            if not _is_left(files, kind, key, now):
                continue
            if kind == "hold":
                try_unlink(name, files.names)
            else:
                try_unlink(f"at-{key}", files.names)
                count += try_unlink(f"id-{key}", files.names)
        finally:
            _unlock(fd)
    return count


def _is_left(files: QueueDir, kind: str, key: str, now: float) -> bool:
    """Return whether a link is the last one of its file, a record has no link, or a hold has ended."""
    if kind == "hold":
        return has_ended(files, f"hold-{key}", now)
    if kind == "at":
        return not has_entry(f"id-{key}", files.names)
    if kind != "id":
        return False
    try:
        return os.stat(f"id-{key}", dir_fd=files.names, follow_symlinks=False).st_nlink == 1
    except FileNotFoundError:
        return False


# -- reserving ids ---------------------------------------------------------------------------------------------------


async def reserve_ids(files: QueueDir, plans: Sequence[Plan], now: float) -> set[str]:
    """Give each message with a given id its second link in names/, and return the ids that are stored or held.

    Args:
        files: The queue.
        plans: The messages.
        now: Unix seconds, by the store's clock.

    Raises:
        OSError: An id cannot be reserved.
    """
    waiting: dict[str, Plan] = {plan.given_id: plan for plan in plans if plan.given_id is not None}
    stored: set[str] = set()
    located = Located({}, {})
    unlinked = frozenset(message_id for message_id in waiting if may_lack_link(message_id))
    is_listed = not unlinked
    while waiting:
        fd = await _lock_index(files)
        try:
            if not is_listed:
                stored |= await _ids_stored(files, unlinked)
                is_listed = True
            left = {i: p for i, p in waiting.items() if not _reserve_one(files, i, p, stored, located, now)}
        finally:
            _unlock(fd)
        if left:
            # The lock is not held meanwhile: it may list.
            located = await locate(files, left)
            if _is_any_in_progress(files, located):
                # Another publish of the same id either stores a message or leaves nothing.
                await asyncio.sleep(_LOCK_PAUSE)
        waiting = left
    return stored


def _reserve_one(files: QueueDir, message_id: str, plan: Plan, stored: set[str], located: Located, now: float) -> bool:
    """Reserve one id, under the lock of names/. False: it must be located first, or is published now."""
    status = read_status(files, message_id)
    if status is not None and status.st_nlink > 1:
        place = recorded_place(files, message_id, status.st_ino) or located.places.get(message_id)
        if place is not None and place.directory != "tmp":
            stored.add(message_id)
            return True
        if not is_unchanged(located.gone.get(message_id), status):
            return False
    if status is not None:
        _free(files, message_id)
    if message_id in stored:
        return True
    if is_held(files, message_id, now):
        stored.add(message_id)
        return True
    index = index_name(message_id)
    try:
        link_file(plan.temporary, index, files.tmp, files.names)
    except OSError:
        # A lost reply: the link exists although an error was reported.
        if find_inode(index, files.names) != os.fstat(plan.fd).st_ino:
            raise
    record_place(files, message_id, Place("delay" if plan.delayed else "queue", plan.name))
    return True


def _is_any_in_progress(files: QueueDir, located: Located) -> bool:
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


async def _lock_index(files: QueueDir) -> int:
    """Lock the given ids between processes; it is held for microseconds, and for one listing."""
    while (fd := _try_lock(files)) is None:
        await asyncio.sleep(_LOCK_PAUSE)
    return fd


async def _ids_stored(files: QueueDir, wanted: frozenset[str]) -> set[str]:
    """Find the ids that are stored by a publisher that did not choose them, by listing every state."""
    found: set[str] = set()
    # A load that cannot be read, which its window reports, does not keep other ids from being stored.
    async for staged in staged_files(files.base, local_time=False, on_trouble=lambda _path, _reason: None):
        found.update([parse_id(file.item) or "" for file in staged])
    for name in await list_names(files.queue):
        found.add(parse_id(name) or "")
    for name in await list_names(files.delay):
        delayed = parse_delay(name)
        found.add((parse_id(delayed[1]) if delayed else None) or "")
    for name in await list_names(files.lease):
        leased = parse_lease(name)
        found.add((parse_id(leased[0]) if leased else None) or "")
    for directory in (files.fail, files.done):
        for name in await list_names(directory):
            found.add(parse_id(name) or "")
    return found & wanted


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
