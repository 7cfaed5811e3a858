"""The commands `qworker mq mover` and `qworker mq reaper`, for roots whose servers run without mq's daemons.

Unlike mq's own daemons they also take messages that were there before they started.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from qworker.errors import UsageError
from qworker.kit.directory.closing import log_replaced
from qworker.kit.directory.place import Place
from qworker.kit.directory.retention import StuckFiles
from qworker.kit.files import is_finished, list_names, make_directory
from qworker.kit.inotify import Watcher
from qworker.kit.opening import open_directory
from qworker.kit.store_errors import STORE_WIDE, store_errors
from qworker.log_events import QUEUE_UNUSABLE
from qworker_mq.layout import split_name, try_rename

__all__ = ["DelayedMover", "FollowedDirectory", "TrashCleaner", "run_daemon"]

# Seconds between listings that no notification caused.
_RESCAN = 1.0

log = structlog.get_logger()


class FollowedDirectory:
    """A directory of a root, which is opened again when it was removed or replaced, alone or with the root.

    Args:
        path: Its path.

    Attributes:
        fd: Its descriptor.
        openings: How often it was opened.

    Raises:
        UsageError: It is not a directory.
        PermissionDenied: This user has no permission to read it.
    """

    def __init__(self, path: Path) -> None:
        self._path = os.path.abspath(path)
        self.openings = 0
        with store_errors(f"open {path}"):
            try:
                self._open(open_directory(self._path))
                root = open_directory("..", self.fd)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise UsageError(f"{path} is not a directory: create it first") from error
            try:
                self._root = Place(os.path.dirname(self._path), root)
            finally:
                os.close(root)

    def _open(self, fd: int) -> None:
        self.fd = fd
        self.openings += 1
        self._place = Place(self._path, fd)

    def is_replaced(self, *, now: bool = False) -> bool:
        """Return whether it was removed or replaced: see `Place.is_replaced`."""
        return self._place.is_replaced(now=now)

    def find_again(self) -> bool:
        """Return whether it is open. If it was replaced, open the one that has its path now, once it exists.

        Raises:
            OSError: That one is in another place than the root was.
        """
        if not self.is_replaced(now=True):
            return True
        self._root.check_replaceable()
        try:
            fd = open_directory(self._path)
        except FileNotFoundError:
            return False
        os.close(self.fd)
        self._open(fd)
        log_replaced(self._path)
        return True

    def close(self) -> None:
        """Close it."""
        os.close(self.fd)


class DelayedMover:
    """Moves files named `<queue>:<id>` to `<destination>/<queue>/<id>`, each after a delay from when it was first seen.

    Args:
        source: `new/` or `delay/`.
        destination: `queues/`.
        delay: Seconds that a file stays in the source.
    """

    def __init__(self, source: FollowedDirectory, destination: FollowedDirectory, delay: float) -> None:
        self.directories = (source, destination)
        self._delay = delay
        # By name: the change time when first seen, and when that was. A file that came back has another change time.
        self._seen: dict[str, tuple[int, float]] = {}
        # The queues that refused their messages in the last sweep, each with the reason. The messages stay.
        self._refused: dict[str, str] = {}

    async def sweep(self) -> float:
        """Move due messages, and return the seconds until the next ones are due."""
        names = await list_names(self.directories[0].fd)
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
                    if error.errno in STORE_WIDE or any(one.is_replaced(now=True) for one in self.directories):
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
            changed = os.stat(name, dir_fd=self.directories[0].fd, follow_symlinks=False).st_ctime_ns
        except FileNotFoundError:
            return None
        seen = self._seen.get(name)
        if seen is None or seen[0] != changed:
            # It was there before the daemon started: its delay began when it was put there.
            age = max(0.0, time.time() - changed / 1e9) if seen is None else 0.0
            seen = self._seen[name] = (changed, now - min(age, self._delay))
        return seen[1] + self._delay - now

    def _move(self, name: str, queue: str, message_id: str) -> None:
        if not is_finished(name, self.directories[0].fd):
            return
        target = make_directory(queue, self.directories[1].fd)
        try:
            if try_rename(name, self.directories[0].fd, message_id, target):
                self._seen.pop(name, None)
        finally:
            os.close(target)


class TrashCleaner:
    """Unlinks every message in a directory.

    Args:
        source: `remove/`.
    """

    def __init__(self, source: FollowedDirectory) -> None:
        self.directories = (source,)
        self._stuck = StuckFiles("mq")

    async def sweep(self) -> float:
        """Unlink the messages in it, and return the seconds until the next sweep."""
        source = self.directories[0].fd
        for name in await list_names(source):
            if split_name(name) is None:
                continue
            try:
                os.unlink(name, dir_fd=source)
            except FileNotFoundError:
                continue
            except IsADirectoryError:
                log.warning("directory_skipped", name=name)
            except OSError as error:
                self._stuck.add(name, error, source)
        return _RESCAN


async def run_daemon(daemon: DelayedMover | TrashCleaner) -> None:
    """Sweep at every change in the daemon's first directory, and on a timer, until a signal arrives."""
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
    source, watched = daemon.directories[0], 0
    try:
        while not ended:
            changed.clear()
            with store_errors("sweep"):
                pause = _RESCAN
                if _find_again(daemon.directories):
                    if watched != source.openings:
                        watched = source.openings
                        watcher.add(source.fd)
                    pause = await _sweep(daemon)
            try:
                async with asyncio.timeout(pause):
                    await changed.wait()
            except TimeoutError:
                pass
    finally:
        watcher.close()
        for directory in daemon.directories:
            directory.close()


def _find_again(directories: Sequence[FollowedDirectory]) -> bool:
    """Return whether all directories are open: all before they were replaced, or all after it.

    Raises:
        OSError: See `FollowedDirectory.find_again`.
    """
    if not any(directory.is_replaced() for directory in directories):
        return True
    return all(directory.find_again() for directory in directories)


async def _sweep(daemon: DelayedMover | TrashCleaner) -> float:
    try:
        return await daemon.sweep()
    except FileNotFoundError:
        if not any(directory.is_replaced(now=True) for directory in daemon.directories):
            raise
        return _RESCAN
