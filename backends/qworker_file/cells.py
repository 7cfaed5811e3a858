"""The operations on the cells of one queue.

A group is a directory, `cells/<group>`, made at the first put. A put "only if absent" is a `link`, and the end of an
empty group is an `rmdir`: the kernel lets one of several processes do either. Every other put, a rename, and every
delete first read the stored cell. So they have the lock of the group's directory in the meantime. If the directory was
removed before it was locked, or while it is, it is made and locked again.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import assert_never

from qworker.cell import CELLS_PER_PAGE, Cell, CellOp, CellReply
from qworker.clock import Clock
from qworker.kit.files import list_names, lock_file, remove_empty, try_unlink
from qworker.kit.opening import open_directory
from qworker_file.cell_file import CELLS, CellFile, StoredCell, file_name, name_of, read_cell, remove_if_expired
from qworker_file.cell_listing import MOST_LISTINGS, CellListing
from qworker_file.layout import QueueDir, open_part
from qworker_file.store import Store

__all__ = ["carry_out", "locked_version", "open_group", "queues_with_group", "read_version", "reply_without_cells"]

# Seconds on the loop before other tasks run.
_TURN = 0.002
# Bytes of the values in one page.
_PAGE_BYTES = 1 << 20
# Files read between two turns of the loop; about 2 ms of work.
_SLICE = 100
# Groups of which one cell is remembered.
_MOST_SEEN = 10_000
# Attempts to remove a group in which another process puts cells that expire at once.
_CLOSINGS = 10


async def carry_out(store: Store, queue: str, ops: Sequence[CellOp]) -> list[CellReply]:
    """Carry out operations. A put creates the queue.

    Raises:
        OSError: The store failed.
    """
    creates = any(op.do == "put" for op in ops)
    while True:
        opened = store.get_open(queue)
        if opened is None and not creates and not any(_may_have(store.root, queue, op.cell.group) for op in ops):
            # Most queues have no cells, and need not be opened for that.
            return [reply_without_cells(op) for op in ops]
        if opened is None:
            opened = store.get_or_create(queue) if creates else store.get(queue)
        if opened is None:
            return [reply_without_cells(op) for op in ops]
        replies: list[CellReply] = []
        try:
            with opened.files:
                for first in range(0, len(ops), store.files_at_once):
                    replies += await _Batch(store, opened.files).run(ops[first : first + store.files_at_once])
            return replies
        except FileNotFoundError:
            if opened.files.is_in_place(store.root):
                raise
            # The queue was deleted in the meantime, and its cells with it.
            store.drop_deleted(queue)


def reply_without_cells(op: CellOp) -> CellReply:
    """Return the reply to an operation other than a put in a queue or a group without cells."""
    is_close = op.do == "close"
    return CellReply(is_close or op.do == "list", empty=is_close or op.do == "list")


async def queues_with_group(root: int, queues: Sequence[str], group: str) -> list[str]:
    """Return the queues that have the directory of a group, or that cannot be looked at."""
    found: list[str] = []
    for number, queue in enumerate(queues):
        if _may_have(root, queue, group):
            found.append(queue)
        if number % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
    return found


def _may_have(root: int, queue: str, group: str) -> bool:
    """Return whether a queue has the directory of a group; without a group, that of all groups."""
    try:
        os.stat(f"{queue}/{CELLS}/{file_name(group)}" if group else f"{queue}/{CELLS}", dir_fd=root)
    except FileNotFoundError:
        return False
    except OSError:
        # To open the queue says what is wrong.
        return True
    return True


def open_group(files: QueueDir, group: str) -> int | None:
    """Open the directory of a group, or return None if it does not exist."""
    try:
        cells = open_directory(CELLS, files.base)
    except FileNotFoundError:
        return None
    try:
        return open_directory(file_name(group), cells)
    except FileNotFoundError:
        return None
    finally:
        os.close(cells)


def read_version(files: QueueDir, group: str, name: str, now: float) -> str:
    """Return the version of a cell; empty if it is absent.

    Raises:
        OSError: It cannot be read.
    """
    fd = open_group(files, group)
    if fd is None:
        return ""
    try:
        stored = read_cell(file_name(name), fd)
    finally:
        os.close(fd)
    return stored.version if stored is not None and stored.is_live(now) else ""


@asynccontextmanager
async def locked_version(files: QueueDir, group: str, name: str, clock: Clock) -> AsyncGenerator[str]:
    """Yield the version of a cell, empty if it is absent. No process replaces or deletes it until the end of the block.

    Raises:
        OSError: It cannot be read.
    """
    while (fd := open_group(files, group)) is not None:
        try:
            await lock_file(fd)
            if os.fstat(fd).st_nlink == 0:
                # It was removed, and may have been made again.
                continue
            stored = read_cell(file_name(name), fd)
            yield stored.version if stored is not None and stored.is_live(clock.time()) else ""
            return
        finally:
            # As in a batch: the lock ends even if a child was forked in the meantime.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)
    yield ""


class _Batch:
    """The operations of one call.

    Args:
        store: The store.
        files: The queue.
    """

    def __init__(self, store: Store, files: QueueDir) -> None:
        self._store = store
        self._files = files
        # The open groups by name; all descriptors, which stay open until they are synced; the group that is locked.
        self._groups: dict[str, int] = {}
        self._fds: list[int] = []
        self._locked: int | None = None
        self._changed: set[int] = set()
        self._turn_ends = time.perf_counter() + _TURN

    async def run(self, ops: Sequence[CellOp]) -> list[CellReply]:
        """Carry out the operations in their order, and write everything to the disk.

        Raises:
            OSError: The store failed. The first operations may have happened.
        """
        written: dict[int, CellFile] = {}
        replies: list[CellReply] = []
        commit = self._store.group_commit
        try:
            now = self._store.clock.time()
            for number, op in enumerate(ops):
                if op.do == "put":
                    written[number] = CellFile(self._files, op.cell, now)
                    await self._give_way()
            if commit is not None and written:
                await commit.data([one.fd for one in written.values()])
            for number, op in enumerate(ops):
                replies.append(await self._carry_out(op, written.get(number)))
                if op.do == "put":
                    # An iteration of this process gets its own puts.
                    self._store.cell_listings.pop((self._files.name, op.cell.group), None)
                await self._give_way()
            self._unlock()
            if commit is not None and self._changed:
                await commit.directories(self._changed)
            return replies
        finally:
            self._unlock()
            for one in written.values():
                one.close()
            for fd in self._fds:
                os.close(fd)

    async def _give_way(self) -> None:
        """Let other tasks of the loop run."""
        if time.perf_counter() > self._turn_ends:
            # Another task may block this loop for long. The next operation locks again.
            self._unlock()
            await asyncio.sleep(0)
            self._turn_ends = time.perf_counter() + _TURN

    async def _carry_out(self, op: CellOp, written: CellFile | None) -> CellReply:
        now, cell = self._store.clock.time(), op.cell
        if written is not None:
            if op.only == "" and self._put_first(written):
                return CellReply(True, written.cell)
            return await self._put(op, written, now)
        match op.do:
            case "get":
                fd = self._open(cell.group)
                stored = None if fd is None else _read_live(file_name(cell.name), fd, now)
                return reply_without_cells(op) if stored is None else CellReply(True, _to_cell(stored, cell, now))
            case "delete":
                return await self._delete(op, now)
            case "list":
                return await (self._list(cell, now) if cell.group else self._list_groups(cell.name, now))
            case "close":
                is_empty = await self._close(cell.group, now)
                return CellReply(is_empty, empty=is_empty)
            case "put":
                raise AssertionError("a put is written first")
        assert_never(op.do)

    # -- changes -----------------------------------------------------------------------------------------------------

    def _put_first(self, written: CellFile) -> bool:
        """Put a cell whose name is free; False if it is taken."""
        while True:
            group = self._make(written.cell.group)
            try:
                is_put = written.put_first(group)
                # Also if it is taken: the caller is told so, and its put may not be on the disk.
                self._changed.add(group)
                return is_put
            except FileNotFoundError:
                if not self._was_removed(written.cell.group):
                    raise

    async def _put(self, op: CellOp, written: CellFile, now: float) -> CellReply:
        """Put a cell under the lock of its group."""
        cell = op.cell
        while True:
            group = await self._lock(cell.group, make=True)
            assert group is not None
            self._changed.add(group)
            stored = _read_live(file_name(cell.name), group, now)
            if _is_refused(op, stored) or (stored is not None and cell.rank < stored.rank):
                return CellReply(False, None if stored is None else _to_cell(stored, cell, now))
            try:
                # Only puts without the lock make names: one could make this one now. What has a name keeps it.
                if stored is not None or written.has_entry(group):
                    written.replace(group)
                elif not written.put_first(group):
                    continue
            except FileNotFoundError:
                if not self._was_removed(cell.group):
                    raise
                continue
            return CellReply(True, written.cell)

    async def _delete(self, op: CellOp, now: float) -> CellReply:
        group = await self._lock(op.cell.group)
        if group is None:
            return reply_without_cells(op)
        name = file_name(op.cell.name)
        stored = _read_live(name, group, now)
        if stored is None or _is_refused(op, stored):
            return CellReply(False, None if stored is None else _to_cell(stored, op.cell, now))
        try_unlink(name, group)
        self._changed.add(group)
        return CellReply(True)

    async def _close(self, name: str, now: float) -> bool:
        """Remove a group without cells. Return whether it has none."""
        for _ in range(_CLOSINGS):
            cells = self._open_cells()
            if cells is None:
                return True
            if remove_empty(file_name(name), cells):
                if name in self._groups:
                    # This batch may have removed its last cell.
                    self._changed.add(cells)
                return True
            # Mostly there is a cell, which is found without the lock.
            group = self._open(name)
            if group is not None and await self._has_live(name, group, now):
                return False
            group = await self._lock(name)
            if group is None:
                return True
            if await self._has_live(name, group, now):
                return False
            if not await remove_expired(group, now):
                # Others have put files or directories there that are no cells.
                return True
            # Not for the other operations of the batch: the group is removed now.
            self._unlock()
        return True

    async def _has_live(self, name: str, group: int, now: float) -> bool:
        """Return whether a group has a cell: mostly the one that was found last time, which costs no listing."""
        seen, key = self._store.live_cells, (self._files.name, name)
        if key in seen and _read_live(seen[key], group, now) is not None:
            return True
        found = await first_live(group, now)
        if found is None:
            seen.pop(key, None)
            return False
        if len(seen) >= _MOST_SEEN:
            seen.clear()
        seen[key] = found[0]
        return True

    # -- lists -------------------------------------------------------------------------------------------------------

    async def _list(self, after: Cell, now: float) -> CellReply:
        # Without the lock, a listing could miss cells that are replaced in the meantime.
        group = await self._lock(after.group)
        if group is None:
            return CellReply(True, empty=True)
        key = (self._files.name, after.group)
        listing = self._store.cell_listings.pop(key, None)
        if listing is None or not listing.continues(after.name):
            listing = CellListing(await _names_after(after.name, group), time.monotonic())
        names = listing.names
        page: list[Cell] = []
        size = 0
        while names:
            name, file = names[-1]
            stored = _read_live(file, group, now)
            if stored is not None:
                if len(page) == CELLS_PER_PAGE or (page and size + len(stored.value) > _PAGE_BYTES):
                    listing.after = page[-1].name
                    if len(self._store.cell_listings) >= MOST_LISTINGS:
                        self._store.cell_listings.clear()
                    self._store.cell_listings[key] = listing
                    return CellReply(True, cells=page)
                page.append(stored.to_cell(after.group, name, now))
                size += len(stored.value)
            names.pop()
        return CellReply(True, cells=page, empty=True)

    async def _list_groups(self, after: str, now: float) -> CellReply:
        cells = self._open_cells()
        if cells is None:
            return CellReply(True, empty=True)
        found: list[str] = []
        for file in await list_names(cells):
            name = name_of(file)
            if name is not None and (not name or name > after):
                live = await _first_live_in(cells, file, now)
                name = name or (live.group if live is not None else "")
                if live is not None and name > after:
                    found.append(name)
        found.sort()
        page = [Cell(name, "") for name in found[:CELLS_PER_PAGE]]
        return CellReply(True, cells=page, empty=len(found) <= CELLS_PER_PAGE)

    # -- directories -------------------------------------------------------------------------------------------------

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _open_cells(self) -> int | None:
        try:
            return self._keep(open_directory(CELLS, self._files.base))
        except FileNotFoundError:
            return None

    def _open(self, name: str) -> int | None:
        """Open a group, if it exists."""
        if name in self._groups and not self._was_removed(name):
            return self._groups[name]
        group = open_group(self._files, name)
        if group is not None:
            self._groups[name] = self._keep(group)
        return group

    def _make(self, name: str) -> int:
        """Open a group, which is made if it does not exist."""
        group = self._open(name)
        if group is not None:
            return group
        base, mode = self._files.base, self._files.directory_mode
        while True:
            try:
                cells = self._keep(open_part(base, CELLS, mode))
                group = self._groups[name] = self._keep(open_part(cells, file_name(name), mode))
            except FileNotFoundError:
                # One of them was removed as soon as it was made.
                if os.fstat(base).st_nlink == 0:
                    raise
                continue
            self._changed |= {base, cells}
            return group

    async def _lock(self, name: str, *, make: bool = False) -> int | None:
        """Return a group with its lock, or None if it does not exist. The lock of any other group ends."""
        while True:
            group = self._make(name) if make else self._open(name)
            if group is None:
                return None
            if self._locked != group:
                self._unlock()
                await lock_file(group)
                self._locked = group
            if not self._was_removed(name):
                return group

    def _unlock(self) -> None:
        if self._locked is not None:
            # The lock ends even if a child was forked in the meantime.
            fcntl.flock(self._locked, fcntl.LOCK_UN)
            self._locked = None

    def _was_removed(self, name: str) -> bool:
        """Return whether the directory of a group was removed. Then it is not used any more."""
        group = self._groups[name]
        if os.fstat(group).st_nlink > 0:
            return False
        if self._locked == group:
            self._unlock()
        del self._groups[name]
        self._changed.discard(group)
        return True


def _is_refused(op: CellOp, stored: StoredCell | None) -> bool:
    """Return whether the condition of an operation does not hold."""
    return op.only is not None and op.only != ("" if stored is None else stored.version)


def _to_cell(stored: StoredCell, cell: Cell, now: float) -> Cell:
    return stored.to_cell(cell.group, cell.name, now)


def _read_live(file: str, group: int, now: float) -> StoredCell | None:
    stored = read_cell(file, group)
    return stored if stored is not None and stored.is_live(now) else None


# -- groups as a whole -----------------------------------------------------------------------------------------------


async def _names_after(after: str, group: int) -> list[tuple[str, str]]:
    """Return the names of cells that follow a name, each with that of its file, the first one last."""
    names: list[tuple[str, str]] = []
    for file in await list_names(group):
        name = name_of(file)
        if name == "":
            stored = read_cell(file, group)
            name = None if stored is None else stored.name
        if name and name > after:
            names.append((name, file))
    names.sort(reverse=True)
    return names


async def first_live(group: int, now: float) -> tuple[str, StoredCell] | None:
    """Return a cell of a group that has not expired, with the name of its file, or None if there is none."""
    # A descriptor of its own, whose position no other listing shares.
    fd = open_directory(".", group)
    try:
        with os.scandir(fd) as entries:
            for number, entry in enumerate(entries):
                if name_of(entry.name) is not None and (stored := _read_live(entry.name, group, now)) is not None:
                    return entry.name, stored
                if number % _SLICE == _SLICE - 1:
                    await asyncio.sleep(0)
    finally:
        os.close(fd)
    return None


async def _first_live_in(cells: int, file: str, now: float) -> StoredCell | None:
    """Return a cell of the group with this directory that has not expired."""
    try:
        group = open_directory(file, cells)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = await first_live(group, now)
        return None if found is None else found[1]
    finally:
        os.close(group)


async def remove_expired(group: int, now: float) -> int:
    """Remove the expired cells of a group whose lock the caller has, and return their number."""
    return sum([remove_if_expired(file, group, now) for file in await list_names(group)])
