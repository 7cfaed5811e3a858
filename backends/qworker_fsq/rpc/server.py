"""HTTP for jsonrpcd: the checks and limits of `qworker serve`, and a fixed number of threads for the methods."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from qworker.asgi.access import Access
from qworker.asgi.interface import BodyTooLarge, Disconnected, Headers, Receive, Scope, Send, read_body, respond
from qworker.asgi.limits import limited_protocol
from qworker.asgi.server import Server
from qworker_fsq.rpc.methods import RpcMethods

__all__ = ["RpcApp", "serve"]

# The paths to which other implementations post.
_PATHS = frozenset({"", "/", "/RPC2"})
# Each can have a request of the largest size in memory.
_MOST_CONNECTIONS = 128
_TYPE = (b"content-type", b"application/json-rpc")

_Answer = tuple[int, Headers, bytes]


class RpcApp:
    """The ASGI application of a jsonrpcd.

    Args:
        methods: The methods.
        workers: The number of requests at the same time. The others wait.
        body_limit: The largest request in bytes.
        token: The token that clients must send; None: no token is needed.
        public: Whether other machines are served without a token.
        say: Prints a line for each request; None: nothing is printed.
    """

    def __init__(
        self,
        methods: RpcMethods,
        *,
        workers: int,
        body_limit: int,
        token: str | None,
        public: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._methods = methods
        self._body_limit = body_limit
        self._access = Access(token, challenge='Basic realm="fsq"', public=public, forms=False)
        self._say = say
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="qworker-rpc")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            status, headers, body = await self._answer(scope, receive)
        except BodyTooLarge:
            # The connection is closed, because the rest of the body is not read.
            status, headers, body = 413, [(b"connection", b"close")], b""
        except Disconnected:
            return
        if self._say is not None:
            client = scope["client"][0] if scope["client"] else "-"
            self._say(f'{client} "{scope["method"]} {scope["path"]} HTTP/{scope["http_version"]}" {status}')
        await respond(send, status, headers, body)

    async def _answer(self, scope: Scope, receive: Receive) -> _Answer:
        refusal = self._access.refusal(scope)
        if refusal is not None:
            return refusal
        if scope["path"] not in _PATHS:
            return 404, [], b""
        if scope["method"] != "POST":
            return 405, [(b"allow", b"POST")], b""
        body = await read_body(scope, receive, self._body_limit)
        loop = asyncio.get_running_loop()
        return 200, [_TYPE], await loop.run_in_executor(self._threads, self._methods.answer, body)

    def close(self) -> None:
        """Finish the requests that have begun."""
        self._threads.shutdown()


async def serve(app: RpcApp, listener: socket.socket, *, ready: Callable[[Server], None] | None = None) -> None:
    """Serve until a signal arrives, or until the server that `ready` gets is stopped.

    Args:
        app: The application.
        listener: The socket, which is closed at the end.
        ready: A function that is called before the first connection is accepted.
    """
    server = Server(app, limited_protocol(most=_MOST_CONNECTIONS))
    try:
        if ready is not None:
            ready(server)
        await server.serve(sockets=[listener])
    finally:
        listener.close()
        app.close()
