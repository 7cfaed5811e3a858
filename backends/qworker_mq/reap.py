"""Reaping: messages whose lease is over, or which are due, become ready again."""

from __future__ import annotations

import math
import os

import msgspec

from qworker.kit.directory.blocked import is_about_one_file
from qworker.kit.directory.liveness import has_died
from qworker_mq.daemons import Mover, Trash
from qworker_mq.layout import try_rename
from qworker_mq.lease_state import MqLease
from qworker_mq.message_lock import MessageLocked, NotARegularFile, lock_message
from qworker_mq.settle import move_to_failed, release
from qworker_mq.store import OpenQueue, Store

__all__ = ["StoreReaper"]


class _ObservedLease(msgspec.Struct, frozen=True, kw_only=True):
    """A leased message as this process first saw it.

    It expires when it has stayed unchanged for `length` seconds of the monotonic clock. So no step of any clock ends a
    live lease early: the wall clock's times are only compared with one another.
    """

    # Token, expiry and change time.
    version: tuple[int, float, int]
    since: float
    length: float
    holder: str


class StoreReaper:
    """Makes messages of all queues of a root ready when they are due or their lease is over.

    Args:
        store: The opened root.
        mover: Brings new messages to their queues.
        trash: Unlinks removed messages.
    """

    def __init__(self, store: Store, mover: Mover, trash: Trash) -> None:
        self._store = store
        self._mover = mover
        self._trash = trash
        self._foreign_delay = store.options.delay if store.options.daemons else math.inf
        self._observed: dict[str, _ObservedLease] = {}

    def reap(self, queue: str) -> int:
        """Return expired and due messages to their queue, and do the daemons' work.

        Returns:
            The number of messages that became ready.
        """
        self._mover.sweep()
        self._trash.sweep()
        open_queue = self._store.get(queue)
        if open_queue is None:
            return 0
        open_queue.retry_blocked()
        return self.promote(open_queue) + self._expire_all(open_queue)

    def require_current(self, queue: str) -> OpenQueue:
        """Return a queue after its new and due messages were made ready.

        Raises:
            QueueNotFound: The queue does not exist.
        """
        open_queue = self._store.require(queue)
        self._mover.sweep()
        self.promote(open_queue)
        return open_queue

    def promote(self, queue: OpenQueue) -> int:
        """Make due messages ready, and count them."""
        count = 0
        for message_id in queue.due.list_due(self._store.clock.time()):
            name = queue.due.file_name(message_id)
            if f"due/{name}" in queue.blocked:
                continue
            try:
                if try_rename(name, queue.dirs.due, message_id, queue.dirs.ready):
                    queue.window.add(message_id)
                    count += 1
            except OSError as error:
                self._block(queue, f"due/{name}", error)
                continue
            queue.due.drop(message_id)
        if count:
            self._store.wake(queue.name)
        return count

    def _block(self, queue: OpenQueue, name: str, error: OSError) -> None:
        """Let a file rest that cannot be moved.

        Raises:
            OSError: The store failed, not the file.
        """
        if not is_about_one_file(error, self._store.root.tmp):
            raise error
        queue.blocked.add(name, error)

    def note(self, lease: MqLease, visibility: float, holder: str) -> None:
        """Record a lease that this process took or extended. Any thread can call it."""
        name = f"{lease.message.queue}:{lease.message.id}"
        self._observed[name] = _ObservedLease(
            version=(lease.token, lease.expires_at, lease.moved) if lease.has_state else (0, 0.0, lease.moved),
            since=self._store.clock.monotonic(),
            length=visibility,
            holder=holder,
        )

    def _expire_all(self, queue: OpenQueue) -> int:
        """Return the messages of a queue whose leases are over, and count them."""
        root = self._store.root
        prefix = f"{queue.name}:"
        present = {name for name in os.listdir(root.delay) if name.startswith(prefix)}
        for name in tuple(self._observed):
            if name.startswith(prefix) and name not in present:
                self._observed.pop(name, None)
        dead: dict[str, bool] = {"": False}
        count = 0
        for name in present:
            message_id = name[len(prefix) :]
            if f"delay/{name}" in queue.blocked:
                continue
            try:
                count += self._expire_if_over(queue, name, message_id, dead)
            except (MessageLocked, FileNotFoundError):
                # It is being moved, so it has not expired.
                continue
            except NotARegularFile:
                move_to_failed(self._store, name, root.delay, queue, message_id)
            except OSError as error:
                # The messages behind it must not wait for it.
                self._block(queue, f"delay/{name}", error)
        if count:
            self._store.wake(queue.name)
        return count

    def _expire_if_over(self, queue: OpenQueue, name: str, message_id: str, dead: dict[str, bool]) -> bool:
        root = self._store.root
        now = self._store.clock.monotonic()
        moved = os.stat(name, dir_fd=root.delay, follow_symlinks=False).st_ctime_ns
        observed = self._observed.get(name)
        if observed is None or observed.version[2] != moved:
            observed = self._observe(name, moved, now)
        if observed.holder not in dead:
            dead[observed.holder] = has_died(root.workers, observed.holder, local=False)
        if not dead[observed.holder]:
            if now - observed.since < observed.length:
                return False
            current = self._observe(name, moved, now)
            if current.version != observed.version:
                return False
        expired = self._expire(queue, name, message_id, observed.version)
        self._observed.pop(name, None)
        if expired:
            queue.window.add(message_id)
        return expired

    def _observe(self, name: str, moved: int, now: float) -> _ObservedLease:
        state = self._store.lease_states.read(name)
        is_ours = bool(state.visibility) and state.moved == moved
        version = (state.token, state.expires_at, moved)
        observed = _ObservedLease(
            version=version,
            since=now,
            # A message without a lease of qworker was fetched by another program, or a crash interrupted its
            # transition.
            length=state.visibility if is_ours else self._foreign_delay,
            holder=state.holder if is_ours else "",
        )
        known = self._observed.get(name)
        if known is None or known.version != version:
            self._observed[name] = observed
        return observed

    def _expire(self, queue: OpenQueue, name: str, message_id: str, version: tuple[int, float, int]) -> bool:
        """Return a leased message to its queue with tries + 1, if its lease is still the observed one.

        Raises:
            MessageLocked: Another process is moving the message.
        """
        fd = lock_message(name, self._store.root.delay)
        if fd < 0:
            return False
        try:
            state = self._store.lease_states.read(name)
            if (state.token, state.expires_at, os.fstat(fd).st_ctime_ns) != version:
                return False
            after = state.without_lease(tries=state.tries + 1, error="the lease expired")
            return release(self._store, name, message_id, queue.dirs, state, after, 0.0)
        finally:
            os.close(fd)
