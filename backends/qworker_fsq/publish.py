"""Enqueueing as fsq(7) says: make the item in tmp/, put it on the disk, link it into queue/, and unlink it in tmp/.

A batch is put on the disk together, and its names are durable when the publish returns. A link never replaces anything: where a name is
taken, the item gets another.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import itertools
import os
import socket
import time
from collections.abc import Mapping, Sequence

import msgspec

from qworker.clock import Clock
from qworker.errors import PublishUncertain, StorageFull
from qworker.kit.files import CREATE, FULL, GroupCommit, files_at_once, link_file, list_names, write_all
from qworker.message import Draft
from qworker_fsq.environment import Constants, group_id, user_id
from qworker_fsq.layout import QueueDir
from qworker_fsq.lease import mark_due, write_origin
from qworker_fsq.names import construct, message_id

__all__ = ["Publisher", "Stamps"]

# Seconds on the loop before others get their turn.
_TURN = 0.002
# Messages that were enqueued this near to one another, in another store, keep the order in which they come.
_SAME_TIME_NS = 1_000_000
_serial = itertools.count()


class Stamps:
    """The first four fields of names: a time, in local time, and this process.

    Args:
        constants: how a time is written.
    """

    def __init__(self, constants: Constants) -> None:
        self._timefmt = constants.timefmt
        self._second = -1
        self._stamp = ""
        self.hostname = socket.gethostname()

    def of(self, ns: int, origin: str | None = None) -> tuple[str, str, str, str]:
        """Timestamp, entropy, pid and hostname for a moment in nanoseconds.

        What comes from another store has a number of its id there instead of the pid, by which it is known when it is moved twice.
        """
        second, rest = divmod(ns, 1_000_000_000)
        if second != self._second:
            self._second = second
            self._stamp = time.strftime(self._timefmt, time.localtime(second))
        pid = os.getpid() if origin is None else _number_of(origin)
        return self._stamp, f"{rest:09d}", str(pid), self.hostname


class _Plan(msgspec.Struct, gc=False):
    """One item on its way."""

    draft: Draft
    ns: int
    name: str
    temporary: str = ""
    due: float | None = None
    fd: int = -1


class Publisher:
    """Enqueues to any queue of one store.

    Args:
        clock: the store's clock.
        constants: the standard's.
        commit: None: what is stored survives the process, and no more.
    """

    def __init__(self, clock: Clock, constants: Constants, commit: GroupCommit | None) -> None:
        self._clock = clock
        self._constants = constants
        self._commit = commit
        self._stamps = Stamps(constants)
        self._last_ns = 0
        self._last_given_ns = 0
        self._batch = files_at_once()
        self._owner = (user_id(constants.item_user), group_id(constants.item_group))

    async def publish(self, files: QueueDir, drafts: Sequence[Draft]) -> list[str]:
        """Store messages; their names in queue/, in order.

        Raises:
            NotSupported: a draft cannot be stored; none was.
            StorageFull, PublishUncertain, BackendError: see `Backend.publish`.
            FileNotFoundError: the queue was deleted.
        """
        now = self._clock.time()
        every = plans = [self._plan(draft, now) for draft in drafts]
        if any(draft.original_id is not None for draft in drafts):
            stored = await _names_stored(files)
            plans = [plan for plan in every if not _is_stored(plan, stored)]
        for start in range(0, len(plans), self._batch):
            await self._store(files, plans[start : start + self._batch])
        return [plan.name for plan in every]

    # -- names -------------------------------------------------------------------------------------------------------

    def _plan(self, draft: Draft, now: float) -> _Plan:
        if draft.enqueued_at is None:
            ns = self._last_ns = max(int(now * 1e9), self._last_ns + 1)
        else:
            ns = self._given_ns(draft.enqueued_at)
        due = now + draft.delay if draft.due_at is None else draft.due_at
        return _Plan(draft, ns, self._name(draft, ns), due=due if due > now else None)

    def _given_ns(self, moment: float) -> int:
        """A time that was given, to the microsecond, and unlike any other's: an id is a time, and the order is that of ids."""
        base = round(moment * 1e6) * 1000
        if base <= self._last_given_ns < base + _SAME_TIME_NS:
            self._last_given_ns += 1
        else:
            self._last_given_ns = base + next(_serial) % 1000
        return self._last_given_ns

    def _name(self, draft: Draft, ns: int) -> str:
        return construct((*self._stamps.of(ns, draft.original_id), str(draft.tries), *draft.argv), self._constants)

    def _rename(self, plan: _Plan) -> None:
        """Another name for an item whose own is taken."""
        plan.ns += 1
        plan.name = self._name(plan.draft, plan.ns)

    # -- one commit --------------------------------------------------------------------------------------------------

    async def _store(self, files: QueueDir, plans: list[_Plan]) -> None:
        try:
            await self._write(files, plans)
            if self._commit is not None:
                await self._sync_bodies(self._commit, plans)
            await self._show(files, plans)
        finally:
            self._close(files, plans)
        if self._commit is not None and plans:
            try:
                await self._commit.directories({files.queue})
            except OSError as error:
                raise PublishUncertain(
                    f"the message may or may not be stored: the disk could not store the file names: {error.strerror}: publish it again with the same id"
                ) from error

    async def _write(self, files: QueueDir, plans: list[_Plan]) -> None:
        keep_open = self._commit is not None
        turn_ends = time.perf_counter() + _TURN
        for plan in plans:
            self._write_one(files, plan)
            if not keep_open:
                fd, plan.fd = plan.fd, -1
                os.close(fd)
            if time.perf_counter() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = time.perf_counter() + _TURN

    def _write_one(self, files: QueueDir, plan: _Plan) -> None:
        while True:
            try:
                plan.fd = os.open(plan.name, CREATE, self._constants.item_mode, dir_fd=files.tmp)
                break
            except FileExistsError:
                self._rename(plan)
        plan.temporary = plan.name
        if self._owner != (-1, -1):
            os.fchown(plan.fd, *self._owner)
        if plan.draft.body:
            write_all(plan.fd, plan.draft.body)
        if plan.draft.original_id is not None:
            write_origin(plan.fd, plan.draft.original_id)
        if plan.due is not None:
            mark_due(plan.fd, plan.due)

    @staticmethod
    async def _sync_bodies(commit: GroupCommit, plans: list[_Plan]) -> None:
        try:
            await commit.data([plan.fd for plan in plans])
        except OSError as error:
            if error.errno in FULL:
                raise StorageFull(f"cannot publish: {error.strerror}: free some space") from error
            raise PublishUncertain(f"cannot publish: the disk could not store the data: {error.strerror}") from error

    async def _show(self, files: QueueDir, plans: list[_Plan]) -> None:
        turn_ends = time.perf_counter() + _TURN
        for plan in plans:
            while not self._link(files, plan):
                self._rename(plan)
            os.unlink(plan.temporary, dir_fd=files.tmp)
            plan.temporary = ""
            if time.perf_counter() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = time.perf_counter() + _TURN

    @staticmethod
    def _link(files: QueueDir, plan: _Plan) -> bool:
        """Show an item; False when somebody else's has its name."""
        try:
            link_file(plan.temporary, plan.name, files.tmp, files.queue)
        except OSError as error:
            # A lost reply: the link is there all the same.
            if _same_file(files, plan):
                return True
            if error.errno == errno.EEXIST:
                return False
            raise
        return True

    @staticmethod
    def _close(files: QueueDir, plans: list[_Plan]) -> None:
        """Let go of the files, and take back what nobody has seen."""
        for plan in plans:
            if plan.fd >= 0:
                fd, plan.fd = plan.fd, -1
                os.close(fd)
            if plan.temporary:
                try:
                    os.unlink(plan.temporary, dir_fd=files.tmp)
                except FileNotFoundError:
                    # The queue was deleted.
                    pass


