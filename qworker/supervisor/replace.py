"""Becoming a fresh process: the same command line, the same process id, none of the memory.

A process that replaces itself needs no supervisor for `--max-messages`, `--max-memory` and `--reload`. Signals that arrive on the way
are held back by the mask, which the fresh process inherits, and are delivered to it when it is ready for them.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

__all__ = ["DRAIN_SIGNALS", "command_line", "deliver_signals", "hold_signals", "replace_process"]

DRAIN_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HELD = {*DRAIN_SIGNALS, signal.SIGTSTP, signal.SIGUSR1}


def command_line() -> list[str]:
    """The arguments that started this interpreter."""
    return [sys.executable, *sys.orig_argv[1:]]


def hold_signals() -> None:
    """Let what arrives from now on wait for `deliver_signals`, here or in the process that replaces this one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)


def deliver_signals(*, early: bool = False) -> None:
    """Take what was held back.

    Args:
        early: nothing has begun yet: SIGTERM simply ends the process, cleanly.
    """
    if early:
        signal.signal(signal.SIGTERM, _end_early)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)


def _end_early(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def replace_process() -> NoReturn:
    """Begin again. Threads end here; descriptors close, unless they were made inheritable."""
    hold_signals()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command_line())
