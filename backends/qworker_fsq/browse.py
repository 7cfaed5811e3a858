"""Reading the messages of a queue of `fsq:`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping

from qworker.clock import Clock
from qworker.kit.browse import Place
from qworker.kit.directory.browser import MessageFile, QueueBrowser
from qworker.kit.files import name_slices
from qworker.kit.linux import lock_holders
from qworker.kit.parts import HashShare
from qworker.message import Message, State
from qworker_fsq.item_file import read_due, read_original_id, reason_name
from qworker_fsq.layout import QueueDir
from qworker_fsq.names import InvalidItemName, message_id, parse
from qworker_fsq.open_queue import OpenQueue

__all__ = ["FsqBrowser"]

# Files read between two turns of the loop.
_SLICE = 300
_QUEUED = (State.READY, State.DELAYED, State.LEASED)


class FsqBrowser(QueueBrowser[QueueDir]):
    """Reads one queue.

    Args:
        queue: The queue.
        clock: The store's clock.
        file_system: The name of the file system.
    """

    def __init__(self, queue: OpenQueue, clock: Clock, file_system: str) -> None:
        super().__init__(queue.files, clock)
        self.queue = queue
        self._file_system = file_system
        self._constants = queue.files.constants

    async def slices(self, *states: State) -> AsyncIterator[list[MessageFile]]:
        """List queue/ once for all states whose items are there."""
        queued = [state for state in states if state in _QUEUED]
        for state in states:
            if state in _QUEUED:
                if state is queued[0]:
                    async for files in self._queued(frozenset(queued)):
                        yield files
                continue
            directory = self.files.done if state is State.DONE else self.files.fail
            async for names in name_slices(directory):
                yield [MessageFile(state, directory, name, name) for name in names if name[0] != "."]

    async def _queued(self, states: frozenset[State]) -> AsyncIterator[list[MessageFile]]:
        """List queue/, in lists of one state each."""
        holders = lock_holders(self.files.queue, self._file_system)
        now = self._clock.time()
        async for names in name_slices(self.files.queue):
            found: dict[State, list[MessageFile]] = {state: [] for state in states}
            for number, name in enumerate(names):
                file = None if name[0] == "." else self._queued_file(name, holders, now)
                if file is not None and file.state in states:
                    found[file.state].append(file)
                if number % _SLICE == _SLICE - 1:
                    await asyncio.sleep(0)
            for files in found.values():
                yield files

    def _queued_file(self, name: str, holders: Mapping[int, int], now: float) -> MessageFile | None:
        directory = self.files.queue
        lease = self.queue.own.get(name)
        if lease is not None:
            return MessageFile(State.LEASED, directory, name, name, lease.expires_at, f"pid {os.getpid()}")
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
        pid = holders.get(status.st_ino)
        if pid is not None:
            return MessageFile(State.LEASED, directory, name, name, 0.0, f"pid {pid}")
        due = read_due(status)
        if due is None or due <= now:
            return MessageFile(State.READY, directory, name, name)
        return MessageFile(State.DELAYED, directory, name, name, due)

    async def list_share(self, state: State, share: HashShare) -> list[MessageFile]:
        """Choose files by the ids."""
        return [file for file in await self.list_files(state) if share.has(self.message_id(file))]

    def message_id(self, file: MessageFile) -> str:
        """Read the id in the name, or make a digest of it."""
        return message_id(file.item, self._constants)

    def finished_at(self, status: os.stat_result) -> float:
        """Return the change time: a rename changes nothing else."""
        return status.st_ctime

    def reason_name(self, item: str) -> str:
        """Return the name of a hidden file in fail/."""
        return reason_name(item)

    def _place(self, file: MessageFile) -> Place:
        if file.state is State.READY:
            return 0, file.item
        # An item that another process holds has no expiry, so it comes last.
        return (file.at or sys.float_info.max), file.item

    def _enqueued_at(self, item: str) -> float | None:
        try:
            return parse(item, self._constants).enqueued_at
        except InvalidItemName:
            return None

    def _read_original_id(self, fd: int) -> str | None:
        return read_original_id(fd)

    def _make_message(self, file: MessageFile, status: os.stat_result, body: bytes, original_id: str | None) -> Message:
        try:
            item = parse(file.item, self._constants)
            tries, enqueued_at, argv = item.tries, item.enqueued_at, item.arguments
        except InvalidItemName:
            tries, enqueued_at, argv = 0, status.st_mtime, (file.item,)
        return Message(
            id=self.message_id(file),
            queue=self.files.name,
            body=body,
            tries=tries,
            enqueued_at=enqueued_at,
            argv=argv,
            original_id=original_id,
        )
