"""Renaming a file to a name at which another program has put a directory."""

from __future__ import annotations

import os

import structlog

from qworker import log_events as events
from qworker.kit.files import hide_directory
from qworker.kit.store_errors import NOT_EMPTY

__all__ = ["rename_file"]


def rename_file(name: str, target: str, source: int, destination: int) -> None:
    """Rename a file. A directory that has the new name is moved aside, so that it holds up no message.

    Args:
        name: Its name.
        target: Its new name.
        source: The descriptor of its directory.
        destination: The descriptor of its new directory.

    Raises:
        OSError: It cannot be renamed.
    """
    try:
        os.rename(name, target, src_dir_fd=source, dst_dir_fd=destination)
    except OSError as error:
        # A directory that moves to the failed messages meets one that is not empty.
        if not isinstance(error, IsADirectoryError) and error.errno not in NOT_EMPTY:
            raise
        hidden = hide_directory(target, destination)
        if hidden is not None:
            structlog.get_logger("qworker.directory").warning(
                events.DIRECTORY_MOVED_ASIDE, name=target, moved_to=hidden
            )
        os.rename(name, target, src_dir_fd=source, dst_dir_fd=destination)
