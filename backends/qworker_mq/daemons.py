"""The work of mq's daemons: new messages go to their queues, and removed ones are unlinked.

A backend does this work itself with `Mover` and `Trash`, unless its URL has `daemons=0`. The commands `qworker mq
mover` and `qworker mq reaper` run `DelayedMover` and `TrashCleaner` on the directories of a root. Unlike mq's own
daemons they also take messages that were there before they started.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from pathlib import Path

import structlog

from qworker.errors import UsageError
from qworker.kit.directory.blocked import is_about_one_file
from qworker.kit.directory.liveness import has_died
from qworker.kit.files import is_finished, list_names, make_directory
from qworker.kit.inotify import Watcher
from qworker.kit.opening import open_directory
from qworker.kit.store_errors import STORE_WIDE, store_errors
from qworker.kit.threads import BlockingCall, run_in_thread
from qworker.log_events import QUEUE_UNUSABLE
from qworker_mq.layout import split_name, try_rename, try_unlink
from qworker_mq.store import Store

__all__ = ["DelayedMover", "Mover", "Trash", "TrashCleaner", "open_source", "run_daemon"]

# A change so shortly before a listing (ns) may have the same time as one after it.
_TICK_NS = 50_000_000
# Seconds between listings that no notification caused.
_RESCAN = 1.0
# Seconds after which an unfinished publish belongs to a dead process.
_STRAY = 36 * 3600.0
# Seconds that the lease state of a missing message is kept: longer than any transition.
_ORPHAN = 3600.0

log = structlog.get_logger()


# -- inside a backend --------------------------------------------------------------------------------------------------


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
            try_unlink(name, self._store.root.remove)

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
            if split_name(name) is not None and try_unlink(name, root.remove):
                lease_states.delete(name)
        now = time.time()
        for name in os.listdir(root.tmp):
            if _is_unchanged_since(now - _STRAY, name, root.tmp):
                try_unlink(name, root.tmp)
        for name in os.listdir(root.lease):
            if _is_unchanged_since(now - _ORPHAN, name, root.lease) and not self._is_stored(name):
                lease_states.delete(name)
        for name in os.listdir(root.workers):
            if has_died(root.workers, name, local=False):
                try_unlink(name, root.workers)

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


# -- as processes ------------------------------------------------------------------------------------------------------


def open_source(path: Path) -> int:
    """Open a directory that a daemon works on.

    Raises:
        UsageError: It is not a directory.
        PermissionDenied: This user has no permission to read it.
    """
    with store_errors(f"open {path}"):
        try:
            return open_directory(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UsageError(f"{path} is not a directory: create it first") from error


class DelayedMover:
    """Moves files named `<queue>:<id>` to `<destination>/<queue>/<id>`, each after a delay from when it was first seen.

    Args:
        source: Descriptor of `new/` or `delay/`.
        destination: Descriptor of `queues/`.
        delay: Seconds that a file stays in the source.
    """

    def __init__(self, source: int, destination: int, delay: float) -> None:
        self._source = source
        self._destination = destination
        self._delay = delay
        # By name: the change time when first seen, and when that was. A file that came back has another change time.
        self._seen: dict[str, tuple[int, float]] = {}
        # The queues that refused their messages in the last sweep, each with the reason. The messages stay.
        self._refused: dict[str, str] = {}

    async def sweep(self) -> float:
        """Move due messages, and return the seconds until the next ones are due."""
        names = await list_names(self._source)
        present = set(names)
        for name in [name for name in self._seen if name not in present]:
            del self._seen[name]
        now = time.monotonic()
        soonest = _RESCAN
        refused: dict[str, str] = {}
        for name in names:
            parts = split_name(name)
            if parts is None:
                continue
            rest = self._seconds_left(name, now)
            if rest is not None and rest <= 0 and parts[0] not in refused:
                try:
                    self._move(name, *parts)
                except OSError as error:
                    if error.errno in STORE_WIDE:
                        raise
                    refused[parts[0]] = error.strerror or str(error)
            elif rest is not None:
                soonest = min(soonest, rest)
        self._report(refused)
        return soonest

    def _report(self, refused: dict[str, str]) -> None:
        """Log each queue that has begun to refuse its messages."""
        for queue, reason in refused.items():
            if queue not in self._refused:
                log.warning(QUEUE_UNUSABLE, queue=queue, error=reason)
        self._refused = refused

    def _seconds_left(self, name: str, now: float) -> float | None:
        """Return the seconds until a file is due. None: it is gone."""
        if not self._delay:
            return 0.0
        try:
            changed = os.stat(name, dir_fd=self._source, follow_symlinks=False).st_ctime_ns
        except FileNotFoundError:
            return None
        seen = self._seen.get(name)
        if seen is None or seen[0] != changed:
            # It was there before the daemon started: its delay began when it was put there.
            age = max(0.0, time.time() - changed / 1e9) if seen is None else 0.0
            seen = self._seen[name] = (changed, now - min(age, self._delay))
        return seen[1] + self._delay - now

    def _move(self, name: str, queue: str, message_id: str) -> None:
        if not is_finished(name, self._source):
            return
        target = make_directory(queue, self._destination)
        try:
            if try_rename(name, self._source, message_id, target):
                self._seen.pop(name, None)
        finally:
            os.close(target)


class TrashCleaner:
    """Unlinks every message in a directory.

    Args:
        source: Descriptor of `remove/`.
    """

    def __init__(self, source: int) -> None:
        self._source = source

    async def sweep(self) -> float:
        """Unlink the messages in it, and return the seconds until the next sweep."""
        for name in await list_names(self._source):
            if split_name(name) is None:
                continue
            try:
                os.unlink(name, dir_fd=self._source)
            except FileNotFoundError:
                continue
            except IsADirectoryError:
                log.warning("directory_skipped", name=name)
        return _RESCAN


async def run_daemon(daemon: DelayedMover | TrashCleaner, source: int) -> None:
    """Sweep at every change in `source`, and on a timer, until a signal arrives."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    ended = False

    def end() -> None:
        nonlocal ended
        ended = True
        changed.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    watcher = Watcher(changed.set)
    try:
        watcher.add(source)
        while not ended:
            changed.clear()
            with store_errors("sweep"):
                pause = await daemon.sweep()
            try:
                async with asyncio.timeout(pause):
                    await changed.wait()
            except TimeoutError:
                pass
    finally:
        watcher.close()
