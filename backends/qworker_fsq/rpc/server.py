"""HTTP for jsonrpcd: a fixed number of threads, a limit on bodies and on time, and a clean end."""

from __future__ import annotations

import base64
import hmac
import socket
import socketserver
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler

from qworker.errors import UsageError
from qworker.kit.network import is_loopback
from qworker_fsq.rpc.methods import RpcMethods

__all__ = ["RpcServer", "require_token_if_public"]

# The paths to which other implementations post.
_PATHS = frozenset({"", "/", "/RPC2"})
# Seconds that a client may take for a line or for a part of its body.
_PATIENCE = 30.0


def require_token_if_public(host: str, token: str | None, *, insecure: bool) -> None:
    """Refuse to listen beyond this machine without a token, unless `insecure` is given.

    Raises:
        UsageError: `host` is not a loopback address.
    """
    if token or insecure or is_loopback(host):
        return
    raise UsageError(
        f"listening on {host} requires a token, because other machines could enqueue: set QWORKER_HTTP_TOKEN"
        " (clients push to http://x:TOKEN@HOST:PORT), or add --insecure"
    )


class RpcServer(socketserver.TCPServer):
    """A jsonrpcd.

    Args:
        address: Host and port. Port 0 takes a free one.
        methods: The methods.
        workers: The number of requests at the same time.
        body_limit: The largest request in bytes.
        token: The token that clients must send; None: no token is needed.
        say: Prints a line for each request; None: nothing is printed.

    Raises:
        OSError: It cannot listen on the address.
    """

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        methods: RpcMethods,
        *,
        workers: int,
        body_limit: int,
        token: str | None,
        say: Callable[[str], None] | None,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.methods = methods
        self.body_limit = body_limit
        self.say = say
        self._token = token
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="qworker-rpc")
        # As many requests wait as are processed. The others wait in the kernel.
        self._room = threading.BoundedSemaphore(2 * workers)
        super().__init__(address, _Handler)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Let a thread answer the request."""
        self._room.acquire()
        self._threads.submit(self._process, request, client_address)

    def _process(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:
            # The client is gone or too slow. It does not need an answer.
            pass
        finally:
            self.shutdown_request(request)
            self._room.release()

    def is_allowed(self, header: str | None) -> bool:
        """Return whether a client with this Authorization may call."""
        if self._token is None:
            return True
        kind, _, value = (header or "").partition(" ")
        given = value.encode()
        if kind.lower() == "basic":
            try:
                given = base64.b64decode(value, validate=True).partition(b":")[2]
            except ValueError:
                return False
        return kind.lower() in {"basic", "bearer"} and hmac.compare_digest(given, self._token.encode())

    def server_close(self) -> None:
        """Stop listening, and finish the requests that have begun."""
        super().server_close()
        self._threads.shutdown()


class _Handler(BaseHTTPRequestHandler):
    server_version = "qworker-jsonrpcd"
    sys_version = ""

    def setup(self) -> None:
        """Set a timeout."""
        self.request.settimeout(_PATIENCE)
        super().setup()

    @property
    def _rpc(self) -> RpcServer:
        assert isinstance(self.server, RpcServer)
        return self.server

    def do_POST(self) -> None:
        """Answer one call."""
        if self.path.partition("?")[0] not in _PATHS:
            self._reply(404, b"")
            return
        if not self._rpc.is_allowed(self.headers.get("Authorization")):
            self._reply(401, b"")
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._reply(411, b"")
            return
        if int(length) > self._rpc.body_limit:
            self._reply(413, b"")
            return
        body = self.rfile.read(int(length))
        if len(body) == int(length):
            self._reply(200, self._rpc.methods.answer(body))

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="fsq"')
        self.send_header("Content-Type", "application/json-rpc")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Print a request, if that was requested."""
        if self._rpc.say is not None:
            self._rpc.say(f"{self.client_address[0]} {format % args}")
