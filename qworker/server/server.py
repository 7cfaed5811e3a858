"""A uvicorn server for `create_app`: bounded connections, loopback unless there is a token, and a clean end."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn

from qworker.errors import BackendUnavailable, UsageError
from qworker.server.app import MqApp
from qworker.server.limits import LimitedProtocol, limited_protocol

__all__ = ["bind", "require_token_if_public", "serve"]

# Seconds that requests under way may take after the first signal.
_GRACE = 30
_BACKLOG = 2048


def require_token_if_public(host: str, token: str | None) -> None:
    """Refuse to listen beyond this machine without a token.

    Raises:
        UsageError: `host` is no loopback address, and there is no token.
    """
    if token is None and not _is_loopback(host):
        raise UsageError(f"listening on {host} requires a token: set QWORKER_HTTP_TOKEN, or listen on 127.0.0.1")
    if token is not None and (len(token) < 8 or not token.isascii() or not token.isprintable()):
        raise UsageError("QWORKER_HTTP_TOKEN must have at least 8 printable ASCII characters")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Raises:
        BackendUnavailable: The address cannot be used.
        UsageError: The port is none.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"the port must be from 0 to 65535 (got {port})")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol by its number: asyncio sets TCP_NODELAY only where it sees it, and without that an answer with a body takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Whoever connects before the server is ready waits.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise BackendUnavailable(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):
    """uvicorn's server, except that it does not send itself again the signal that ended it.

    That would kill the process, with an exit status of failure, before the backend is closed.
    """

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle the signals on the loop, where this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


async def serve(
    app: MqApp,
    listener: socket.socket,
    *,
    protocol: type[LimitedProtocol] | None = None,
    ready: Callable[[uvicorn.Server], None] | None = None,
) -> None:
    """Serve until a signal comes, or the server that `ready` was given is told to exit; then close the backend.

    Args:
        app: What answers.
        listener: From `bind`; closed at the end.
        protocol: The bounds; None: the defaults.
        ready: Called once the backend is open, before the first connection is taken.
    """
    config = uvicorn.Config(
        app,
        http=protocol or limited_protocol(),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE,
    )
    server = _Server(config)
    try:
        # Before the server takes a connection, and so that a store that cannot be reached is told as such.
        await app.start()
        if ready is not None:
            ready(server)
        await server.serve(sockets=[listener])
    finally:
        listener.close()
        await app.stop()
        await app.backend.aclose()
