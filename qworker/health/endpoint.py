"""The endpoints at which a worker process reports its health: a port, or the connection to its supervisor."""

from __future__ import annotations

import socket
from typing import Protocol

import structlog

from qworker.asgi.access import read_token
from qworker.health.address import keep_across_exec, listen
from qworker.health.answers import HealthAnswers
from qworker.health.monitor import Monitor

__all__ = ["Endpoint", "HttpEndpoint", "endpoint_for_worker"]


class Endpoint(Protocol):
    """An endpoint that reports the health of a process until it is closed."""

    def close(self) -> None:
        """Stop reporting, because the process ends."""
        ...

    def keep_across_exec(self) -> None:
        """Stop reporting, because a fresh process takes over."""
        ...


class HttpEndpoint:
    """A health port for one process, or for all processes of a supervisor.

    Raises:
        UsageError: The address cannot be used, or the token is not valid.
    """

    def __init__(self, address: tuple[str, int], view: HealthAnswers) -> None:
        # The import is here, because only a process with a health port needs an HTTP server.
        from qworker.health.server import HealthServer

        secret = read_token()
        self._socket: socket.socket = listen(address)
        # The server closes its socket when it ends. The original is for the process that replaces this one.
        self._server = HealthServer(self._socket.dup(), view, token=secret)
        structlog.get_logger("qworker.health").info(
            "health_server_started", port=self._server.port, token=secret is not None
        )

    def close(self) -> None:
        """Close the port."""
        self._server.close()
        self._socket.close()

    def keep_across_exec(self) -> None:
        """Stop answering, but keep the socket open, so that clients wait for the fresh process."""
        self._server.close()
        keep_across_exec(self._socket)


def endpoint_for_worker(watch: Monitor, address: tuple[str, int], stall_timeout: float) -> HttpEndpoint:
    """Return the health port of a worker without a supervisor."""
    return HttpEndpoint(address, HealthAnswers(lambda: [watch.report()], stall_timeout=stall_timeout))
