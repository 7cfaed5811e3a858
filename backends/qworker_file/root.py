"""A root directory and this process's limit of open files: what the stores of `file:` and `fsq:` begin with."""

from __future__ import annotations

import os
import resource

from qworker.files import DIRECTORY

__all__ = ["open_root", "raise_file_limit"]


def open_root(directory: str, mode: int) -> int:
    """Open a directory, which is made with `mode` if it is absent.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        return os.open(directory, DIRECTORY)
    except FileNotFoundError:
        os.makedirs(directory, mode, exist_ok=True)
        return os.open(directory, DIRECTORY)


def raise_file_limit() -> int:
    """Let this process have as many open files as it may; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            # Refused (some systems cap an unlimited one): what there is must do.
            return soft
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard
