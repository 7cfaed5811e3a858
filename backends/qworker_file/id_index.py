"""The ids that publishers chose: a message with such an id has a second link in names/, named by the id alone.

`link` never overwrites, so of two publishes of one id only one makes the link. The number of links says whether the
message is still stored in any state: a link that is the last one is free. Only a process with the lock of names/
removes a last link, because between reading the number and the removal another publish could have taken the id.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Sequence

from qworker.kit.files import link_file, list_names, try_unlink
from qworker.kit.opening import open_directory, open_entry
from qworker_file.layout import QueueDir
from qworker_file.names import index_name, parse_delay, parse_id, parse_lease
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


def remove_id(files: QueueDir, message_id: str) -> None:
    """Free the id of a message that is gone. If it cannot be freed now, `clean_up_index` frees it later."""
    fd = _try_lock(files)
    if fd is None:
        return
    try:
        _remove_last(files, index_name(message_id))
    finally:
        _unlock(fd)


async def clean_up_index(files: QueueDir) -> int:
    """Free every id whose message is gone and return their number."""
    names = [name for name in await list_names(files.names) if name.startswith("id-")]
    count = 0
    for name in names:
        if not _is_last(files, name):
            continue
        fd = _try_lock(files)
        if fd is None:
            return count
        try:
            count += _remove_last(files, name)
        finally:
            _unlock(fd)
    return count


def _is_last(files: QueueDir, name: str) -> bool:
    try:
        return os.stat(name, dir_fd=files.names, follow_symlinks=False).st_nlink == 1
    except FileNotFoundError:
        return False


def _remove_last(files: QueueDir, name: str) -> bool:
    return _is_last(files, name) and try_unlink(name, files.names)


# -- reserving ids ---------------------------------------------------------------------------------------------------


async def reserve_ids(files: QueueDir, plans: Sequence[Plan]) -> set[str]:
    """Give each message with a given id its second link in names/, and return the ids that are stored already.

    Raises:
        OSError: An id cannot be reserved.
    """
    plans = [plan for plan in plans if plan.given_id is not None]
    stored: set[str] = set()
    waiting = list(plans)
    listed: set[str] | None = None
    while waiting:
        fd = await _lock_index(files)
        try:
            if listed is None:
                listed = await _ids_stored(files, {plan.given_id for plan in plans if plan.given_id is not None})
            waiting = _reserve_all(files, waiting, listed, stored)
        finally:
            _unlock(fd)
        if waiting:
            # Another publish of the same id is in progress. It either stores a message or leaves nothing.
            await asyncio.sleep(_LOCK_PAUSE)
    return stored


def _reserve_all(files: QueueDir, plans: list[Plan], listed: set[str], stored: set[str]) -> list[Plan]:
    return [plan for plan in plans if not _reserve_one(files, plan, listed, stored)]


def _reserve_one(files: QueueDir, plan: Plan, listed: set[str], stored: set[str]) -> bool:
    """Reserve one id, under the lock of names/. False: another process is publishing it now."""
    assert plan.given_id is not None
    index = index_name(plan.given_id)
    try:
        found = os.stat(index, dir_fd=files.names, follow_symlinks=False)
    except FileNotFoundError:
        found = None
    if found is not None and found.st_nlink > 1:
        unfinished = _unfinished(files, found.st_ino)
        if unfinished is None:
            stored.add(plan.given_id)
            return True
        if _is_locked(files, unfinished):
            return False
        # Its publisher died before it was visible.
        os.unlink(unfinished, dir_fd=files.tmp)
    if found is not None:
        os.unlink(index, dir_fd=files.names)
    if plan.given_id in listed:
        stored.add(plan.given_id)
        return True
    try:
        link_file(plan.temporary, index, files.tmp, files.names)
    except OSError:
        # A lost reply: the link exists although an error was reported.
        if os.fstat(plan.fd).st_nlink < 2:
            raise
    return True


async def _lock_index(files: QueueDir) -> int:
    """Lock the given ids between processes; it is held for microseconds, and for one listing."""
    while (fd := _try_lock(files)) is None:
        await asyncio.sleep(_LOCK_PAUSE)
    return fd


async def _ids_stored(files: QueueDir, wanted: set[str]) -> set[str]:
    """Find the ids that are stored by a publisher that did not choose them, by listing every state."""
    found: set[str] = set()
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


def _unfinished(files: QueueDir, inode: int) -> str | None:
    """Return the name of a file in tmp/, or None if it was renamed and is visible."""
    fd = open_directory(".", files.tmp)
    try:
        with os.scandir(fd) as entries:
            return next((entry.name for entry in entries if entry.inode() == inode), None)
    finally:
        os.close(fd)


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
