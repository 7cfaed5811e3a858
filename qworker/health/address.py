"""`HOST:PORT`: parse it, listen there, and keep the socket when a process replaces itself."""

from __future__ import annotations

import os
import socket

from qworker.errors import UsageError
from qworker.names import printable

__all__ = ["keep_across_exec", "listen", "loopback_for", "parse_address"]

# Set to the descriptor of the listening socket when this process replaces another one.
_FD = "QWORKER_HEALTH_FD"
_BACKLOG = 128
_EVERYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `127.0.0.1:9090`, `[::1]:9090`, or `:9090` for all addresses.

    Raises:
        UsageError: The text is not a valid HOST:PORT.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise UsageError(
            f"{printable(text)!r} is not a valid HOST:PORT: use 127.0.0.1:9090, [::1]:9090, or :9090 for all addresses"
        )
    return host, int(port)


def loopback_for(host: str) -> str:
    """Return the host at which this machine reaches a server that listens on `host`."""
    return _EVERYWHERE.get(host, host)


def listen(address: tuple[str, int]) -> socket.socket:
    """Return a listening socket. If this process has replaced another one, it is the socket of that one.

    Raises:
        UsageError: The address cannot be used.
    """
    kept = os.environ.pop(_FD, None)
    if kept is not None:
        sock = socket.socket(fileno=int(kept))
        sock.set_inheritable(False)
        return sock
    host, port = address
    family = socket.AF_INET6 if ":" in host or (not host and socket.has_dualstack_ipv6()) else socket.AF_INET
    try:
        return socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=not host and family == socket.AF_INET6
        )
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--health {host}:{port}: cannot listen there: {error}") from error


def keep_across_exec(sock: socket.socket) -> None:
    """Pass the socket on to the process that replaces this one. Clients that connect meanwhile wait."""
    os.set_inheritable(sock.fileno(), True)
    os.environ[_FD] = str(sock.fileno())
