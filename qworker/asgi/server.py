"""uvicorn's server for an ASGI application: on the running event loop, or in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn

from qworker.asgi.interface import ASGIApp
from qworker.asgi.limits import LimitedProtocol
from qworker.errors import BackendUnavailable, UsageError
from qworker.names import printable

__all__ = ["Server", "ServerThread", "bind", "bind_unix"]

# Seconds that running requests get after the first signal.
_GRACE_S = 30
_JOIN_S = 5.0
_BACKLOG = 2048


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


def bind_unix(path: str) -> socket.socket:
    """Return a listening Unix socket that only this user can connect to. A socket that nothing serves is replaced.

    Raises:
        BackendUnavailable: The path cannot be used, or another process serves it.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        _remove_unserved(path)
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise BackendUnavailable(f"cannot listen on {printable(path)}: {error.strerror or error}") from error
    finally:
        os.umask(mask)
    listener.setblocking(False)
    return listener


def _remove_unserved(path: str) -> None:
    """Remove the socket of a process that has ended. Any other file stays."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        try:
            other.connect(path)
        except ConnectionRefusedError:
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)
        except FileNotFoundError:
            pass


class Server(uvicorn.Server):
    """uvicorn's server, but it does not send itself the signal again that ended it.

    The signal would kill the process before the application is closed, with an exit status of failure. Loggers and
    their levels stay as they are.

    Args:
        app: The application.
        protocol: The limits.
        on_end: A function that is called when the server stops to accept connections. It answers requests that wait.
    """

    def __init__(
        self, app: ASGIApp, protocol: type[LimitedProtocol], *, on_end: Callable[[], None] | None = None
    ) -> None:
        self._on_end = on_end
        config = uvicorn.Config(
            app,
            http=protocol,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            server_header=False,
            proxy_headers=False,
            # Otherwise uvicorn reads the number from WEB_CONCURRENCY, which is meant for other servers.
            workers=1,
            timeout_graceful_shutdown=_GRACE_S,
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle the signals on the event loop, if this is the main thread."""
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

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop to accept connections, and finish the requests."""
        if self._on_end is not None:
            self._on_end()
        await super().shutdown(sockets)

    async def serve_until(self, ended: asyncio.Event, listener: socket.socket) -> None:
        """Serve until an event is set, and then close the socket and all connections immediately.

        `serve` wakes up ten times per second, takes at least 0.1 s to end, and logs. This does none of it.
        """
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=[listener])
        await ended.wait()
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        # asyncio closes the connections in the next turn of the loop, and then the requests end.
        await asyncio.sleep(0)
        await asyncio.gather(*self.server_state.tasks)


class ServerThread:
    """A server in a thread of its own. It starts when it is created, and runs until `close`.

    Args:
        app: The application.
        protocol: The limits.
        listener: A listening socket, which the server closes.
        name: The name of the thread.
        on_failure: A function that is called in the thread if the server fails.
    """

    def __init__(
        self,
        app: ASGIApp,
        protocol: type[LimitedProtocol],
        listener: socket.socket,
        *,
        name: str,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._server = Server(app, protocol)
        self._listener = listener
        self._on_failure = on_failure
        self._loop = asyncio.SelectorEventLoop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the server and its connections. From any other thread."""
        if self._thread.is_alive():
            try:
                self._loop.call_soon_threadsafe(self._ended.set)
            except RuntimeError:
                # The loop of the server has just closed.
                pass
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._server.serve_until(self._ended, self._listener))
        except Exception as error:  # noqa: BLE001 - the thread's end must be seen, and clients fail of themselves
            self._on_failure(error)
        finally:
            self._listener.close()
            self._loop.close()