def _same_file(files: QueueDir, plan: _Plan) -> bool:
    try:
        shown = os.stat(plan.name, dir_fd=files.queue, follow_symlinks=False)
        made = os.stat(plan.temporary, dir_fd=files.tmp, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return shown.st_ino == made.st_ino


async def _names_stored(files: QueueDir) -> dict[str, str]:
    """The names of all items in any state, by their pids: only what is moved here needs them."""
    found: dict[str, str] = {}
    for directory in (files.queue, files.done, files.fail):
        for name in await list_names(directory):
            fields = name[1:].split(name[0], 3)
            if len(fields) == 4:
                found[fields[2]] = name
    return found


def _is_stored(plan: _Plan, stored: Mapping[str, str]) -> bool:
    """Whether what is moved here is here already; then by that name."""
    if plan.draft.original_id is None:
        return False
    name = stored.get(str(_number_of(plan.draft.original_id)))
    if name is None:
        return False
    plan.name = name
    return True


def _number_of(origin: str) -> int:
    """A number of an id of another store; far beyond any pid."""
    return (1 << 48) + int.from_bytes(hashlib.sha256(origin.encode()).digest()[:6])


def ids(names: Sequence[str], constants: Constants) -> list[str]:
    """The messages' ids of items' names."""
    return [message_id(name, constants) for name in names]
