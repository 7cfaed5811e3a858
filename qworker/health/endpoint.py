"""Where a worker process tells of itself: its own port, or the line to its supervisor."""

from __future__ import annotations

import os
import socket
from typing import Protocol

import structlog

from qworker.errors import UsageError
from qworker.health.address import keep_across_exec, listen
from qworker.health.answers import View
from qworker.health.monitor import Watch
from qworker.health.server import HealthServer

__all__ = ["TOKEN", "Outlet", "Port", "of_worker", "token"]

TOKEN = "QWORKER_HTTP_TOKEN"


class Outlet(Protocol):
    """Tells of a process until it is closed."""

    def close(self) -> None:
        """The process ends."""
        ...

    def keep_across_exec(self) -> None:
        """A fresh process is about to take over."""
        ...


class Port:
    """A port that speaks for a process, or, with a supervisor's view, for several.

    Raises:
        UsageError: the address cannot be had, or the token is empty.
    """

    def __init__(self, address: tuple[str, int], view: View) -> None:
        secret = token()
        self._socket: socket.socket = listen(address)
        # The server closes its socket when it ends: a fresh process gets this one.
        self._server = HealthServer(self._socket.dup(), view, token=secret)
        structlog.get_logger("qworker.health").info(
            "health_server_started", port=self._server.port, token=secret is not None
        )

    def close(self) -> None:
        """Answer no more."""
        self._server.close()
        self._socket.close()

    def keep_across_exec(self) -> None:
        """Let whoever asks meanwhile wait for the fresh process."""
        self._server.close()
        keep_across_exec(self._socket)


def of_worker(watch: Watch, address: tuple[str, int], stall_timeout: float) -> Port:
    """The port of a worker without a supervisor."""
    return Port(address, View(lambda: [watch.report()], stall_timeout=stall_timeout))


def token() -> str | None:
    """What `/metrics` and `/stats` ask for.

    Raises:
        UsageError: it is empty.
    """
    given = os.environ.get(TOKEN)
    if given == "":
        raise UsageError(f"{TOKEN} is empty: set a token or unset the variable")
    return given
