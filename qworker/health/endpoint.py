"""Where a worker process tells of itself: its own port, or the line to its supervisor."""

from __future__ import annotations

import os
import socket
from typing import Protocol

import structlog

from qworker.errors import UsageError
from qworker.health.address import keep_across_exec, listen
from qworker.health.answers import HealthAnswers
from qworker.health.monitor import Monitor
from qworker.health.server import HealthServer

__all__ = ["TOKEN", "Endpoint", "HttpEndpoint", "endpoint_for_worker", "read_token"]

TOKEN = "QWORKER_HTTP_TOKEN"


class Endpoint(Protocol):
    """Tells of a process until it is closed."""

    def close(self) -> None:
        """The process ends."""
        ...

    def keep_across_exec(self) -> None:
        """A fresh process is about to take over."""
        ...


class HttpEndpoint:
    """A port that speaks for a process, or, with a supervisor's view, for several.

    Raises:
        UsageError: The address cannot be had, or the token is empty.
    """

    def __init__(self, address: tuple[str, int], view: HealthAnswers) -> None:
        secret = read_token()
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


def endpoint_for_worker(watch: Monitor, address: tuple[str, int], stall_timeout: float) -> HttpEndpoint:
    """Return the port of a worker without a supervisor."""
    return HttpEndpoint(address, HealthAnswers(lambda: [watch.report()], stall_timeout=stall_timeout))


def read_token() -> str | None:
    """Return what `/metrics` and `/stats` ask for.

    Raises:
        UsageError: It is empty.
    """
    given = os.environ.get(TOKEN)
    if given == "":
        raise UsageError(f"{TOKEN} is empty: set a token or unset the variable")
    return given
