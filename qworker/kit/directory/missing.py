"""Whether a store's directory exists, and the error if it does not."""

from __future__ import annotations

import os
from pathlib import Path

from qworker.errors import QueueNotFound, StoreNotFound

__all__ = ["is_missing", "queue_not_found", "require_directory"]


def is_missing(directory: Path | None) -> bool:
    """Return whether a store's directory does not exist.

    Args:
        directory: `Backend.directory`. None: the store is not a directory, and so not missing.
    """
    if directory is None:
        return False
    try:
        os.stat(directory, follow_symlinks=False)
    except FileNotFoundError:
        return True
    except OSError:
        # This cannot be known without opening it, which reports the reason.
        return False
    return False


def require_directory(directory: Path | None, queue: str = "") -> None:
    """Refuse a store whose directory does not exist.

    Args:
        directory: `Backend.directory`.
        queue: The queue that is requested. Empty: no particular one.

    Raises:
        StoreNotFound: The directory does not exist.
    """
    if directory is not None and is_missing(directory):
        raise StoreNotFound(str(directory), queue)


def queue_not_found(queue: str, directory: Path | None) -> QueueNotFound:
    """Return the error that says why the queue does not exist.

    Args:
        queue: The queue's name.
        directory: `Backend.directory`.
    """
    if directory is not None and is_missing(directory):
        return StoreNotFound(str(directory), queue)
    return QueueNotFound(queue)
