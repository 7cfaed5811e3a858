"""The connection between a supervisor and one worker process: a socket pair, of which the worker inherits one end.

The supervisor sends single bytes (`WorkerCommand`). The end of the stream means that it is dead. The worker sends JSON
lines: one `WorkerReady` when it has opened its queues, and with `--health` a `WorkerReport` at intervals. Signals
alone are not enough: a process group's SIGTERM reaches the worker directly and through its supervisor, and must not
count twice.
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

__all__ = ["CONTROL_FD", "ControlClient", "Line", "WorkerCommand", "WorkerReady", "control_client_from_env"]

# Set in the environment of a supervisor's worker process.
CONTROL_FD = "QWORKER_CONTROL_FD"


class WorkerCommand(Enum):
    """A command of a supervisor to a worker process."""

    DRAIN = b"d"
    ABORT = b"a"
    QUIET = b"q"
    DUMP_STATUS = b"s"
    # Drain, then start again as a fresh process under the same id.
    RECYCLE = b"r"


class WorkerReady(msgspec.Struct, frozen=True, tag="Ready"):
    """A worker process is up. Its tag is part of the protocol: the two processes may run different releases."""

    url: str
    queues: list[str]
    concurrency: int


Line = WorkerReady | WorkerReport


class ControlClient:
    """The worker's end. A thread listens, so it notices the supervisor's death even if a handler blocks the loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._listener: threading.Thread | None = None
        # Reports come from another thread, and lines must not mix.
        self._sending = threading.Lock()

    def send(self, line: Line) -> None:
        """Send a line to the supervisor, from any thread. The listener handles its death."""
        try:
            with self._sending:
                self._socket.sendall(msgspec.json.encode(line) + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            pass

    def listen(self, obey: Callable[[WorkerCommand], None], orphaned: Callable[[], None]) -> None:
        """Call `obey` for each command, and `orphaned` when the supervisor dies, in a separate thread."""
        self._listener = threading.Thread(
            target=self._listen, args=(obey, orphaned), name="qworker-control", daemon=True
        )
        self._listener.start()

    def _listen(self, obey: Callable[[WorkerCommand], None], orphaned: Callable[[], None]) -> None:
        while True:
            try:
                received = self._socket.recv(64)
            except ConnectionResetError:
                received = b""
            if not received:
                orphaned()
                return
            for byte in received:
                obey(WorkerCommand(bytes([byte])))

    def keep_across_exec(self) -> None:
        """Let the process that replaces this one inherit the socket."""
        os.set_inheritable(self._socket.fileno(), True)
        os.environ[CONTROL_FD] = str(self._socket.fileno())


def control_client_from_env() -> ControlClient | None:
    """Return the connection to this process's supervisor, or None if it has none."""
    # The variable is removed, because a qworker that a handler starts is not a worker of this supervisor.
    number = os.environ.pop(CONTROL_FD, None)
    if number is None:
        return None
    sock = socket.socket(fileno=int(number))
    # The processes that handlers start must not inherit it: that would hide this process's death.
    sock.set_inheritable(False)
    # The signal arrives even before a thread listens. On other systems only the end of the stream shows the death.
    set_parent_death_signal(signal.SIGTERM)
    return ControlClient(sock)
