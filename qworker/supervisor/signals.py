"""The signal handlers of a worker process."""

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
        loop: The event loop of the worker.
        signalled: Called on the event loop for a signal to end, and for SIGTSTP.
        show: Called for SIGUSR1 between any two instructions, with the frame that was interrupted.
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
        # The loop does not handle this signal, because the user wants to see what blocks the loop.
        signal.signal(signal.SIGUSR1, lambda _number, frame: self._show(frame))

        deliver_signals()

    def __exit__(self, *_: object) -> None:
        # From here on the process ends, and a late signal must not interrupt that, or its replacement takes the signal.
        hold_signals()
        for number in self._installed:
            self._loop.remove_signal_handler(number)
        # A handler's thread that does not end has its own mask.
        for number in (*self._installed, signal.SIGUSR1):
            signal.signal(number, lambda _number, _frame: None)
