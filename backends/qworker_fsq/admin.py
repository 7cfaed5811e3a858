"""The changes that users make to stored messages: requeue, remove, pause, and delete a queue."""

from __future__ import annotations

import os
import secrets

from qworker.kit.directory.admin import remove_queue, remove_selected
from qworker.kit.directory.browser import MessageFile
from qworker.kit.files import has_entry, link_file, remove_entry
from qworker.message import Selection, State
from qworker_fsq.browse import FsqBrowser
from qworker_fsq.item_file import reason_name
from qworker_fsq.layout import QueueDir, queue_path
from qworker_fsq.names import InvalidItemName, parse, with_tries
from qworker_fsq.open_queue import OpenQueue
from qworker_fsq.store import Store

__all__ = ["delete_queue", "pause", "remove", "requeue", "resume"]


async def requeue(store: Store, browser: FsqBrowser, selection: Selection) -> int:
    """Move failed items back to queue/ with tries 0 and return their number.

    Raises:
        OSError: One cannot be moved.
    """
    queue, files = browser.queue, browser.files
    chosen = await browser.select(selection, State.FAILED)
    queue.release_finished()
    moved = [name for file in chosen if (name := _requeue_one(files, file.name)) is not None]
    if moved:
        await store.commit({files.fail, files.queue})
        queue.added(moved, returned=True)
        store.notify(queue, trigger=True)
    return len(moved)


def _requeue_one(files: QueueDir, name: str) -> str | None:
    target = name
    try:
        parse(name, files.constants)
        target = with_tries(name, 0, files.constants)
    except InvalidItemName:
        # It fails again, with its reason, unless a person renames it.
        pass
    try:
        # A link never replaces another file.
        link_file(name, target, files.fail, files.queue)
        os.unlink(name, dir_fd=files.fail)
        os.unlink(reason_name(name), dir_fd=files.fail)
    except FileNotFoundError:
        # Another requeue was faster, or the item had no reason.
        return target if has_entry(target, files.queue) else None
    except (FileExistsError, PermissionError):
        # It is queued again already, or it is a directory, which is not a message.
        return None
    return target


async def remove(store: Store, browser: FsqBrowser, selection: Selection) -> int:
    """Remove messages and return their number.

    Raises:
        OSError: One cannot be removed.
    """

    def remove_file(file: MessageFile) -> bool:
        if not remove_entry(file.name, file.directory):
            return False
        browser.queue.lose(file.name)
        if file.state is State.FAILED:
            remove_entry(reason_name(file.name), file.directory)
        return True

    removed = await remove_selected(browser, selection, remove_file)
    await store.commit({file.directory for file in removed})
    return len(removed)


async def pause(store: Store, queue: OpenQueue) -> None:
    """Create the file `down`.

    Raises:
        OSError: It cannot be created.
    """
    queue.files.down()
    await store.commit({queue.files.base})


async def resume(store: Store, queue: OpenQueue) -> None:
    """Remove the file `down`.

    Raises:
        OSError: It cannot be removed.
    """
    queue.files.up()
    await store.commit({queue.files.base})
    store.notify(queue, trigger=True)


async def delete_queue(store: Store, queue: str) -> None:
    """Delete a queue with all of its messages. With a host, delete its sub-queue.

    Raises:
        OSError: It cannot be deleted.
    """
    path = queue_path(queue, store.options.host, store.options.constants)
    parent, last = os.path.split(path)
    store.being_deleted.add(queue)
    try:
        if await remove_queue(path, os.path.join(parent, f".{last}{secrets.token_hex(4)}"), store.root):
            await store.commit({store.root})
        store.drop_deleted(queue)
    finally:
        store.being_deleted.discard(queue)
