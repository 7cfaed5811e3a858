"""The mover and the reaper inside a backend: what brings messages back to their queues, and what unlinks the removed ones."""

from __future__ import annotations

import asyncio
import math
import os
import time

import msgspec

from qworker.kit.files import is_finished
from qworker_mq.holder import is_dead
from qworker_mq.layout import split_name
from qworker_mq.lease import Busy, MqLease, Stranger, write_reason
from qworker_mq.store import Held, Store

__all__ = ["Mover", "Trash"]

_TICK_NS = 50_000_000
# Seconds after which an unfinished publish is a dead one's.
_STRAY = 36 * 3600.0
# Seconds that a record without a message is kept: longer than any transition.
_ORPHAN = 3600.0


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A leased message as it was seen first; it expires when it has stayed so for `length` seconds of the monotonic clock.

    No step of any clock takes a live lease early: the wall clock's times are compared with nothing but themselves.
    """

    state: tuple[int, float, int]
    since: float
    length: float
    holder: str


class Mover:
    """Returns messages to their queues.

    Args:
        store: the opened root.
        foreign_delay: seconds after which a message that another program fetched is returned.
        daemons: False: new messages, and those that others fetched, are left to another mover.
    """

    def __init__(self, store: Store, *, foreign_delay: float, daemons: bool) -> None:
        self._store = store
        self._foreign_delay = foreign_delay if daemons else math.inf
        self._daemons = daemons
        self._seen: dict[str, _Seen] = {}
        self._new_stamp = -1
        self._new_unfinished = False

    def sweep_new(self) -> None:
        """Bring finished messages from new/ to their queues."""
        if not self._daemons:
            return
        root = self._store.root
        stamp = os.fstat(root.new).st_mtime_ns
        if stamp == self._new_stamp and not self._new_unfinished:
            return
        # A change in the same tick as this listing would not show.
        self._new_stamp = stamp if time.time_ns() - stamp > _TICK_NS else -1
        self._new_unfinished = False
        for name in os.listdir(root.new):
            parts = split_name(name)
            if parts is None:
                continue
            finished = is_finished(name, root.new)
            if not finished:
                self._new_unfinished |= finished is False
                continue
            held = self._store.made(parts[0])
            if _renamed(name, root.new, parts[1], held.dirs.ready):
                held.window.add(parts[1])
                self._store.wake(parts[0])

    def promote(self, held: Held) -> int:
        """Make due messages ready; count them."""
        count = 0
        for message_id in held.due.due(self._store.clock.time()):
            if _renamed(held.due.file_name(message_id), held.dirs.due, message_id, held.dirs.ready):
                held.window.add(message_id)
                count += 1
            held.due.forget(message_id)
        if count:
            self._store.wake(held.name)
        return count

    def note(self, lease: MqLease, visibility: float, holder: str) -> None:
        """Know of a lease that this process took or extended. Safe to call from any thread."""
        name = f"{lease.message.queue}:{lease.message.id}"
        self._seen[name] = _Seen(
            state=(lease.token, lease.expires_at, lease.moved) if lease.recorded else (0, 0.0, lease.moved),
            since=self._store.clock.monotonic(),
            length=visibility,
            holder=holder,
        )

    def expire(self, held: Held) -> int:
        """Return messages whose leases are over; count them."""
        root = self._store.root
        prefix = f"{held.name}:"
        present = {name for name in os.listdir(root.delay) if name.startswith(prefix)}
        for name in tuple(self._seen):
            if name.startswith(prefix) and name not in present:
                self._seen.pop(name, None)
        dead: dict[str, bool] = {"": False}
        count = 0
        for name in present:
            try:
                count += self._expire(held, name, name[len(prefix) :], dead)
            except (Busy, FileNotFoundError):
                # Moved at this moment: not expired.
                continue
            except Stranger:
                set_aside(self._store, name, root.delay, held, name[len(prefix) :])
        if count:
            self._store.wake(held.name)
        return count

    def _expire(self, held: Held, name: str, message_id: str, dead: dict[str, bool]) -> bool:
        root = self._store.root
        now = self._store.clock.monotonic()
        moved = os.stat(name, dir_fd=root.delay, follow_symlinks=False).st_ctime_ns
        seen = self._seen.get(name)
        if seen is None or seen.state[2] != moved:
            seen = self._look(name, moved, now)
        if seen.holder not in dead:
            dead[seen.holder] = is_dead(root.workers, seen.holder)
        if not dead[seen.holder]:
            if now - seen.since < seen.length:
                return False
            current = self._look(name, moved, now)
            if current.state != seen.state:
                return False
        if not self._store.claims.expire(name, message_id, held.dirs, seen.state):
            self._seen.pop(name, None)
            return False
        self._seen.pop(name, None)
        held.window.add(message_id)
        return True

    def _look(self, name: str, moved: int, now: float) -> _Seen:
        record = self._store.records.read(name)
        ours = bool(record.visibility) and record.moved == moved
        state = (record.token, record.expires_at, moved)
        found = _Seen(
            state=state,
            since=now,
            # What no lease of ours explains was fetched by another program, or is a transition that a crash cut short.
            length=record.visibility if ours else self._foreign_delay,
            holder=record.holder if ours else "",
        )
        known = self._seen.get(name)
        if known is None or known.state != state:
            self._seen[name] = found
        return found


class Trash:
    """Unlinks what was removed.

    Args:
        store: the opened root.
        daemons: False: another reaper does.
    """

    def __init__(self, store: Store, *, daemons: bool) -> None:
        self._store = store
        self._daemons = daemons
        self._swept_at = float("-inf")
        self._names: list[str] = []
        self._unlinking: asyncio.Task[None] | None = None

    def unlink(self, names: list[str]) -> None:
        """Unlink what this process has just moved to remove/: soon, and in a thread, for freeing blocks takes its time."""
        if not self._daemons or not names:
            return
        self._names.extend(names)
        if self._unlinking is None or self._unlinking.done():
            self._unlinking = asyncio.create_task(self._unlink())

    async def _unlink(self) -> None:
        while self._names:
            names, self._names = self._names, []
            await asyncio.to_thread(self._unlink_all, names)

    def _unlink_all(self, names: list[str]) -> None:
        for name in names:
            _unlinked(name, self._store.root.remove)

    async def aclose(self) -> None:
        """Finish what was begun."""
        if self._unlinking is not None:
            await asyncio.wait([self._unlinking])

    def sweep(self) -> None:
        """Unlink everything in remove/, once a minute, and what dead publishers left."""
        now = time.monotonic()
        if not self._daemons or now - self._swept_at < 60.0:
            return
        self._swept_at = now
        root = self._store.root
        for name in os.listdir(root.remove):
            if split_name(name) is not None and _unlinked(name, root.remove):
                self._store.records.forget(name)
        now = time.time()
        for name in os.listdir(root.tmp):
            if _older(name, root.tmp, now - _STRAY):
                _unlinked(name, root.tmp)
        for name in os.listdir(root.lease):
            if _older(name, root.lease, now - _ORPHAN) and not self._exists(name):
                self._store.records.forget(name)
        for name in os.listdir(root.workers):
            if is_dead(root.workers, name):
                _unlinked(name, root.workers)

    def _exists(self, name: str) -> bool:
        """Whether the message of a record is stored; what foreign programs deleted leaves its record behind."""
        parts = split_name(name)
        held = None if parts is None else self._store.held(parts[0])
        if parts is None or held is None:
            return False
        root = self._store.root
        places = [(parts[1], held.dirs.ready), (name, root.delay), (name, root.new), (parts[1], held.dirs.fail)] * 2
        return held.due.get(parts[1]) is not None or any(_present(*place) for place in places)


def set_aside(store: Store, name: str, directory: int, held: Held, message_id: str) -> None:
    """Put what is not a regular file where failed messages are, with the reason."""
    write_reason(store.root.reason, f"{held.name}:{message_id}", "this is not a regular file, so it is not a message")
    _renamed(name, directory, message_id, held.dirs.fail)


def _older(name: str, directory: int, limit: float) -> bool:
    """Whether a file has not changed since `limit`; False for one that is gone."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_ctime < limit
    except FileNotFoundError:
        return False


def _present(name: str, directory: int) -> bool:
    return _older(name, directory, math.inf)


def _renamed(name: str, source: int, target: str, destination: int) -> bool:
    try:
        os.rename(name, target, src_dir_fd=source, dst_dir_fd=destination)
    except FileNotFoundError:
        return False
    return True


def _unlinked(name: str, directory: int) -> bool:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return False
    except IsADirectoryError:
        # A stranger's directory: not ours to empty.
        return False
    return True
