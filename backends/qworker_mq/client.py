"""An HTTP/1.1 client for one server: h11 implements the protocol, over an asyncio stream or a blocking socket."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from urllib.parse import unquote

import h11
import msgspec

from qworker.errors import BackendUnavailable, InvalidURL
from qworker.kit.network import error_text
from qworker.url import BackendURL

__all__ = ["Answer", "BlockingClient", "Client", "ServerAddress"]

# Seconds after which an idle connection is not used again, because the server is about to close it.
_IDLE = 2.0
_CONNECT = 10.0
_CHUNK = 1 << 16


class ServerAddress(msgspec.Struct, frozen=True):
    """The address of a server, and the token that it requires."""

    host: str
    port: int
    secure: bool
    token: str | None

    @classmethod
    def parse(cls, url: BackendURL, token: str | None) -> ServerAddress:
        """Parse `mq+http://[:TOKEN@]host[:port]`.

        Args:
            url: The URL.
            token: The token to use if the URL has none.

        Raises:
            InvalidURL: There is no host, the port is not valid, or there is a path.
        """
        user, _, place = url.authority.rpartition("@")
        if url.path not in {"", "/"}:
            raise InvalidURL(f"{url.masked}: the URL of a server must not have a path: write {url.scheme}://HOST:PORT")
        given = unquote(user.partition(":")[2]) or token
        secure = url.scheme.endswith("s")
        host, colon, port = place.rpartition(":")
        if not colon or place.endswith("]"):
            host, port = place, "443" if secure else "80"
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise InvalidURL(f"{url.masked} does not name a server: write {url.scheme}://HOST:PORT")
        return cls(host.strip("[]"), int(port), secure, given)


class Answer(msgspec.Struct, frozen=True):
    """A response of the server."""

    status: int
    # By name, in lower case.
    headers: Mapping[str, str]
    body: bytes


class _RequestCodec:
    """An encoder of one request and decoder of its response, which sends and receives nothing."""

    def __init__(self, connection: h11.Connection, address: ServerAddress, method: str, target: str) -> None:
        self._connection = connection
        self._address = address
        self._method = method
        self._target = target
        self._status = 0
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []

    def encode(self, headers: Mapping[str, str], body: bytes) -> bytes:
        """Return the bytes to send."""
        host = f"[{self._address.host}]" if ":" in self._address.host else self._address.host
        sent = [("host", f"{host}:{self._address.port}"), ("content-length", str(len(body))), *headers.items()]
        if self._address.token is not None:
            sent.append(("authorization", f"Bearer {self._address.token}"))
        events: list[h11.Event] = [
            h11.Request(method=self._method, target=self._target, headers=sent),
            h11.EndOfMessage(),
        ]
        if body:
            events.insert(1, h11.Data(data=body))
        return b"".join(self._connection.send(event) or b"" for event in events)

    def feed(self, data: bytes) -> Answer | None:
        """Decode received data, and return the answer when it is complete.

        Args:
            data: Received bytes. Empty: the connection was closed.

        Raises:
            BackendUnavailable: It is not a valid answer.
        """
        try:
            self._connection.receive_data(data)
            return self._next()
        except h11.RemoteProtocolError as error:
            raise BackendUnavailable(f"the answer of the server is not valid: {error}") from error

    def _next(self) -> Answer | None:
        while True:
            event = self._connection.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return None
            if isinstance(event, h11.Response):
                self._status = event.status_code
                self._headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
            elif isinstance(event, h11.Data):
                self._parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return Answer(self._status, self._headers, b"".join(self._parts))
            elif isinstance(event, h11.ConnectionClosed):
                raise BackendUnavailable("the server closed the connection before it answered")


def _try_reuse(connection: h11.Connection) -> bool:
    """Prepare a connection for the next request, and return whether it can have one."""
    if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
        return False
    connection.start_next_cycle()
    return True


def _connection_error(address: ServerAddress, error: OSError) -> BackendUnavailable:
    """Return the error that says why there is no answer, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = f"its certificate is not trusted ({error.verify_message})"
    elif isinstance(error, ssl.SSLError):
        reason = "it does not speak TLS on this port: use mq+http:// there, or the port for TLS"
    else:
        reason = f"{error_text(error)}: check that it is running and that the URL is correct"
    return BackendUnavailable(f"cannot connect to the server at {address.host}:{address.port}: {reason}")


