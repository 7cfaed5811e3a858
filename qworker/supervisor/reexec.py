"""Re-exec: become a fresh process with the same command line and the same process id, but none of the memory.

A process that replaces itself needs no supervisor for `--max-messages`, `--max-memory` and `--reload`. The signal mask
holds back signals that arrive meanwhile. The fresh process inherits the mask, and takes the signals when it is ready.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

from qworker.streams import flush_all

__all__ = [
    "COMMAND_START",
    "DRAIN_SIGNALS",
    "command_line",
    "command_start",
    "deliver_signals",
    "hold_signals",
    "is_replacement",
    "replace_process",
]

DRAIN_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HELD = {*DRAIN_SIGNALS, signal.SIGTSTP, signal.SIGUSR1}
# Set when this process replaces another one.
_REPLACES_PROCESS = "QWORKER_REPLACES_PROCESS"
# The monotonic time at which the command started. All processes of a machine have the same monotonic clock.
COMMAND_START = "QWORKER_COMMAND_START"


def command_line() -> list[str]:
    """Return the arguments that started this interpreter."""
    return [sys.executable, *sys.orig_argv[1:]]


def hold_signals() -> None:
    """Hold back signals until `deliver_signals`, here or in the process that replaces this one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)


def deliver_signals(*, early: bool = False) -> None:
    """Take the signals that were held back.

    Args:
        early: Whether no work has started, so that SIGTERM ends the process at once, with status 0.
    """
    if early:
        signal.signal(signal.SIGTERM, _end_early)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)


def _end_early(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def is_replacement() -> bool:
    """Return whether this process has replaced one that had reached its backend."""
    # Removed from the environment: a qworker that a handler starts has replaced no process.
    return os.environ.pop(_REPLACES_PROCESS, None) is not None


def command_start() -> float:
    """Return the monotonic seconds at which the command started whose process this is, or which it replaces."""
    # Removed from the environment: a qworker that a handler starts is a command of its own.
    try:
        return float(os.environ.pop(COMMAND_START, ""))
    except ValueError:
        return time.monotonic()


def replace_process(*, worked: bool = False, started: float | None = None) -> NoReturn:
    """Start again. Threads end here, and descriptors close unless they are inheritable.

    Args:
        worked: Whether this process has reached its backend. Then the next one waits if the backend is unavailable.
        started: The start of the command, which stays that of the next process. None: the next one is a new start.
    """
    if worked:
        os.environ[_REPLACES_PROCESS] = "1"
    if started is not None:
        os.environ[COMMAND_START] = repr(started)
    hold_signals()
    flush_all()
    os.execv(sys.executable, command_line())
