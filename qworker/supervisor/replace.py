"""Becoming a fresh process: the same command line, the same process id, none of the memory.

A process that replaces itself needs no supervisor for `--max-messages`, `--max-memory` and `--reload`.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

__all__ = ["command_line", "replace_process"]


def command_line() -> list[str]:
    """The arguments that started this interpreter."""
    return [sys.executable, *sys.orig_argv[1:]]


def replace_process() -> NoReturn:
    """Begin again. Threads end here; descriptors close, unless they were made inheritable."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command_line())
