"""Give the messages of a publish the ids that their publishers chose, and their unique keys."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections import deque
from collections.abc import Sequence

import msgspec

from qworker.kit.files import find_inode, link_file, list_names, try_unlink
from qworker_file.app_keys import OpenOther, give_app_key, lock_app_keys
from qworker_file.holds import is_held
from qworker_file.id_index import LOCK_PAUSE, free_link, is_any_in_progress, lock_index, unlock
from qworker_file.id_place import Located, Place, is_unchanged, locate, read_status, record_place, recorded_place
from qworker_file.layout import QueueDir
from qworker_file.loads import staged_files
from qworker_file.names import (
    index_name,
    is_app_mark,
    key_link_name,
    key_record_name,
    may_lack_link,
    parse_delay,
    parse_id,
    parse_lease,
)
from qworker_file.publish_plan import Plan, Planner
from qworker_file.replace import Replaced, finish_replacing, replace_waiting
from qworker_file.taken_keys import AppKey
from qworker_file.unique_keys import Holder, holder_of, keep_key, record_key, state_of

__all__ = ["Reserved", "reserve_ids"]

# So often a message that is to be replaced can be locked: 0.1 s in all.
_MOST_BUSY = 50


class Reserved(msgspec.Struct):
    """What `reserve_ids` has found.

    Attributes:
        stored: The given ids that are stored or held.
        instead: The ids of the messages that have the unique keys of others, by the ids of those.
        replaced: The messages that have taken the places of those.
        has_app_keys: Whether a message has taken a key that counts in all queues.
    """

    stored: set[str]
    instead: dict[str, str]
    replaced: list[Plan]
    has_app_keys: bool = False

    def has(self, message_id: str | None) -> bool:
        """Return whether a message is not to be stored."""
        return message_id in self.stored or message_id in self.instead


async def reserve_ids(
    files: QueueDir, plans: Sequence[Plan], planner: Planner, open_other: OpenOther, now: float
) -> Reserved:
    """Give each message with a given id its second link in names/, and its unique key.

    A message that replaces a waiting one with its key is visible afterwards. Its content is on the disk before.

    Every call takes all of its ids before its first key, both in a fixed order. While it waits for another publisher,
    it has only what comes before. So no publishers wait for each other.

    Args:
        files: The queue.
        plans: The messages. If one replaces others, it is the only one with its key.
        planner: Names them.
        open_other: Opens the other queues of the store.
        now: Unix seconds, by the store's clock.

    Raises:
        OSError: An id cannot be reserved.
    """
    call = _Reservation(files, planner, open_other, now)
    given = sorted((plan for plan in plans if plan.given_id is not None), key=lambda plan: plan.given_id or "")
    unlinked = frozenset(plan.given_id for plan in given if plan.given_id and may_lack_link(plan.given_id))
    is_listed = not unlinked
    # The sort is stable: of the messages of a batch with one key, the first one gets it.
    keyed = sorted((plan for plan in plans if plan.key_mark), key=_key_order)
    steps = deque([*((call.reserve_id, plan) for plan in given), *((call.reserve_key, plan) for plan in keyed)])
    while steps:
        fd = await lock_index(files)
        try:
            if not is_listed:
                call.found.stored |= await _ids_stored(files, unlinked)
                is_listed = True
            while steps:
                reserve, plan = steps[0]
                if not reserve(plan):
                    break
                steps.popleft()
        finally:
            unlock(fd)
        if steps:
            # The lock is not held meanwhile: it may list.
            call.located = await locate(files, call.unsure)
            if await call.is_waiting() or is_any_in_progress(files, call.located):
                # Another publish of the same id either stores a message or leaves nothing. A file that is locked is
                # leased at this moment.
                await asyncio.sleep(LOCK_PAUSE)
    return call.found


def _key_order(plan: Plan) -> tuple[bool, str]:
    return is_app_mark(plan.key_mark), key_link_name(plan.key_mark)


class _Reservation:
    """One call of `reserve_ids`. Its methods need the lock of names/."""

    def __init__(self, files: QueueDir, planner: Planner, open_other: OpenOther, now: float) -> None:
        self._files = files
        self._planner = planner
        self._open_other = open_other
        self._now = now
        self.found = Reserved(set(), {}, [])
        self.located = Located({}, {})
        # The ids to locate before the next attempt.
        self.unsure: set[str] = set()
        # The messages of this call that have keys, by the names of the keys' symlinks.
        self._own: dict[str, str] = {}
        # The key that counts in all queues and must be checked again.
        self._app_key: AppKey | None = None
        # Whether the message that is to be replaced is locked, and how often one was.
        self._is_busy = False
        self._busy_count = 0

    def reserve_id(self, plan: Plan) -> bool:
        """Reserve an id, or find that it is stored. False: it must be located first, or is published now."""
        message_id = plan.given_id
        assert message_id is not None
        if not self._check_id(message_id):
            self.unsure = {message_id}
            return False
        if message_id in self.found.stored:
            return True
        is_plain = plan.key_mark and plan.replacing is None and not is_app_mark(plan.key_mark)
        holder = holder_of(self._files, plan.key_mark) if is_plain else None
        if holder is not None and self._state_of(holder, plan) is Holder.LIVE:
            self.found.instead[message_id] = holder
        else:
            self._link(plan, message_id)
        return True

    def reserve_key(self, plan: Plan) -> bool:
        """Take the key of a message, or find which other one has it. False: that one must be located first."""
        message_id = plan.given_id
        assert message_id is not None
        assert plan.unique_key is not None
        if self.found.has(message_id):
            return True
        if is_app_mark(plan.key_mark):
            return self._reserve_app_key(plan, message_id, plan.unique_key)
        name = key_link_name(plan.key_mark)
        holder, state = self._own.get(name), Holder.LIVE
        if holder is None:
            holder = holder_of(self._files, plan.key_mark)
            state = Holder.VOID if holder is None else self._state_of(holder, plan)
            if holder is not None and state is Holder.LIVE and plan.replacing is not None:
                state = self._replace(plan, holder)
        if holder is None or state is Holder.VOID:
            # The key is void until the message is visible.
            keep_key(self._files, message_id, plan.unique_key, plan.key_mark)
            self._own[name] = message_id
        elif state is Holder.UNSURE:
            self.unsure = {holder}
            return False
        else:
            self.found.instead[message_id] = holder
        return True

    def _reserve_app_key(self, plan: Plan, message_id: str, key: str) -> bool:
        files, mark = self._files, plan.key_mark
        name = key_link_name(mark)
        if name in self._own:
            self.found.instead[message_id] = self._own[name]
            return True
        call = self._app_key = self._app_key or AppKey(files, mark, self._open_other)
        with lock_app_keys(files) as keys:
            state = Holder.UNSURE if keys is None else call.check(keys, message_id)
            if state is Holder.UNSURE or keys is None:
                self.unsure = set()
                return False
            self._app_key = None
            if state is Holder.LIVE:
                self.found.instead[message_id] = call.shown_holder()
            else:
                record_key(files, message_id, key)
                give_app_key(files, keys, message_id, mark)
                self._own[name] = message_id
                self.found.has_app_keys = True
        return True

    async def is_waiting(self) -> bool:
        """Return whether the next attempt must wait for another process, and locate the message that has a key."""
        is_busy, self._is_busy = self._is_busy, False
        return (self._app_key is not None and await self._app_key.look()) or is_busy

    def _replace(self, plan: Plan, holder: str) -> Holder:
        """Let a message take the place of the one that has its key, if that one waits.

        Returns:
            LIVE: it has. VOID: the other one runs, or has ended. UNSURE: the other one must be located first.
        """
        files = self._files
        assert plan.given_id is not None
        status = read_status(files, holder)
        place = None if status is None else self._place(holder, status.st_ino)
        if place is None or place.directory not in {"queue", "delay"}:
            return Holder.VOID
        # It will have the other id. Only one link in names/ counts.
        free_link(files, plan.given_id)
        new = self._planner.replan(plan, place, self._now)
        outcome = replace_waiting(files, new, holder, place)
        self._is_busy = outcome is Replaced.BUSY
        if outcome is Replaced.YES:
            self.found.replaced.append(new)
            # It is visible, and this call may wait for other keys. A call that finds it locked cannot replace it.
            fcntl.flock(plan.fd, fcntl.LOCK_UN)
            return Holder.LIVE
        self._link(plan, plan.given_id)
        self._busy_count += self._is_busy
        # A file that stays locked is run by an fsq program, in place.
        return Holder.UNSURE if self._busy_count < _MOST_BUSY else Holder.VOID

    def _place(self, message_id: str, inode: int) -> Place | None:
        return recorded_place(self._files, message_id, inode) or self.located.places.get(message_id)

    def _state_of(self, holder: str, plan: Plan) -> Holder:
        finish_replacing(self._files, index_name(holder))
        return state_of(self._files, holder, plan.key_mark, self.located)

    def _check_id(self, message_id: str) -> bool:
        """Find out whether an id is stored or held. False: it must be located first, or is published now."""
        files, stored = self._files, self.found.stored
        finish_replacing(files, index_name(message_id))
        status = read_status(files, message_id)
        if status is not None and status.st_nlink > 1:
            place = self._place(message_id, status.st_ino)
            if place is not None and place.directory != "tmp":
                stored.add(message_id)
                return True
            if not is_unchanged(self.located.gone.get(message_id), status):
                return False
        if status is not None:
            free_link(files, message_id)
        if message_id not in stored and is_held(files, message_id, self._now):
            stored.add(message_id)
        return True

    def _link(self, plan: Plan, message_id: str) -> None:
        files, index = self._files, index_name(message_id)
        # An earlier message with this id can have left its key. This one has no key before it is recorded.
        try_unlink(key_record_name(message_id), files.names)
        try:
            link_file(plan.temporary, index, files.tmp, files.names)
        except OSError:
            # A lost reply: the link exists although an error was reported.
            if find_inode(index, files.names) != os.fstat(plan.fd).st_ino:
                raise
        record_place(files, message_id, Place("delay" if plan.delayed else "queue", plan.name))


async def _ids_stored(files: QueueDir, wanted: frozenset[str]) -> set[str]:
    """Find the ids that are stored by a publisher that did not choose them, by listing every state."""
    found: set[str] = set()
    # A load that cannot be read, which its window reports, does not keep other ids from being stored.
    async for staged in staged_files(files.base, local_time=False, on_trouble=lambda _path, _reason: None):
        found.update([parse_id(file.item) or "" for file in staged])
    for name in await list_names(files.queue):
        found.add(parse_id(name) or "")
    for name in await list_names(files.delay):
        delayed = parse_delay(name)
        found.add((parse_id(delayed[1]) if delayed else None) or "")
    for name in await list_names(files.lease):
        leased = parse_lease(name)
        found.add((parse_id(leased[0]) if leased else None) or "")
    for directory in (files.fail, files.done):
        for name in await list_names(directory):
            found.add(parse_id(name) or "")
    return found & wanted
