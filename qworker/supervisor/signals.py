"""A worker process's signals: which of them reach it, when, and by which way."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import FrameType

from qworker.supervisor.reexec import DRAIN_SIGNALS, deliver_signals, hold_signals

__all__ = ["Signals"]


class Signals:
    """The process's signal handlers while the worker runs.

    Args:
        loop: the worker's.
        signalled: told on the loop of a signal to end, or of SIGTSTP.
        show: told of SIGUSR1 between any two instructions, with what was about to run.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        signalled: Callable[[int], None],
        show: Callable[[FrameType | None], None],
    ) -> None:
        self._loop = loop
        self._signalled = signalled
        self._show = show
        self._installed: list[signal.Signals] = []

    def __enter__(self) -> None:
        for number in (*DRAIN_SIGNALS, signal.SIGTSTP):
            # nohup ignores SIGHUP on purpose.
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._loop.add_signal_handler(number, self._signalled, number)
            self._installed.append(number)
        # Not by the loop: what blocks it is what one wants to see.
        signal.signal(signal.SIGUSR1, lambda _number, frame: self._show(frame))

        deliver_signals()

    def __exit__(self, *_: object) -> None:
        # From here on the process ends, which a late signal must not cut short, or is replaced by one that takes it.
        hold_signals()
        for number in self._installed:
            self._loop.remove_signal_handler(number)
        # A handler's thread that does not end has a mask of its own.
        for number in (*self._installed, signal.SIGUSR1):
            signal.signal(number, lambda _number, _frame: None)
