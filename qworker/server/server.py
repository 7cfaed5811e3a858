"""The server of `qworker serve`: its socket, a required token beyond loopback, and a clean shutdown."""

from __future__ import annotations

import socket
from collections.abc import Callable

from qworker.asgi.limits import LimitedProtocol, limited_protocol
from qworker.asgi.server import Server
from qworker.errors import BackendUnavailable, UsageError
from qworker.kit.network import is_loopback
from qworker.server.app import MqApp

__all__ = ["bind", "require_token_if_public", "serve"]

_BACKLOG = 2048


def require_token_if_public(host: str, token: str | None) -> None:
    """Refuse to listen beyond this machine without a token.

    Raises:
        UsageError: `host` is not a loopback address, and there is no token.
    """
    if token is None and not is_loopback(host):
        raise UsageError(f"listening on {host} requires a token: set QWORKER_HTTP_TOKEN, or listen on 127.0.0.1")
    if token is not None and (len(token) < 8 or not token.isascii() or not token.isprintable()):
        raise UsageError("QWORKER_HTTP_TOKEN must have at least 8 printable ASCII characters")


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0 takes a free port.

    Raises:
        BackendUnavailable: The address cannot be used.
        UsageError: The port is not valid.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"the port must be from 0 to 65535 (got {port})")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the socket has the protocol's number. Without TCP_NODELAY, a response with a body
    # takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Clients that connect before the server is ready wait.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise BackendUnavailable(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


async def serve(
    app: MqApp,
    listener: socket.socket,
    *,
    protocol: type[LimitedProtocol] | None = None,
    ready: Callable[[Server], None] | None = None,
) -> None:
    """Serve until a signal arrives, or until the server that `ready` gets is stopped. Then close the backend.

    Args:
        app: The application.
        listener: The socket from `bind`, which is closed at the end.
        protocol: The limits. None: the defaults.
        ready: A function that is called when the backend is open, before the first connection is accepted.
    """
    server = Server(app, protocol or limited_protocol())
    try:
        # The backend is opened first, so that the error is the one of a store that cannot be reached.
        await app.start()
        if ready is not None:
            ready(server)
        await server.serve(sockets=[listener])
    finally:
        listener.close()
        await app.stop()
        await app.backend.aclose()
