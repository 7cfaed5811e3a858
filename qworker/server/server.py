"""The server of `qworker serve`: its socket and a clean shutdown."""

from __future__ import annotations

import socket
from collections.abc import Callable

from qworker.asgi.limits import LimitedProtocol, limited_protocol
from qworker.asgi.server import Server
from qworker.server.app import MqApp

__all__ = ["serve"]


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
    server = Server(app, protocol or limited_protocol(), on_end=app.end_polls)
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