class _Connection:
    """A connection that an event loop uses."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.state = h11.Connection(h11.CLIENT)
        self.idle_since = 0.0


class Client:
    """Sends requests from an event loop, and keeps connections for the next ones.

    Args:
        address: The server.
    """

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if address.secure else None

    async def request(
        self, method: str, target: str, *, headers: Mapping[str, str] | None = None, body: bytes = b"", timeout: float
    ) -> Answer:
        """Send a request, and wait up to `timeout` seconds for the answer.

        If the call is cancelled, its connection is closed.

        Raises:
            BackendUnavailable: There is no answer. It is unknown whether the server has carried out the request.
        """
        try:
            async with asyncio.timeout(timeout):
                connection = self._take_idle() or await self._connect()
                try:
                    return await self._exchange(connection, method, target, headers or {}, body)
                except BaseException:
                    connection.writer.close()
                    raise
        except TimeoutError as error:
            raise BackendUnavailable(f"{self._address.host} did not answer within {timeout:g} s") from error
        except OSError as error:
            raise _connection_error(self._address, error) from error

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            fresh = time.monotonic() - connection.idle_since < _IDLE
            if fresh and not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.writer.close()
        return None

    async def _connect(self) -> _Connection:
        async with asyncio.timeout(_CONNECT):
            return _Connection(*await asyncio.open_connection(self._address.host, self._address.port, ssl=self._tls))

    async def _exchange(
        self, connection: _Connection, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> Answer:
        codec = _RequestCodec(connection.state, self._address, method, target)
        connection.writer.write(codec.encode(headers, body))
        await connection.writer.drain()
        while True:
            answer = codec.feed(await connection.reader.read(_CHUNK))
            if answer is not None:
                break
        if _try_reuse(connection.state):
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.writer.close()
        return answer

    async def aclose(self) -> None:
        """Close the idle connections."""
        while self._idle:
            connection = self._idle.pop()
            connection.writer.close()
            try:
                await connection.writer.wait_closed()
            except OSError:
                # The server has closed it.
                continue


class BlockingClient:
    """Sends requests from any thread, one at a time.

    Args:
        address: The server.
    """

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._state = h11.Connection(h11.CLIENT)
        self._used_at = 0.0

    def request(self, method: str, target: str, *, headers: Mapping[str, str], body: bytes, timeout: float) -> Answer:
        """Send a request, and block up to about `timeout` seconds for the answer.

        Raises:
            BackendUnavailable: There is no answer.
        """
        with self._lock:
            try:
                return self._exchange(method, target, headers, body, timeout)
            except OSError as error:
                self._drop()
                raise _connection_error(self._address, error) from error
            except BaseException:
                self._drop()
                raise

    def _exchange(self, method: str, target: str, headers: Mapping[str, str], body: bytes, timeout: float) -> Answer:
        connection = self._get_socket(timeout)
        codec = _RequestCodec(self._state, self._address, method, target)
        connection.sendall(codec.encode(headers, body))
        answer: Answer | None = None
        while answer is None:
            answer = codec.feed(connection.recv(_CHUNK))
        self._used_at = time.monotonic()
        if not _try_reuse(self._state):
            self._drop()
        return answer

    def _get_socket(self, timeout: float) -> socket.socket:
        if self._socket is not None and time.monotonic() - self._used_at > _IDLE:
            self._drop()
        if self._socket is None:
            connection = socket.create_connection((self._address.host, self._address.port), timeout=timeout)
            if self._address.secure:
                connection = ssl.create_default_context().wrap_socket(connection, server_hostname=self._address.host)
            self._socket = connection
            self._state = h11.Connection(h11.CLIENT)
        self._socket.settimeout(timeout)
        return self._socket

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._drop()
