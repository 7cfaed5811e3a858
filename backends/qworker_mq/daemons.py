"""The work of mq's daemons: new messages go to their queues, and removed ones are unlinked.

A backend does this work itself with `Mover` and `Trash`, unless its URL has `daemons=0`. `daemon_processes` has the
commands that do it for other servers.
"""

from __future__ import annotations

import asyncio
import math
import os
import time

from qworker.kit.directory.blocked import is_about_one_file
from qworker.kit.directory.liveness import has_died
from qworker.kit.directory.retention import StuckFiles
from qworker.kit.files import is_finished
from qworker.kit.store_errors import STORE_WIDE
from qworker.kit.threads import BlockingCall, run_in_thread
from qworker_mq.layout import split_name, try_rename, try_unlink
from qworker_mq.store import Store

__all__ = ["Mover", "Trash"]

# Seconds after which messages are tried again whose queue cannot be used.
_RESCAN = 1.0
# A change so shortly before a listing (ns) may have the same time as one after it.
_TICK_NS = 50_000_000
# Seconds after which an unfinished publish belongs to a dead process.
_STRAY = 36 * 3600.0
# Seconds that the lease state of a missing message is kept: longer than any transition.
_ORPHAN = 3600.0


class Mover:
    """Moves new messages to their queues.

    Args:
        store: The opened root.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._stamp = -1
        self._has_unfinished = False
        # Monotonic seconds. Until then, messages whose queue cannot be used stay in new/.
        self._retry_at = math.inf

    def sweep(self) -> None:
        """Move finished messages from new/ to their queues."""
        if not self._store.options.daemons:
            return
        root = self._store.root
        stamp = os.fstat(root.new).st_mtime_ns
        if stamp == self._stamp and not self._has_unfinished and time.monotonic() < self._retry_at:
            return
        # A change in the same tick as this listing would not show.
        self._stamp = stamp if time.time_ns() - stamp > _TICK_NS else -1
        self._has_unfinished = False
        self._retry_at = math.inf
        refused: set[str] = set()
        for name in os.listdir(root.new):
            parts = split_name(name)
            if parts is None or parts[0] in refused:
                continue
            if not self._can_use(parts[0]):
                refused.add(parts[0])
                continue
            try:
                finished = is_finished(name, root.new)
                if not finished:
                    self._has_unfinished |= finished is False
                    continue
                self._move(name, *parts)
            except OSError as error:
                if not is_about_one_file(error, root.tmp):
                    raise
                # The messages behind it must not wait for it.
                self._store.get_or_create(parts[0]).blocked.add(f"new/{name}", error)
                self._has_unfinished = True

    def _can_use(self, queue: str) -> bool:
        """Return whether the queue of a message can be opened. If not, calls for this queue raise the reason.

        Raises:
            OSError: No queue can be opened.
        """
        try:
            self._store.get_or_create(queue)
        except OSError as error:
            if error.errno in STORE_WIDE:
                raise
            self._retry_at = time.monotonic() + _RESCAN
            return False
        return True

    def _move(self, name: str, queue: str, message_id: str) -> None:
        open_queue = self._store.get_or_create(queue)
        if f"new/{name}" in open_queue.blocked:
            self._has_unfinished = True
            return
        if try_rename(name, self._store.root.new, message_id, open_queue.dirs.ready):
            open_queue.window.add(message_id)
            self._store.wake(queue)
        open_queue.blocked.forget(f"new/{name}")


class Trash:
    """Unlinks removed messages.

    Args:
        store: The opened root.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._swept_at = float("-inf")
        self._names: list[str] = []
        self._stuck = StuckFiles("mq")
        self._unlinking: asyncio.Task[None] | None = None

    def unlink(self, names: list[str]) -> None:
        """Unlink the messages that this process has just moved to remove/.

        It runs in a thread, because freeing blocks takes time.
        """
        if not self._store.options.daemons or not names:
            return
        self._names.extend(names)
        if self._unlinking is None or self._unlinking.done():
            self._unlinking = asyncio.create_task(self._unlink())

    async def _unlink(self) -> None:
        while self._names:
            names, self._names = self._names, []
            await run_in_thread(BlockingCall.DELETE, self._unlink_all, names)

    def _unlink_all(self, names: list[str]) -> None:
        for name in names:
            self._unlink_one(name, self._store.root.remove)

    def _unlink_one(self, name: str, directory: int) -> bool:
        """Unlink a file and return whether it was there. One that cannot be removed stays, and is reported once.

        Raises:
            OSError: The store failed.
        """
        try:
            return try_unlink(name, directory)
        except OSError as error:
            self._stuck.add(name, error, self._store.root.tmp)
            return False

    async def aclose(self) -> None:
        """Wait for the messages that are being unlinked."""
        if self._unlinking is not None:
            await asyncio.wait([self._unlinking])

    def sweep(self) -> None:
        """Unlink everything in remove/, and the files of dead publishers, at most once per minute."""
        now = time.monotonic()
        if not self._store.options.daemons or now - self._swept_at < 60.0:
            return
        self._swept_at = now
        root, lease_states = self._store.root, self._store.lease_states
        for name in os.listdir(root.remove):
            if split_name(name) is not None and self._unlink_one(name, root.remove):
                lease_states.delete(name)
        now = time.time()
        for name in os.listdir(root.tmp):
            if _is_unchanged_since(now - _STRAY, name, root.tmp):
                self._unlink_one(name, root.tmp)
        for name in os.listdir(root.lease):
            if _is_unchanged_since(now - _ORPHAN, name, root.lease) and not self._is_stored(name):
                lease_states.delete(name)
        lease_states.forget_stateless(self._is_stored)
        for name in os.listdir(root.workers):
            if has_died(root.workers, name, local=self._store.is_local):
                self._unlink_one(name, root.workers)

    def _is_stored(self, name: str) -> bool:
        """Return whether the message of a lease state is stored. Foreign programs delete only the message."""
        parts = split_name(name)
        if parts is None:
            return False
        try:
            open_queue = self._store.get(parts[0])
        except OSError:
            # It is unknown, so the state is kept.
            return True
        return open_queue is not None and self._store.is_stored(open_queue, parts[1])


def _is_unchanged_since(limit: float, name: str, directory: int) -> bool:
    """Return whether a file exists and has not changed since `limit`."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_ctime < limit
    except FileNotFoundError:
        return False
