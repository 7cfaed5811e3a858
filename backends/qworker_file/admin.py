"""Changing what is stored by hand: requeue, remove, pauses, and the end of a queue."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence

from qworker.kit.directory.unchanged import unchanged
from qworker.kit.files import CREATE, list_names
from qworker.message import FinishedMessage, Selection, State
from qworker_file.browse import Entry, entries, matching, message_id
from qworker_file.id_index import forget_index
from qworker_file.layout import QueueDir
from qworker_file.names import parse_item, reason_name, with_tries

__all__ = ["delete_queue", "pause", "remove", "requeue", "resume_queue"]

# Names changed between two turns of the loop; about 2 ms.
_SLICE = 100


async def requeue(files: QueueDir, selection: Selection, now: float) -> list[str]:
    """Move failed items back to queue/ with no tries; return their names there.

    Raises:
        OSError: one cannot be moved.
    """
    moved: list[str] = []
    for number, entry in enumerate(await _failed(files, selection, now)):
        item = entry.item if parse_item(entry.item) is None else with_tries(entry.item, 0)
        try:
            os.rename(entry.name, item, src_dir_fd=files.fail, dst_dir_fd=files.queue)
            _unlink(reason_name(entry.item), files.fail)
            moved.append(item)
        except FileNotFoundError:
            # Another requeue was faster.
            pass
        if number % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
    return moved


async def _failed(files: QueueDir, selection: Selection, now: float) -> Iterable[Entry]:
    if selection.unchanged is not None:
        return (entry for entry, _ in _unchanged(files, selection.unchanged))
    failed = await entries(files, State.FAILED, now)
    if selection.ids is None:
        return failed
    wanted = frozenset(selection.ids)
    return [entry for entry in failed if message_id(entry.item) in wanted]


async def remove(files: QueueDir, selection: Selection, now: Callable[[], float]) -> list[Entry]:
    """Delete messages and return what was deleted.

    Raises:
        OSError: one cannot be deleted.
    """
    if selection.ids is not None:
        return await _remove_ids(files, selection.ids, now)
    if selection.unchanged is not None:
        return await _remove_each(files, _unchanged(files, selection.unchanged))
    assert selection.state is not None
    in_state = await entries(files, selection.state, now())
    return await _remove_each(files, ((entry, None) for entry in in_state))


async def _remove_ids(files: QueueDir, ids: Sequence[str], now: Callable[[], float]) -> list[Entry]:
    wanted = set(ids)
    gone: list[Entry] = []
    # Twice, for a listing misses what is moved meanwhile.
    for _ in range(2):
        if not wanted:
            break
        async for entry in matching(files, frozenset(wanted), now):
            if _remove_entry(files, entry):
                wanted.discard(message_id(entry.item))
                gone.append(entry)
    return gone


async def _remove_each(files: QueueDir, chosen: Iterable[tuple[Entry, int | None]]) -> list[Entry]:
    gone: list[Entry] = []
    for number, (entry, links) in enumerate(chosen):
        if _remove_entry(files, entry, links):
            gone.append(entry)
        if number % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
    return gone


def _unchanged(files: QueueDir, found: Iterable[FinishedMessage]) -> Iterator[tuple[Entry, int]]:
    """Those that are as they were found, and how many links each file has."""
    directories = {State.DONE: files.done, State.FAILED: files.fail}
    for state, name, status in unchanged(found, directories, lambda status: status.st_mtime):
        yield Entry(state, directories[state], name, name), status.st_nlink


def _remove_entry(files: QueueDir, entry: Entry, links: int | None = None) -> bool:
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
