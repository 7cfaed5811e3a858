"""Publishing: write into tmp/, put the data on the disk, rename into sight, put the directories on the disk, and only then reply."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import os
import time
from collections.abc import Sequence

import msgspec

from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import NotSupported, PublishUncertain, StorageFull
from qworker.kit.files import CREATE, DIRECTORY, READ, GroupCommit, files_at_once, link_file, list_names, write_all
from qworker.message import Draft
from qworker.names import check_id, new_id, new_ids
from qworker_file.id_index import try_lock_index, unlock_index
from qworker_file.layout import QueueDir
from qworker_file.names import (
    MAX_OWN,
    delay_name,
    id_of,
    index_name,
    item_name,
    parse_delay,
    parse_lease,
    size_of,
    stem_for,
)

__all__ = ["Publisher", "Stored"]

# Seconds on the loop before others get their turn.
_TURN = 0.002
_LOCK_PAUSE = 0.002
# Messages that were enqueued this near to one another in another store.
_SAME_TIME_NS = 1_000_000


_serial = itertools.count(1)


class _Plan(msgspec.Struct, gc=False):
    """One message on its way."""

    body: bytes
    # Where it is written, in tmp/.
    temporary: str
    # Its name in queue/ or delay/.
    name: str
    delayed: bool
    # The id, when its publisher chose it.
    given: str | None
    fd: int = -1


class Stored(msgspec.Struct):
    """What a publish did."""

    ids: list[str]
    # Names in queue/ and in delay/, in order.
    ready: list[str]
    delayed: list[str]


class Publisher:
    """Publishes to any queue of one store.

    Args:
        clock: the store's clock.
        local: write timestamps in local time.
        commit: None: what is stored survives the process, and no more.
    """

    def __init__(self, clock: Clock, *, local: bool, commit: GroupCommit | None) -> None:
        self._clock = clock
        self._local = local
        self._commit = commit
        self._last_ns = 0
        self._last_given_ns = 0
        self._mark = next(_serial)
        self._batch = files_at_once()

    async def publish(self, files: QueueDir, drafts: Sequence[Draft]) -> Stored:
        """Store messages.

        Raises:
            NotSupported, InvalidName: a draft cannot be stored; none was.
            StorageFull, PublishUncertain, BackendError: see `Backend.publish`.
            FileNotFoundError: the queue was deleted.
        """
        stored = Stored([], [], [])
        plans = self._plan(drafts, stored)
        for start in range(0, len(plans), self._batch):
            await self._store(files, plans[start : start + self._batch], stored)
        return stored

    # -- names -------------------------------------------------------------------------------------------------------

    def _plan(self, drafts: Sequence[Draft], stored: Stored) -> list[_Plan]:
        now = self._clock.time()
        fresh = self._new_stems(len(drafts), now)
        plans: list[_Plan] = []
        seen: set[str] = set()
        for draft, stem in zip(drafts, fresh, strict=True):
            if draft.id is not None:
                stored.ids.append(check_id(draft.id))
                if draft.id in seen:
                    continue
                seen.add(draft.id)
            plans.append(self._plan_one(draft, stem, now, stored.ids))
        return plans

    def _plan_one(self, draft: Draft, stem: str, now: float, ids: list[str]) -> _Plan:
        dated = stem if draft.enqueued_at is None else self._stem_at(draft.enqueued_at)
        own = dated
        if draft.id is None:
            ids.append(own)
        else:
            own = stem_for(draft.id, dated)
        name = self._name(own, draft)
        due = now + draft.delay if draft.due_at is None else draft.due_at
        delayed = due > now
        if delayed:
            name = delay_name(name, int(due * 1000))
        return _Plan(draft.body, f"_{stem}_0", name, delayed, draft.id)

    @staticmethod
    def _name(stem: str, draft: Draft) -> str:
        if draft.task is None and not draft.argv:
            return f"_{stem}_{draft.tries}"
        words = draft.argv if draft.task is None else (draft.task, *draft.argv)
        name = item_name(stem, draft.tries, words)
        if size_of(name) <= MAX_OWN:
            return name
        if draft.argv:
            raise NotSupported("file: argv must fit into the name of a file: put long texts into the body")
        # A label only: the envelope in the body has the task's whole name.
        return item_name(stem, draft.tries)

    def _new_stems(self, count: int, now: float) -> list[str]:
        if self._clock is SYSTEM_CLOCK and not self._local:
            return new_ids(count)
        # Our own sequence, so the names need our own mark: another publisher of this process may be at the same nanosecond.
        first = max(int(now * 1e9), self._last_ns + 1)
        self._last_ns = first + count - 1
        pid, host = new_id().split("_")[2:]
        suffix = f"{pid}_{self._mark}.{host}"
        return [f"{self._stamp(ns)}_{suffix}" for ns in range(first, first + count)]

    def _stem_at(self, moment: float) -> str:
        """A stem of an earlier time; unique by a serial number, for others may have had the same moment."""
        ns = round(moment * 1e6) * 1000
        if ns <= self._last_given_ns < ns + _SAME_TIME_NS:
            # They keep the order in which they come, which is that of their names.
            ns = self._last_given_ns + 1
        self._last_given_ns = ns
        stamp = self._stamp(ns)
        pid, host = new_id().split("_")[2:]
        return f"{stamp}_{pid}_{next(_serial)}.{host}"

    def _stamp(self, ns: int) -> str:
        second, rest = divmod(ns, 1_000_000_000)
        moment = time.localtime(second) if self._local else time.gmtime(second)
        return f"{time.strftime('%Y%m%d%H%M%S', moment)}_{rest:09d}"

    # -- one commit --------------------------------------------------------------------------------------------------

    async def _store(self, files: QueueDir, plans: list[_Plan], stored: Stored) -> None:
        try:
            await self._write(files, plans)
            if any(plan.given is not None for plan in plans):
                plans = await self._without_stored(files, plans)
            if self._commit is not None:
                await self._sync_data(plans)
        except BaseException:
            self._discard(files, plans)
            raise
        try:
            await self._show(files, plans, stored)
        finally:
            _close(plans)
        if self._commit is not None and plans:
            await self._sync_names(files, plans)

    async def _write(self, files: QueueDir, plans: list[_Plan]) -> None:
        keep_open = self._commit is not None
        turn_ends = time.perf_counter() + _TURN
        tmp, mode = files.tmp, files.item_mode
        for plan in plans:
            plan.fd = os.open(plan.temporary, CREATE, mode, dir_fd=tmp)
            if plan.given is not None:
                # Tells a publish that is under way from one whose process died.
                fcntl.flock(plan.fd, fcntl.LOCK_EX)
            if plan.body:
                write_all(plan.fd, plan.body)
            if not keep_open and plan.given is None:
                fd, plan.fd = plan.fd, -2
                os.close(fd)
            if time.perf_counter() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = time.perf_counter() + _TURN

    async def _sync_data(self, plans: list[_Plan]) -> None:
        assert self._commit is not None
        try:
            await self._commit.data([plan.fd for plan in plans])
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise StorageFull(f"cannot publish: {error.strerror}: free some space") from error
            raise PublishUncertain(f"cannot publish: the disk could not store the data: {error.strerror}") from error

    async def _show(self, files: QueueDir, plans: list[_Plan], stored: Stored) -> None:
        turn_ends = time.perf_counter() + _TURN
        tmp = files.tmp
        for number, plan in enumerate(plans):
            target, shown = (files.delay, stored.delayed) if plan.delayed else (files.queue, stored.ready)
            try:
                os.rename(plan.temporary, plan.name, src_dir_fd=tmp, dst_dir_fd=target)
            except OSError as error:
                if not _was_renamed(plan, tmp, target):
                    self._discard(files, plans[number:])
                    raise error from None
            shown.append(plan.name)
            if time.perf_counter() > turn_ends:
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError:
                    self._discard(files, plans[number + 1 :])
                    raise
                turn_ends = time.perf_counter() + _TURN

    async def _sync_names(self, files: QueueDir, plans: list[_Plan]) -> None:
        assert self._commit is not None
        changed = {files.delay if plan.delayed else files.queue for plan in plans}
        if any(plan.given is not None for plan in plans):
            changed.add(files.names)
        try:
            await self._commit.directories(changed)
        except OSError as error:
            raise PublishUncertain(
                f"the message may or may not be stored: the disk could not store the file names: {error.strerror}: publish it again with the same id"
            ) from error

    @staticmethod
    def _discard(files: QueueDir, plans: list[_Plan]) -> None:
        """Take back what nobody has seen."""
        for plan in plans:
            if plan.fd == -1:
                continue
            try:
                if plan.given is not None and plan.fd >= 0 and os.fstat(plan.fd).st_nlink == 2:
                    # Before the file: an index with one link only may be taken by another publish of the id.
                    os.unlink(index_name(plan.given), dir_fd=files.names)
                os.unlink(plan.temporary, dir_fd=files.tmp)
            except FileNotFoundError:
                # Not there any more, or the queue is not.
                pass
        _close(plans)

    # -- ids that their publishers chose -----------------------------------------------------------------------------

    async def _without_stored(self, files: QueueDir, plans: list[_Plan]) -> list[_Plan]:
        """Reserve the given ids; take back, and leave out, the messages that are stored."""
        stored = await self._reserve(files, [plan for plan in plans if plan.given is not None])
        if not stored:
            return plans
        self._discard(files, [plan for plan in plans if plan.given in stored])
        if self._commit is not None:
            # Whoever stored them may not have made them durable yet, and we are about to say that they are.
            try:
                await self._commit.directories({files.queue, files.delay, files.names})
            except OSError as error:
                raise PublishUncertain(
                    f"the message may or may not be stored: {error.strerror}: publish it again with the same id"
                ) from error
        return [plan for plan in plans if plan.given not in stored]

    async def _reserve(self, files: QueueDir, plans: list[_Plan]) -> set[str]:
        """Give each message its second link in names/, under its id; the ids that are stored already."""
        stored: set[str] = set()
        waiting = plans
        listed: set[str] | None = None
        while waiting:
            fd = await _lock_index(files)
            try:
                if listed is None:
                    listed = await _ids_stored(files, {plan.given for plan in plans if plan.given is not None})
                waiting = self._reserve_all(files, waiting, listed, stored)
            finally:
                unlock_index(fd)
            if waiting:
                # Another publish of the same id is under way: it ends in a message, or in nothing.
                await asyncio.sleep(_LOCK_PAUSE)
        return stored

    def _reserve_all(self, files: QueueDir, plans: list[_Plan], listed: set[str], stored: set[str]) -> list[_Plan]:
        return [plan for plan in plans if not self._reserve_one(files, plan, listed, stored)]

    @staticmethod
    def _reserve_one(files: QueueDir, plan: _Plan, listed: set[str], stored: set[str]) -> bool:
        """Under the lock of names/. False: somebody else is publishing this id right now."""
        assert plan.given is not None
        index = index_name(plan.given)
        try:
            found = os.stat(index, dir_fd=files.names, follow_symlinks=False)
        except FileNotFoundError:
            found = None
        if found is not None and found.st_nlink > 1:
            unfinished = _unfinished(files, found.st_ino)
            if unfinished is None:
                stored.add(plan.given)
                return True
            if _is_locked(files, unfinished):
                return False
            # Its publisher died before anybody could see it.
            os.unlink(unfinished, dir_fd=files.tmp)
        if found is not None:
            os.unlink(index, dir_fd=files.names)
        if plan.given in listed:
            stored.add(plan.given)
            return True
        try:
            link_file(plan.temporary, index, files.tmp, files.names)
        except OSError:
            # A lost reply: the link is there all the same.
            if os.fstat(plan.fd).st_nlink < 2:
                raise
        return True


def _was_renamed(plan: _Plan, source: int, target: int) -> bool:
    """Whether a rename that reported an error has happened: its names are unique, so the old one is gone and the new one there."""
    try:
        os.stat(plan.temporary, dir_fd=source, follow_symlinks=False)
    except FileNotFoundError:
        try:
            os.stat(plan.name, dir_fd=target, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True
    return False


def _close(plans: list[_Plan]) -> None:
    for plan in plans:
        if plan.fd >= 0:
            fd, plan.fd = plan.fd, -2
            os.close(fd)


async def _lock_index(files: QueueDir) -> int:
    """Lock the given ids between processes: held for microseconds, and for a listing."""
    while (fd := try_lock_index(files)) is None:
        await asyncio.sleep(_LOCK_PAUSE)
    return fd


async def _ids_stored(files: QueueDir, wanted: set[str]) -> set[str]:
    """Which of the ids are stored by a publisher that did not choose them, by listing every state."""
    found: set[str] = set()
    for name in await list_names(files.queue):
        found.add(id_of(name) or "")
    for name in await list_names(files.delay):
        delayed = parse_delay(name)
        found.add((id_of(delayed[1]) if delayed else None) or "")
    for name in await list_names(files.lease):
        leased = parse_lease(name)
        found.add((id_of(leased[0]) if leased else None) or "")
    for directory in (files.fail, files.done):
        for name in await list_names(directory):
            found.add(id_of(name) or "")
    return found & wanted


def _unfinished(files: QueueDir, inode: int) -> str | None:
    """The name in tmp/ of a file; None when it has been renamed into sight."""
    fd = os.open(".", DIRECTORY, dir_fd=files.tmp)
    try:
        with os.scandir(fd) as entries:
            return next((entry.name for entry in entries if entry.inode() == inode), None)
    finally:
        os.close(fd)


def _is_locked(files: QueueDir, name: str) -> bool:
    try:
        fd = os.open(name, READ, dir_fd=files.tmp)
    except FileNotFoundError:
        # Renamed this moment: look again.
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
