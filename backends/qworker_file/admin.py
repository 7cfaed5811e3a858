"""Changing what is stored by hand: requeue, remove, purge, pauses, and the end of a queue."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterable

from qworker.files import CREATE, list_names
from qworker.message import State
from qworker_file.index import forget_index
from qworker_file.layout import QueueDir
from qworker_file.looks import Entry, entries, matching, message_id
from qworker_file.names import parse_item, reason_name, with_tries

__all__ = ["delete_queue", "pause", "purge", "remove", "requeue", "resume_queue"]

# Names changed between two turns of the loop; about 2 ms.
_SLICE = 100


async def requeue(files: QueueDir, ids: Iterable[str] | None, now: float) -> list[str]:
    """Move failed items back to queue/ with no tries; their names there.

    Raises:
        OSError: one cannot be moved.
    """
    wanted = None if ids is None else frozenset(ids)
    moved: list[str] = []
    for number, entry in enumerate(await entries(files, State.FAILED, now)):
        if wanted is None or message_id(entry.item) in wanted:
            item = entry.item if parse_item(entry.item) is None else with_tries(entry.item, 0)
            try:
                os.rename(entry.name, item, src_dir_fd=files.fail, dst_dir_fd=files.queue)
            except FileNotFoundError:
                # Another requeue was faster.
                continue
            _unlink(reason_name(entry.item), files.fail)
            moved.append(item)
        if number % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
    return moved


async def remove(files: QueueDir, ids: Iterable[str], now: Callable[[], float]) -> list[Entry]:
    """Delete messages by their ids in any state; what was deleted.

    Raises:
        OSError: one cannot be deleted.
    """
    wanted = set(ids)
    gone: list[Entry] = []
    # Twice, for a listing misses what is moved meanwhile.
    for _ in range(2):
        if not wanted:
            break
        async for entry in matching(files, frozenset(wanted), now):
            if delete_entry(files, entry):
                wanted.discard(message_id(entry.item))
                gone.append(entry)
    return gone


async def purge(files: QueueDir, state: State, now: float) -> list[Entry]:
    """Delete everything in a state; what was deleted.

    Raises:
        OSError: something cannot be deleted.
    """
    gone: list[Entry] = []
    for number, entry in enumerate(await entries(files, state, now)):
        if delete_entry(files, entry):
            gone.append(entry)
        if number % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
    return gone


def delete_entry(files: QueueDir, entry: Entry, links: int | None = None) -> bool:
    """Delete one file, of which it may be known how many links it has; False when it is gone already."""
    try:
        if links is None:
            links = os.stat(entry.name, dir_fd=entry.directory, follow_symlinks=False).st_nlink
        os.unlink(entry.name, dir_fd=entry.directory)
    except FileNotFoundError:
        return False
    except IsADirectoryError:
        # A stranger's directory that was put aside; no link in it is followed.
        shutil.rmtree(entry.name, dir_fd=entry.directory)
        links = 1
    if entry.state is State.FAILED:
        _unlink(reason_name(entry.item), files.fail)
    if links > 1:
        forget_index(files, message_id(entry.item))
    return True


def pause(files: QueueDir) -> None:
    """Put `down` there."""
    try:
        os.close(os.open("down", CREATE, files.item_mode, dir_fd=files.base))
    except FileExistsError:
        # Down already.
        return


def resume_queue(files: QueueDir) -> None:
    """Take `down` away."""
    _unlink("down", files.base)


async def delete_queue(root: int, name: str, files: QueueDir) -> None:
    """Hide a queue, then delete what is in it.

    Raises:
        OSError: it cannot be deleted.
    """
    hidden = f".deleted-{name}-{secrets.token_hex(4)}"
    try:
        os.rename(name, hidden, src_dir_fd=root, dst_dir_fd=root)
    except FileNotFoundError:
        # Another delete was faster.
        return
    for directory in (files.queue, files.lease, files.delay, files.done, files.fail, files.names, files.tmp):
        for number, entry in enumerate(await list_names(directory)):
            try:
                os.unlink(entry, dir_fd=directory)
            except IsADirectoryError:
                shutil.rmtree(entry, dir_fd=directory)
            except FileNotFoundError:
                # A holder or a publisher was faster.
                pass
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
    _remove_tree(hidden, root)


def _remove_tree(name: str, parent: int, attempts: int = 10) -> None:
    for left in reversed(range(attempts)):
        try:
            shutil.rmtree(name, dir_fd=parent)
        except OSError as error:
            # A publisher that has it open wrote once more meanwhile.
            if error.errno != errno.ENOTEMPTY or not left:
                raise
        else:
            return


def _unlink(name: str, directory: int) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        # Nothing there is what was wanted.
        pass
