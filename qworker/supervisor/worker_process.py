"""The supervisor's view of one worker process, and of the slot that it fills."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable

import msgspec

from qworker.health.worker_report import WorkerReport
from qworker.retry import Backoff
from qworker.supervisor.control_socket import CONTROL_FD, Line, WorkerCommand, WorkerReady
from qworker.supervisor.reexec import COMMAND_START, command_line

__all__ = ["Slot", "WorkerProcess"]

# Seconds. If a process was ready for this time before it ended, the next one can start at once; after a crash, for the
# second time: one message that kills its worker costs no pause, and a crash at the start does not become a busy loop.
_STABLE_S = 1.0
_LONG_S = 5.0
_BACKOFF = Backoff(initial=0.5, maximum=30.0)


def _start(started: float | None) -> dict[str, str]:
    return {} if started is None else {COMMAND_START: repr(started)}


class WorkerProcess:
    """A worker process that has been started and not yet reaped.

    It leads its own process group, so Ctrl-C and a terminal's signals reach it only through the supervisor.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now: Callable[[], float],
        on_ready: Callable[[WorkerReady], None],
        on_report: Callable[[int, WorkerReport], None],
        started: float | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                command_line(),
                env={**os.environ, **_start(started), CONTROL_FD: str(theirs.fileno())},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self.pid = self._process.pid
        # Monotonic seconds at which it had opened its queues.
        self.ready_at: float | None = None
        # Whether it was asked to end.
        self.ending = False
        self._line = ours
        self._loop = loop
        self._now = now
        self._on_ready = on_ready
        self._on_report = on_report
        self._received = b""
        loop.add_reader(ours, self._read)

    def send(self, command: WorkerCommand) -> None:
        """Send a command. A process that has died and is not reaped yet does not get it."""
        if command in {WorkerCommand.DRAIN, WorkerCommand.ABORT}:
            self.ending = True
        try:
            self._line.send(command.value)
        except (BrokenPipeError, ConnectionResetError, BlockingIOError):
            # Blocked: it has not read thousands of commands. The deadline of the first ones will end it.
            pass

    def kill(self) -> None:
        """Kill it. Its id is still its own, because it is not reaped yet."""
        os.kill(self.pid, signal.SIGKILL)

    def mark_reaped(self, code: int) -> None:
        """Release its resources after the kernel has."""
        # Popen would otherwise wait for it again, and warn.
        self._process.returncode = code
        # Its last report may still be in the socket.
        while self._read():
            pass
        self._loop.remove_reader(self._line)
        self._line.close()

    def _read(self) -> bool:
        """Read the lines that have arrived. Return False if there are none."""
        try:
            received = self._line.recv(65536)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            received = b""
        if not received:
            # Its end is closed, and SIGCHLD follows. A readable end of file would only spin.
            self._loop.remove_reader(self._line)
            return False
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            said: Line = msgspec.json.decode(line, type=Line)
            if isinstance(said, WorkerReady):
                self.ready_at = self._now()
                self._on_ready(said)
            else:
                self._on_report(self.pid, said)
        return True


class Slot:
    """A place for one worker process, with the time at which the next one may start."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: WorkerProcess | None = None
        # Monotonic seconds before which no process is started here.
        self.not_before = 0.0
        # With `burst`: whether its process found nothing more to do.
        self.finished = False
        self._failures = 0

    def on_process_exit(self, now: float, *, crashed: bool, draw: float) -> float:
        """Remove the process, which has ended. Return the seconds until the next one starts.

        Args:
            now: Monotonic seconds.
            crashed: Whether the process failed.
            draw: A uniform number from [0, 1), so that processes that crash together do not start together.
        """
        process, self.process = self.process, None
        lived = 0.0 if process is None or process.ready_at is None else now - process.ready_at
        if lived >= _STABLE_S:
            self._failures = 0
        delay = 0.0
        if lived < (_LONG_S if crashed else _STABLE_S):
            self._failures += 1
            # At least half of the maximum.
            delay = _BACKOFF.max_delay(self._failures) * (0.5 + draw / 2)
        self.not_before = now + delay
        return delay
