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
from qworker.supervisor.control_socket import CONTROL_FD, Command, Line, Ready
from qworker.supervisor.reexec import command_line

__all__ = ["Child", "Slot"]

# A process that was ready for so many seconds began well: whatever has ended it, the next one may begin at once.
_STABLE_S = 1.0
_BACKOFF = Backoff(initial=0.5, maximum=30.0)


class Child:
    """A worker process that has been started and not yet reaped.

    It leads a process group of its own, so that Ctrl-C and a terminal's signals reach it through the supervisor only.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now: Callable[[], float],
        on_ready: Callable[[Ready], None],
        on_report: Callable[[int, WorkerReport], None],
    ) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                command_line(),
                env={**os.environ, CONTROL_FD: str(theirs.fileno())},
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
        # Monotonic seconds at which it had reached its backend.
        self.ready_at: float | None = None
        # It was told to end.
        self.ending = False
        self._line = ours
        self._loop = loop
        self._now = now
        self._on_ready = on_ready
        self._on_report = on_report
        self._received = b""
        loop.add_reader(ours, self._read)

    def tell(self, command: Command) -> None:
        """Send a command. A process that is about to be reaped hears nothing, and need not."""
        if command in {Command.DRAIN, Command.ABORT}:
            self.ending = True
        try:
            self._line.send(command.value)
        except (BrokenPipeError, ConnectionResetError, BlockingIOError):
            # Blocked: it has not read thousands of commands, and the deadline that follows the first ones will end it.
            pass

    def kill(self) -> None:
        """End it now. It is not reaped yet, so that its id is its own."""
        os.kill(self.pid, signal.SIGKILL)

    def reaped(self, code: int) -> None:
        """Forget it: the kernel has."""
        # Popen would otherwise wait for it again, and warn.
        self._process.returncode = code
        # Its last report may still be on the line.
        while self._read():
            pass
        self._loop.remove_reader(self._line)
        self._line.close()

    def _read(self) -> bool:
        """Take what has come; False: nothing has."""
        try:
            received = self._line.recv(65536)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            received = b""
        if not received:
            # Its end is closed: SIGCHLD says the rest. A readable end of file would only spin.
            self._loop.remove_reader(self._line)
            return False
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            said: Line = msgspec.json.decode(line, type=Line)
            if isinstance(said, Ready):
                self.ready_at = self._now()
                self._on_ready(said)
            else:
                self._on_report(self.pid, said)
        return True


class Slot:
    """A place for one worker process, and when it may be filled again."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.child: Child | None = None
        # Monotonic seconds before which no process is started here.
        self.not_before = 0.0
        # With `burst`: its process found nothing more to do.
        self.finished = False
        self._failures = 0

    def emptied(self, now: float, *, crashed: bool, draw: float) -> float:
        """Its process is gone: the seconds until the next one starts.

        Args:
            now: monotonic seconds.
            crashed: whether it ended badly.
            draw: uniform from [0, 1), so that processes that crash together do not start together.
        """
        child, self.child = self.child, None
        stable = child is not None and child.ready_at is not None and now - child.ready_at >= _STABLE_S
        if stable:
            self._failures = 0
        delay = 0.0
        if crashed or not stable:
            self._failures += 1
            # At least half of the ceiling: a crash at the start must not become a busy loop.
            delay = _BACKOFF.max_delay(self._failures) * (0.5 + draw / 2)
        self.not_before = now + delay
        return delay
