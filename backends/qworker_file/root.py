"""A root directory: what the stores of `file:` and `fsq:` begin with."""

from __future__ import annotations

import os

from qworker.files import DIRECTORY

__all__ = ["open_root"]


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
