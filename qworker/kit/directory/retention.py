"""Removing finished messages whose retention has ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from qworker.kit.files import list_names, try_unlink
from qworker.kit.retention import RetentionPolicy

__all__ = ["PRUNING", "describe_retention", "prune"]

# Seconds between two checks of a queue's finished messages. Each check lists all of them.
PRUNING = 60.0


async def prune(
    directory: int,
    keep: RetentionPolicy,
    now: float,
    *,
    finished_at: Callable[[os.stat_result], float],
    reason_of: Callable[[str], str] | None = None,
    hidden: bool = False,
) -> int:
    """Remove the messages whose retention has ended, and return their number.

    Args:
        directory: The descriptor of the directory of finished messages.
        keep: The retention policy.
        now: Unix seconds.
        finished_at: Returns when a file's message finished.
        reason_of: Returns the name of the file with the reason of a failed message.
        hidden: True if names that begin with a dot are messages too.

    Raises:
        OSError: Something cannot be removed.
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
        count += _remove(name, directory, reason_of)
        if count % 100 == 0:
            await asyncio.sleep(0)
    return count


def describe_retention(done: RetentionPolicy, failed: RetentionPolicy) -> dict[str, str]:
    """Return how long finished messages are kept, as `QueueStats.retention` shows it."""
    return {"done": done.describe(), "failed": failed.describe(), "unfinished": "removed after 36 hours"}


def _remove(name: str, directory: int, reason_of: Callable[[str], str] | None) -> bool:
    try:
        os.unlink(name, dir_fd=directory)
    except (FileNotFoundError, IsADirectoryError):
        # It was removed in the meantime, or it is a directory of another program in fail/, which people remove.
        return False
    if reason_of is not None:
        try_unlink(reason_of(name), directory)
    return True
