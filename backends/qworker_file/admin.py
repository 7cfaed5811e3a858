"""The changes that users make to stored messages: requeue, remove, pause, and delete a queue."""

from __future__ import annotations

import asyncio
import os
import secrets

from qworker.errors import AlreadyEnqueued
from qworker.kit.directory.admin import remove_queue, remove_selected
from qworker.kit.directory.browser import MessageFile
from qworker.kit.files import close_all, find_inode, remove_entry, try_unlink
from qworker.kit.opening import create_file, open_directory
from qworker.kit.planted import rename_file
from qworker.message import Selection, State
from qworker_file.browse import FileBrowser
from qworker_file.id_index import remove_id
from qworker_file.id_place import Place, record_move
from qworker_file.names import (
    delay_name,
    given_id,
    is_cancelled_name,
    parse_item,
    plain_item,
    reason_name,
    restarted_item,
    with_tries,
)
from qworker_file.open_queue import OpenQueue
from qworker_file.report_holds import ReportHolds
from qworker_file.store import Store
from qworker_file.taken_keys import taken_key

__all__ = ["delete_queue", "make_due", "pause", "remove", "requeue", "resume"]

# Names changed between two turns of the loop; about 2 ms of work.
_SLICE = 100
# From this number of descriptors on, a commit syncs the whole file system (qworker.kit.group_commit).
_SYNC_ALL = 256


async def requeue(store: Store, browser: FileBrowser, selection: Selection) -> int:
    """Move failed items back to queue/, or to delay/ and due now, with tries 0 and return their number.

    Raises:
        AlreadyEnqueued: Another message has the unique key of one of them. The others are ready.
        OSError: One cannot be moved.
    """
    queue, files = browser.queue, browser.files
    moved: list[str] = []
    holds = ReportHolds(store)
    delayed: list[str] = []
    refused: AlreadyEnqueued | None = None
    due_ms = int(store.clock.time() * 1000)
    for number, file in enumerate(await browser.select(selection, State.FAILED)):
        # Before the move: a failure that comes after it is reported.
        await holds.free([browser.message_id(file)])
        item = plain_item(file.item)
        if parse_item(item) is not None:
            item = with_tries(restarted_item(item), 0)
        # The holder of a cancelled item may still have it locked, and a locked item is leased from delay/ only.
        place = Place("delay", delay_name(item, due_ms)) if is_cancelled_name(file.name) else Place("queue", item)
        try:
            async with taken_key(files, item, store.open_files):
                record_move(files, item, place, Place("fail", file.name))
                rename_file(file.name, place.name, files.fail, place.descriptor(files))
            (delayed if place.directory == "delay" else moved).append(place.name)
            try_unlink(reason_name(file.name), files.fail)
        except FileNotFoundError:
            # Another requeue was faster.
            pass
        except AlreadyEnqueued as error:
            refused = refused or error
        if number % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
    if moved or delayed:
        await store.commit({files.fail, *([files.queue] if moved else []), *([files.delay] if delayed else [])})
        queue.added(moved, delayed, returned=True)
        store.notify(queue)
    if refused is not None:
        raise refused
    return len(moved) + len(delayed)


async def make_due(store: Store, browser: FileBrowser, message_id: str) -> bool:
    """Make a delayed message due now, and return whether it was delayed.

    Raises:
        OSError: It cannot be renamed.
    """
    queue, files = browser.queue, browser.files
    due_ms = int(store.clock.time() * 1000)
    for file in await browser.select(Selection(ids=[message_id]), State.DELAYED):
        place = Place("delay", delay_name(file.item, due_ms))
        try:
            record_move(files, file.item, place, Place("delay", file.name))
            rename_file(file.name, place.name, files.delay, files.delay)
        except FileNotFoundError:
            # It was due at this moment.
            return False
        await store.commit({files.delay})
        queue.added([], [place.name], returned=True)
        store.notify(queue)
        return True
    return False


async def remove(store: Store, browser: FileBrowser, selection: Selection) -> int:
    """Remove messages and return their number.

    Raises:
        OSError: One cannot be removed.
    """

    def remove_file(file: MessageFile) -> bool:
        inode = find_inode(file.name, file.directory) if given_id(file.item) else None
        if not remove_entry(file.name, file.directory):
            return False
        if file.state is State.FAILED:
            try_unlink(reason_name(file.name), file.directory)
        if inode is not None:
            remove_id(browser.files, browser.message_id(file), inode, file.item)
        return True

    removed = await remove_selected(browser, selection, remove_file)
    browser.queue.lose([file.item for file in removed if file.state is State.LEASED])
    # A staged file of a load is named by its path: the directory that changed is below the queue.
    staged = _open_directories({os.path.dirname(file.name) for file in removed if "/" in file.name}, browser.files.base)
    try:
        await store.commit({file.directory for file in removed}, staged)
    finally:
        close_all(staged)
    return len(removed)


def _open_directories(paths: set[str], base: int) -> list[int]:
    """Open directories that changed: so many of them at most that one sync of the file system serves all."""
    opened: list[int] = []
    for path in sorted(paths):
        if len(opened) == _SYNC_ALL:
            break
        try:
            opened.append(open_directory(path, base))
        except FileNotFoundError:
            # A worker found it empty and removed it, and with it the names.
            continue
    return opened


async def pause(store: Store, queue: OpenQueue) -> None:
    """Create the file `down`.

    Raises:
        OSError: It cannot be created.
    """
    try:
        os.close(create_file("down", queue.files.base, queue.files.item_mode))
    except FileExistsError:
        # The queue is paused already.
        pass
    await store.commit({queue.files.base})


async def resume(store: Store, queue: OpenQueue) -> None:
    """Remove the file `down`.

    Raises:
        OSError: It cannot be removed.
    """
    try_unlink("down", queue.files.base)
    await store.commit({queue.files.base})
    store.notify(queue)


async def delete_queue(store: Store, queue: str) -> None:
    """Delete a queue with all of its messages.

    Raises:
        OSError: It cannot be deleted.
    """
    store.being_deleted.add(queue)
    try:
        if await remove_queue(queue, f".deleted-{queue}-{secrets.token_hex(4)}", store.root):
            await store.commit({store.root})
        store.drop_deleted(queue)
    finally:
        store.being_deleted.discard(queue)
