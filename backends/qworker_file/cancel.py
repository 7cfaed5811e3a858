"""Cancelling: a waiting or leased item moves to fail/ by one rename, to a name that says so.

The reason is written first, under a name that no other change of the message uses. So a process that dies before the
rename has cancelled nothing, and what a holder does at the same moment is either done before the rename, which then
finds no file, or is refused after it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping

from qworker.cell import Cell
from qworker.kit.directory.browser import MessageFile
from qworker.kit.directory.reasons import write_reason
from qworker.kit.files import has_entry, try_unlink
from qworker.kit.find import stamp
from qworker.kit.planted import rename_file
from qworker.message import Cancelled, Selection, State
from qworker_file.browse import FileBrowser
from qworker_file.cells import locked_version
from qworker_file.foreign import give_own_name
from qworker_file.id_place import Place, record_move
from qworker_file.names import MAX_OWN, byte_length, cancelled_name, is_cancelled_name, parse_item, reason_name
from qworker_file.store import Store

__all__ = ["cancel"]

# Names changed between two turns of the loop; about 2 ms of work.
_SLICE = 50
# A message that moves between two directories just as they are searched is not missed more often than this.
_LOOKS = 4
# A message that is seen and has moved is searched for again, at most so often.
_MOST_LOOKS = 100
_FINISHED = frozenset({State.DONE, State.FAILED})


async def cancel(
    store: Store, browser: FileBrowser, selection: Selection, reason: str, only: Mapping[str, Cell]
) -> list[Cancelled]:
    """Move messages to fail/ and return what was found.

    Raises:
        OSError: One cannot be moved. A repetition continues.
    """
    call = _Cancel(store, browser, reason, only)
    try:
        if selection.ids is not None:
            return await call.by_ids(selection.ids)
        assert selection.state is not None
        return await call.by_state(selection.state)
    finally:
        await call.finish()


class _Cancel:
    """One call of `cancel`."""

    def __init__(self, store: Store, browser: FileBrowser, reason: str, only: Mapping[str, Cell]) -> None:
        self._store = store
        self._browser = browser
        self._files = browser.files
        self._reason = reason
        self._only = only
        # The messages whose cell has another version by now.
        self._refused: set[str] = set()
        # The descriptors of the reasons that were written, by their names, and the directories that changed.
        self._reasons: dict[str, int] = {}
        self._changed: set[int] = set()

    async def by_ids(self, ids: Iterable[str]) -> list[Cancelled]:
        """Cancel the messages with these ids, each once, however often they move meanwhile."""
        wanted = dict.fromkeys(ids)
        found: dict[str, Cancelled] = {}
        for look in range(_MOST_LOOKS if wanted else 0):
            before = stamp(self._files.message_directories)
            left = frozenset(wanted) - found.keys() - self._refused
            if not left:
                break
            has_moved = False
            async for file in self._matching(left):
                one = await self._cancel_file(file)
                if one is not None:
                    found.setdefault(one.id, one)
                elif self._browser.message_id(file) not in self._refused:
                    has_moved = True
            if not has_moved and self._was_enough(look, before, self._files.message_directories):
                break
        return [found[message_id] for message_id in wanted if message_id in found]

    def _was_enough(self, look: int, before: tuple[int, ...] | None, directories: Iterable[int]) -> bool:
        """Return whether a listing has seen every message that stayed in its directory."""
        return look >= _LOOKS - 1 or (before is not None and before == stamp(directories))

    async def _matching(self, ids: frozenset[str]) -> AsyncIterator[MessageFile]:
        left = set(ids)
        async for file in self._browser.matching(ids):
            yield file
            left.discard(self._browser.message_id(file))
            if not left:
                return

    async def by_state(self, state: State) -> list[Cancelled]:
        """Cancel the messages in a state.

        Each is renamed away from the name that it had in this state, so that none is cancelled in another one.
        """
        found: list[Cancelled] = []
        # Leases that had another name by the time of their step: they may only be extended.
        moved: set[str] = set()
        for look in range(_MOST_LOOKS):
            before = stamp((self._files.lease,))
            files = await self._browser.list_files(state)
            if look >= _LOOKS:
                # A lease is not missed by so many listings. The others were taken during this call.
                files = [file for file in files if file.item in moved]
            moved.clear()
            for number, file in enumerate(files):
                one = await self._cancel_file(file)
                if one is not None:
                    found.append(one)
                else:
                    moved.add(file.item)
                if number % _SLICE == _SLICE - 1:
                    await asyncio.sleep(0)
            # Only a lease gets another name and stays in its state.
            if state is not State.LEASED or (not moved and self._was_enough(look, before, (self._files.lease,))):
                break
        return found

    async def _cancel_file(self, file: MessageFile) -> Cancelled | None:
        """Cancel one message. Return None if it has moved, or if its cell has changed."""
        message_id = self._browser.message_id(file)
        cell = self._only.get(message_id)
        if cell is None or file.state in _FINISHED:
            return self._cancel_unconditionally(file, message_id)
        # A cell is deleted under this lock: after its deletion there is no rename.
        async with locked_version(self._files, cell.group, cell.name, self._store.clock) as version:
            if version == cell.version:
                return self._cancel_unconditionally(file, message_id)
        self._refused.add(message_id)
        return None

    def _cancel_unconditionally(self, file: MessageFile, message_id: str) -> Cancelled | None:
        """Cancel one message. Return None if it has moved."""
        if file.state is State.DELAYED and file.at <= self._store.clock.time():
            # It is ready by now.
            return None
        try:
            if file.state in _FINISHED:
                status = os.stat(file.name, dir_fd=file.directory, follow_symlinks=False)
                return Cancelled(message_id, file.state, status.st_mtime_ns, is_cancelled_name(file.name))
            token = self._move(file)
        except FileNotFoundError:
            return None
        if file.state is State.LEASED:
            self._browser.queue.lose([file.item], cancelled=True)
        return Cancelled(message_id, file.state, token)

    def _move(self, file: MessageFile) -> int:
        """Move a file to fail/, and return a token that no lease of it has exceeded.

        Raises:
            FileNotFoundError: It has moved.
        """
        files, item = self._files, file.item
        if not has_entry(file.name, file.directory):
            raise FileNotFoundError(file.name)
        parsed = parse_item(item)
        if parsed is None or byte_length(item) > MAX_OWN:
            # The name of another program's file can be that of an older one in fail/, or too long for the mark.
            item, _ = give_own_name(files, item, parsed)
        name = cancelled_name(item)
        self._write_reason(reason_name(name))
        # A staged file of a sealed load has no link.
        if file.directory != files.base:
            record_move(files, item, Place("fail", name), self._place(file))
        rename_file(file.name, name, file.directory, files.fail)
        self._changed |= {file.directory, files.fail}
        return self._set_finished(name)

    def _place(self, file: MessageFile) -> Place:
        files = self._files
        directory = {files.queue: "queue", files.delay: "delay", files.lease: "lease"}[file.directory]
        return Place(directory, file.name)

    def _write_reason(self, name: str) -> None:
        if name not in self._reasons:
            self._reasons[name] = write_reason(self._files.fail, name, self._reason, mode=self._files.item_mode)

    def _set_finished(self, name: str) -> int:
        """Set the time at which a file finished.

        It is not before the token of its last lease, even if the worker that took that lease has not set it yet: it
        read its clock before its rename, and so before this rename.
        """
        moment = int(self._store.clock.time() * 1e9)
        try:
            status = os.stat(name, dir_fd=self._files.fail, follow_symlinks=False)
            moment = max(moment, status.st_mtime_ns + 1)
            os.utime(name, ns=(moment, moment), dir_fd=self._files.fail, follow_symlinks=False)
        except (FileNotFoundError, PermissionError):
            # It was requeued in the meantime; or it is another user's file, which is shown with its present time.
            pass
        return moment

    async def finish(self) -> None:
        """Make the moves durable, and remove the reasons of messages that were not cancelled."""
        files = self._files
        reasons, self._reasons = self._reasons, {}
        try:
            for name in reasons:
                if not has_entry(name[1 : -len(".reason")], files.fail):
                    try_unlink(name, files.fail)
            if self._changed:
                await self._store.commit(self._changed, list(reasons.values()))
        finally:
            for fd in reasons.values():
                os.close(fd)
