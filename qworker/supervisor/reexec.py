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

from qworker.streams import flush_all

__all__ = ["DRAIN_SIGNALS", "command_line", "deliver_signals", "hold_signals", "is_replacement", "replace_process"]

DRAIN_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HELD = {*DRAIN_SIGNALS, signal.SIGTSTP, signal.SIGUSR1}
# The environment variable that tells a process that it goes on with another one's work.
_REPLACES_PROCESS = "QWORKER_REPLACES_PROCESS"


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


def is_replacement() -> bool:
    """Whether this process has replaced one that worked."""
    # Taken out of the environment: a qworker that a handler starts has replaced nobody.
    return os.environ.pop(_REPLACES_PROCESS, None) is not None


def replace_process(*, worked: bool = False) -> NoReturn:
    """Begin again. Threads end here; descriptors close, unless they were made inheritable.

    Args:
        worked: this process has reached its backend: the one that replaces it does not end where that is away for a moment.
    """
    if worked:
        os.environ[_REPLACES_PROCESS] = "1"
    hold_signals()
    flush_all()
    os.execv(sys.executable, command_line())
