"""Finished messages that must be as they were found, in queues that are directories."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping

from qworker.message import FinishedMessage, State

__all__ = ["unchanged"]


def unchanged(
    found: Iterable[FinishedMessage], directories: Mapping[State, int], finished_at: Callable[[os.stat_result], float]
) -> Iterator[tuple[State, str, os.stat_result]]:
    """Yield those that are still where and as they were found; each is checked when it is asked for.

    A requeue renames the file away, and a file of the same name that finished later has another time.

    Args:
        found: The messages.
        directories: The descriptors of the directories with the files of finished messages.
        finished_at: The time in Unix seconds at which a file's message finished.

    Yields:
        The state, the file's name and its status.

    Raises:
        OSError: A file's status cannot be read.
    """
    for one in found:
        name, directory = one.location, directories.get(one.state)
        # The location has been in a table that other programs may write to.
        if directory is None or not name or name[0] == "." or "/" in name or "\0" in name:
            continue
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if one.has_finished_at(finished_at(status)):
            yield one.state, name, status
