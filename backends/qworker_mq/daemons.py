"""mq's daemons: the mover brings `queue:id` files to `<destination>/<queue>/<id>`, the reaper unlinks what is to be removed.

Unlike the released ones they take what was there before they started.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from qworker.errors import InvalidName, UsageError
from qworker.kit.files import DIRECTORY, is_finished, list_names
from qworker.kit.inotify import Watcher
from qworker.kit.store_errors import store_errors
from qworker.names import check_id, check_queue

__all__ = ["Mover", "Reaper", "open_source", "run_daemon"]

# Seconds between listings that no notification asked for.
_RESCAN = 1.0

log = structlog.get_logger()


def open_source(path: Path) -> int:
    """A descriptor of a directory that a daemon works on.

    Raises:
        UsageError: it is none.
        PermissionDenied: this user may not.
    """
    with store_errors(f"open {path}"):
        try:
            return os.open(path, DIRECTORY)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UsageError(f"{path} is not a directory: create it first") from error


class Mover:
    """Moves files, each after a delay from when it was first seen.

    Args:
        source: descriptor of `new/` or `delay/`.
        destination: descriptor of `queues/`.
        delay: seconds.
    """

    def __init__(self, source: int, destination: int, delay: float) -> None:
        self._source = source
        self._destination = destination
        self._delay = delay
        # By name: the change time when first seen, and when that was. A file that came back has another change time.
        self._seen: dict[str, tuple[int, float]] = {}

    async def sweep(self) -> float:
        """Move what is due; seconds until more is."""
        names = await list_names(self._source)
        present = set(names)
        for name in [name for name in self._seen if name not in present]:
            del self._seen[name]
        now = time.monotonic()
        soonest = _RESCAN
        for name in names:
            place = _place(name)
            if place is None:
                continue
            rest = self._rest(name, now)
            if rest is not None and rest <= 0:
                self._move(name, *place)
            elif rest is not None:
                soonest = min(soonest, rest)
        return soonest

    def _rest(self, name: str, now: float) -> float | None:
        """Seconds until a file is due; None for one that is gone."""
        if not self._delay:
            return 0.0
        try:
            changed = os.stat(name, dir_fd=self._source, follow_symlinks=False).st_ctime_ns
        except FileNotFoundError:
            return None
        seen = self._seen.get(name)
        if seen is None or seen[0] != changed:
            # Already there when the daemon started: its time began when it was put there.
            age = max(0.0, time.time() - changed / 1e9) if seen is None else 0.0
            seen = self._seen[name] = (changed, now - min(age, self._delay))
        return seen[1] + self._delay - now

    def _move(self, name: str, queue: str, message_id: str) -> None:
        if not is_finished(name, self._source):
            return
        try:
            os.mkdir(queue, 0o700, dir_fd=self._destination)
        except FileExistsError:
            pass
        target = os.open(queue, DIRECTORY | os.O_NOFOLLOW, dir_fd=self._destination)
        try:
            os.rename(name, message_id, src_dir_fd=self._source, dst_dir_fd=target)
        except FileNotFoundError:
            # Another mover, or a delete, was faster.
            return
        finally:
            os.close(target)
        self._seen.pop(name, None)


class Reaper:
    """Unlinks every message in a directory.

    Args:
        source: descriptor of `remove/`.
    """

    def __init__(self, source: int) -> None:
        self._source = source

    async def sweep(self) -> float:
        """Unlink what is there; seconds until the next look."""
        for name in await list_names(self._source):
            if _place(name) is None:
                continue
            try:
                os.unlink(name, dir_fd=self._source)
            except FileNotFoundError:
                continue
            except IsADirectoryError:
                log.warning("directory_skipped", name=name)
        return _RESCAN


async def run_daemon(daemon: Mover | Reaper, source: int, ready: Callable[[], None] | None = None) -> None:
    """Sweep at every change in `source`, and on a timer, until a signal comes."""
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
        if ready is not None:
            ready()
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


def _place(name: str) -> tuple[str, str] | None:
    """The queue and id of `queue:id`; None for what is no message."""
    queue, colon, message_id = name.partition(":")
    if not colon or ":" in message_id:
        return None
    try:
        return check_queue(queue), check_id(message_id)
    except InvalidName:
        return None
