"""Removing messages and whole queues of a store in a directory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from typing import Any

from qworker.kit.directory.browser import MessageFile, QueueBrowser
from qworker.kit.files import remove_whole_tree
from qworker.kit.threads import BlockingCall, run_in_thread
from qworker.message import Selection

__all__ = ["remove_queue", "remove_selected"]

# Names changed between two turns of the loop; about 2 ms of work.
_SLICE = 100


async def remove_selected(
    browser: QueueBrowser[Any], selection: Selection, remove: Callable[[MessageFile], bool]
) -> list[MessageFile]:
    """Remove the selected messages and return those that were removed.

    Args:
        browser: Reads the queue.
        selection: The messages.
        remove: Removes one file; False if it is gone.

    Raises:
        OSError: One cannot be removed.
    """
    removed = await _remove_each(await browser.select(selection), remove)
    if selection.ids is not None:
        # Twice, because a listing misses files that are moved in the meantime.
        left = frozenset(selection.ids).difference(map(browser.message_id, removed))
        if left:
            removed += await _remove_each([file async for file in browser.matching(left)], remove)
    return removed


async def _remove_each(files: Iterable[MessageFile], remove: Callable[[MessageFile], bool]) -> list[MessageFile]:
    removed: list[MessageFile] = []
    for number, file in enumerate(files):
        if remove(file):
            removed.append(file)
        if number % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
    return removed


async def remove_queue(path: str, hidden: str, root: int) -> bool:
    """Hide a queue, then remove everything in it.

    Args:
        path: Where the queue is, under the root.
        hidden: Where it is hidden: no other queue has this name.
        root: The descriptor of the root.

    Returns:
        False if another process has removed it.
    """
    try:
        os.rename(path, hidden, src_dir_fd=root, dst_dir_fd=root)
    except FileNotFoundError:
        return False
    await run_in_thread(BlockingCall.DELETE, remove_whole_tree, hidden, root)
    return True
