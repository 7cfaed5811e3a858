"""The line between a supervisor and one worker process: a socket pair whose worker's end is inherited.

The supervisor sends single bytes (`Command`). The end of the stream means that it is dead. The worker sends JSON lines: one
`Ready` when it has reached its backend, and with `--health` a `WorkerReport` now and then. Signals alone would not do: a process group's SIGTERM reaches the worker directly and
through its supervisor, and must not count as two.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from enum import Enum

import msgspec

from qworker.health.worker_report import WorkerReport
from qworker.kit.linux import set_parent_death_signal

__all__ = ["CONTROL_FD", "Command", "ControlEnd", "Line", "Ready", "inherited"]

# The environment variable that tells a process that it is a supervisor's worker.
CONTROL_FD = "QWORKER_CONTROL_FD"


class Command(Enum):
    """What a supervisor asks of a worker process."""

    DRAIN = b"d"
    ABORT = b"a"
    QUIET = b"q"
    REPORT = b"s"
    # Drain, then begin again as a fresh process under the same id.
    RECYCLE = b"r"


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A worker process is up."""

    url: str
    queues: list[str]
    concurrency: int


Line = Ready | WorkerReport


class ControlEnd:
    """The worker's end. A thread listens, so that the supervisor's death is noticed while a handler blocks the loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._listener: threading.Thread | None = None
        # Reports come from a thread of their own; lines must not mix.
        self._sending = threading.Lock()

    def send(self, line: Line) -> None:
        """Tell the supervisor, from any thread; its death is the listener's business."""
        try:
            with self._sending:
                self._socket.sendall(msgspec.json.encode(line) + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            pass

    def listen(self, obey: Callable[[Command], None], orphaned: Callable[[], None]) -> None:
        """Call `obey` for each command and `orphaned` at the supervisor's death, both in a thread of their own."""
        self._listener = threading.Thread(
            target=self._listen, args=(obey, orphaned), name="qworker-control", daemon=True
        )
        self._listener.start()

    def _listen(self, obey: Callable[[Command], None], orphaned: Callable[[], None]) -> None:
        while True:
            try:
                received = self._socket.recv(64)
            except ConnectionResetError:
                received = b""
            if not received:
                orphaned()
                return
            for byte in received:
                obey(Command(bytes([byte])))

    def keep_across_exec(self) -> None:
        """Let the process that replaces this one inherit the line."""
        os.set_inheritable(self._socket.fileno(), True)
        os.environ[CONTROL_FD] = str(self._socket.fileno())


def inherited() -> ControlEnd | None:
    """The line to this process's supervisor; None without one."""
    # Taken out of the environment: a qworker that a handler starts is nobody's worker.
    number = os.environ.pop(CONTROL_FD, None)
    if number is None:
        return None
    sock = socket.socket(fileno=int(number))
    # Not for the processes that handlers start: an inherited end would hide this process's death.
    sock.set_inheritable(False)
    # The signal arrives even before anything listens to the line. Without Linux the end of the stream alone tells.
    set_parent_death_signal(signal.SIGTERM)
    return ControlEnd(sock)
