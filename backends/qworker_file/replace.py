"""A new file takes the place of the waiting one with its unique key, and its id: two files exchange their names.

One step decides: the exchange of the two names. Until then the old file waits, from then on the new one. If a worker,
a cancel or another program takes the old file first, the step finds no file, and the new one is stored on its own. So
no death of a process loses both files, or leaves both. The steps have the lock of names/:

    the new file moves from tmp/ to `names/swap-<hash>`
    it gets its second link, `names/next-<hash>`
    the old file gets the new name, in queue/ or delay/
    `names/swap-<hash>` and that name exchange their files                  the new file waits
    `names/next-<hash>` replaces `names/id-<hash>`
    `names/swap-<hash>` is removed

If the publisher dies, the next process with the lock continues (`finish_replacing`): if `swap` is the file of `id`, the
exchange has happened. A worker may have opened the old file before the exchange and rename the new one after it: the
names of such items have another form than those of one file only, so each worker compares the files (`lease.claim`).
An fsq program does not compare them, so the old file in queue/ is locked, and one in delay/ does not come to queue/.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum

from qworker.errors import PublishUncertain
from qworker.kit.files import find_inode, has_entry, link_file, try_unlink
from qworker.kit.linux import exchange_names
from qworker.kit.opening import open_entry, try_lock
from qworker.kit.store_errors import store_error
from qworker_file.id_place import Place, record_place
from qworker_file.layout import QueueDir
from qworker_file.names import index_name, next_name, swap_name
from qworker_file.publish_plan import Plan

__all__ = ["Replaced", "finish_replacing", "replace_waiting"]


class Replaced(Enum):
    """What came of an attempt.

    YES: the new file waits. MOVED: the old one is not there any more. BUSY: another program has locked it.
    """

    YES = "yes"
    MOVED = "moved"
    BUSY = "busy"


def replace_waiting(files: QueueDir, plan: Plan, holder: str, place: Place) -> Replaced:
    """Let a new file take the place of a waiting one. The caller has the lock of names/.

    Args:
        files: The queue.
        plan: The new message. Its file is on the disk, and its name is that of the holder's new item.
        holder: The id of both.
        place: Where the waiting one is.

    Raises:
        OSError: It waits as before.
        PublishUncertain: It is replaced, but the links in names/ are not changed yet.
    """
    try:
        fd = open_entry(place.name, os.O_RDONLY, place.descriptor(files))
    except FileNotFoundError:
        return Replaced.MOVED
    try:
        # In queue/, an fsq program works under the lock, and a worker is about to lease it. In delay/ it means nothing.
        if place.directory == "queue" and not try_lock(fd):
            return Replaced.BUSY
        if os.fstat(fd).st_ino != find_inode(index_name(holder), files.names):
            return Replaced.MOVED
        return _replace(files, plan, holder, place)
    finally:
        os.close(fd)


def _replace(files: QueueDir, plan: Plan, holder: str, place: Place) -> Replaced:
    index, names = index_name(holder), files.names
    swap = swap_name(index)
    new = Place("delay" if plan.delayed else "queue", plan.name)
    _rename(plan.temporary, swap, files.tmp, names)
    try:
        # Another program's file can have its name.
        try_unlink(next_name(index), names)
        _sure(lambda: link_file(swap, next_name(index), names, names), lambda: has_entry(next_name(index), names))
        record_place(files, holder, new, place)
        _rename(place.name, new.name, place.descriptor(files), new.descriptor(files))
        _exchange(swap, new, files, find_inode(index, names))
    except FileNotFoundError:
        # It was leased, cancelled or removed: nothing has happened.
        try_unlink(next_name(index), names)
        _rename(swap, plan.temporary, names, files.tmp)
        return Replaced.MOVED
    except OSError:
        finish_replacing(files, index)
        raise
    try:
        finish_replacing(files, index)
    except OSError as error:
        reason = store_error(error, "publish")
        raise PublishUncertain(f"the message may or may not be stored: {reason}: publish it again") from error
    return Replaced.YES


def _exchange(swap: str, new: Place, files: QueueDir, old: int | None) -> None:
    _sure(
        lambda: exchange_names(swap, new.name, files.names, new.descriptor(files)),
        lambda: find_inode(swap, files.names) == old,
    )


def finish_replacing(files: QueueDir, index: str) -> None:
    """Finish what a publisher has begun, which may have died. The caller has the lock of names/.

    Args:
        files: The queue.
        index: The `index_name` of the id.

    Raises:
        OSError: It cannot be finished.
    """
    names, swap, following = files.names, swap_name(index), next_name(index)
    found = find_inode(swap, names)
    if found is None:
        return
    if found == find_inode(index, names) and has_entry(following, names):
        _rename(following, index, names, names)
    else:
        # Either nothing was exchanged, or the link has moved already. Or another program has made `swap`.
        try_unlink(following, names)
    try_unlink(swap, names)


def _rename(name: str, target: str, source: int, destination: int) -> None:
    inode = find_inode(name, source)
    _sure(
        lambda: os.rename(name, target, src_dir_fd=source, dst_dir_fd=destination),
        lambda: inode is not None and find_inode(target, destination) == inode,
    )


def _sure(step: Callable[[], None], has_happened: Callable[[], bool]) -> None:
    """Make a step. An error that is reported although the step has happened, as by a lost reply, is ignored."""
    try:
        step()
    except OSError as error:
        if not has_happened():
            raise error from None
