"""The root directory, and the number of leases that a process may have."""

from __future__ import annotations

import os

import structlog

from qworker import log_events as events
from qworker.kit.files import raise_file_limit
from qworker.kit.opening import open_directory

__all__ = ["most_leases", "open_root", "warn_of_limit"]

# Files that a worker has open in addition to its leases, at least.
_OTHERS = 40


def open_root(directory: str, mode: int) -> int:
    """Open a directory, which is created with `mode` if it does not exist.

    Raises:
        OSError: It cannot be opened.
    """
    try:
        return open_directory(directory)
    except FileNotFoundError:
        os.makedirs(directory, mode, exist_ok=True)
        return open_directory(directory)


def most_leases() -> int:
    """Return how many leases this process may have. Each holds a file open.

    Half of all files are kept for other uses.
    """
    limit = raise_file_limit()
    return max(1, min(limit // 2, limit - _OTHERS))


def warn_of_limit(limit: int) -> None:
    """Log that this process holds as many leases as it may."""
    structlog.get_logger("qworker.file").warning(
        events.CONCURRENCY_LIMITED,
        limit=limit,
        reason="each running message keeps a file open: raise the limit of open files (ulimit -n, LimitNOFILE=)",
    )
