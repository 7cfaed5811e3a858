"""The changes that users make to stored messages: requeue, remove, pause, and delete a queue."""

from __future__ import annotations

import asyncio
import os
import secrets

from qworker.kit.directory.admin import remove_queue, remove_selected
from qworker.kit.directory.browser import MessageFile
from qworker.kit.files import find_inode, remove_entry, try_unlink
from qworker.kit.opening import create_file
from qworker.kit.planted import rename_file
from qworker.message import Selection, State
from qworker_file.browse import FileBrowser
from qworker_file.id_index import remove_id
from qworker_file.id_place import Place, record_move
from qworker_file.names import given_id, parse_item, reason_name, with_tries
from qworker_file.open_queue import OpenQueue
from qworker_file.report_holds import ReportHolds
from qworker_file.store import Store

__all__ = ["delete_queue", "pause", "remove", "requeue", "resume"]

# Names changed between two turns of the loop; about 2 ms of work.
_SLICE = 100


async def requeue(store: Store, browser: FileBrowser, selection: Selection) -> int:
    """Move failed items back to queue/ with tries 0 and return their number.

    Raises:
        OSError: One cannot be moved.
    """
    queue, files = browser.queue, browser.files
    moved: list[str] = []
    holds = ReportHolds(store)
    for number, file in enumerate(await browser.select(selection, State.FAILED)):
        # Before the move: a failure that comes after it is reported.
        await holds.free([browser.message_id(file)])
        item = file.item if parse_item(file.item) is None else with_tries(file.item, 0)
        record_move(files, item, Place("queue", item), Place("fail", file.name))
        try:
            rename_file(file.name, item, files.fail, files.queue)
            moved.append(item)
            try_unlink(reason_name(file.item), files.fail)
        except FileNotFoundError:
            # Another requeue was faster.
            pass
        if number % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
    if moved:
        await store.commit({files.fail, files.queue})
        queue.added(moved, [], returned=True)
        store.notify(queue)
    return len(moved)


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
            try_unlink(reason_name(file.item), file.directory)
        if inode is not None:
            remove_id(browser.files, browser.message_id(file), inode)
        return True

    removed = await remove_selected(browser, selection, remove_file)
    browser.queue.lose([file.item for file in removed if file.state is State.LEASED])
    await store.commit({file.directory for file in removed})
    return len(removed)


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
