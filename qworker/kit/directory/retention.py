"""Removing finished messages whose retention has ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import structlog

from qworker import log_events as events
from qworker.kit.directory.blocked import is_about_one_file
from qworker.kit.files import list_names, try_unlink
from qworker.kit.retention import RetentionPolicy
from qworker.names import printable

__all__ = ["PRUNING", "StuckFiles", "describe_retention", "prune"]

# Seconds between two checks of a queue's finished messages. Each check lists all of them.
PRUNING = 60.0
# Files that one process remembers as reported.
_MOST = 10_000


class StuckFiles:
    """Files that cannot be removed, such as immutable ones. They keep no other file, and each is reported once.

    Args:
        queue: The name of the queue, or of the directory of several.
    """

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._reported: set[str] = set()

    def add(self, file: str, error: OSError, scratch: int) -> None:
        """Report a file that cannot be removed, if it is new.

        Args:
            file: Its name, after that of its directory.
            error: The error.
            scratch: The descriptor of a directory in which a file may be created and removed.

        Raises:
            OSError: The store failed, not the file.
        """
        if file in self._reported:
            return
        if not is_about_one_file(error, scratch):
            raise error
        if len(self._reported) >= _MOST:
            self._reported.clear()
        self._reported.add(file)
        structlog.get_logger("qworker.directory").error(
            events.REMOVAL_FAILED, queue=self._queue, file=printable(file), reason=error.strerror or str(error)
        )


async def prune(
    directory: int,
    keep: RetentionPolicy,
    now: float,
    *,
    stuck: Callable[[str, OSError], None],
    finished_at: Callable[[os.stat_result], float],
    reason_of: Callable[[str], str] | None = None,
    hidden: bool = False,
) -> int:
    """Remove the messages whose retention has ended, and return their number.

    Args:
        directory: The descriptor of the directory of finished messages.
        keep: The retention policy.
        now: Unix seconds.
        stuck: Called with the name of a file that cannot be removed, and the error. It raises the error if the store
            failed.
        finished_at: Returns when a file's message finished.
        reason_of: Returns the name of the file with the reason of a failed message.
        hidden: True if names that begin with a dot are messages too.

    Raises:
        OSError: The store failed.
    """
    finished: list[tuple[float, str]] = []
    for name in await list_names(directory):
        if name[0] == "." and not hidden:
            continue
        try:
            finished.append((finished_at(os.stat(name, dir_fd=directory, follow_symlinks=False)), name))
        except FileNotFoundError:
            # The message was requeued or removed in the meantime.
            continue
        if len(finished) % 500 == 0:
            await asyncio.sleep(0)
    finished.sort()
    count = 0
    for name in keep.choose_old(finished, now):
        try:
            count += _remove(name, directory, reason_of)
        except OSError as error:
            stuck(name, error)
        if count % 100 == 0:
            await asyncio.sleep(0)
    return count


def describe_retention(done: RetentionPolicy, failed: RetentionPolicy) -> dict[str, str]:
    """Return how long finished messages are kept, as `QueueStats.retention` shows it."""
    return {"done": done.describe(), "failed": failed.describe(), "unfinished_files": "removed after 36 hours"}


def _remove(name: str, directory: int, reason_of: Callable[[str], str] | None) -> bool:
    try:
        os.unlink(name, dir_fd=directory)
    except (FileNotFoundError, IsADirectoryError):
        # It was removed in the meantime, or it is a directory of another program in fail/, which people remove.
        return False
    if reason_of is not None:
        try_unlink(reason_of(name), directory)
    return True
