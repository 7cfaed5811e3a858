"""Calling another host's jsonrpcd: JSON-RPC 2.0 over HTTP, on TCP or on a Unix socket."""

from __future__ import annotations

import base64
import http.client
import re
import socket
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import msgspec

from qworker.errors import BackendError, BackendUnavailable, InvalidURL, NotSupported
from qworker.url import mask

__all__ = ["RemoteHost"]

_TIMEOUT = 60.0


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_TIMEOUT)
        self.sock.connect(self._path)


class RemoteHost:
    """Another host's queues.

    Args:
        address: `http://[user:token@]host:port[/path]`, `https://...` or `unix:///path`.

    Raises:
        InvalidURL: The address does not have one of these forms.
    """

    def __init__(self, address: str) -> None:
        self.address = mask(address)
        try:
            parts = urlsplit(address)
            port = parts.port
        except ValueError as error:
            raise InvalidURL(f"{self.address}: {error}") from error
        if parts.scheme not in {"http", "https", "unix"} or not (parts.netloc or parts.path):
            raise InvalidURL(
                f"{self.address} is not a valid address of a jsonrpcd: write http://HOST:PORT or unix:///PATH"
            )
        self._scheme, self._host, self._port = parts.scheme, parts.hostname or "", port
        self._path = re.sub("^/*", "/", f"{parts.netloc}{parts.path}") if parts.scheme == "unix" else parts.path or "/"
        self._headers = {"Content-Type": "application/json-rpc"}
        if parts.password is not None:
            pair = f"{unquote(parts.username or '')}:{unquote(parts.password)}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()

    def enqueue(self, name: str, queue: str, body: bytes, charset: str) -> None:
        """Store an item there, durably.

        Raises:
            NotSupported: The protocol carries only text, and this is not text.
            BackendUnavailable: There is no answer. The item may or may not be stored.
            BackendError: It was refused.
        """
        try:
            text, item = body.decode(charset), name.encode(errors="surrogateescape").decode(charset)
        except UnicodeDecodeError as error:
            raise NotSupported(
                f"{name}: push sends only text ({charset}), but this file is not text: {error.reason}"
            ) from error
        self.call("enqueue", [item, queue, text])

    def pull_trigger(self, queue: str, trigger: str, *, ignore_listener: bool) -> None:
        """Pull the trigger of a queue there.

        Raises:
            BackendUnavailable: There is no answer.
            BackendError: No process listens, or there is no trigger.
        """
        self.call("trigger_pull", {"queue": queue, "ignore_listener": ignore_listener, "trigger": trigger})

    def call(self, method: str, params: list[Any] | dict[str, Any]) -> Any:
        """Call a method and return its result."""
        request = {"jsonrpc": "2.0", "id": "1", "method": method, "params": params}
        raw = self._post(msgspec.json.encode(request))
        try:
            reply: object = msgspec.json.decode(raw)
        except (ValueError, RecursionError) as error:
            raise BackendError(f"{self.address}: the answer is not JSON") from error
        if not isinstance(reply, dict):
            raise BackendError(f"{self.address}: the answer is not JSON-RPC")
        answer = cast("dict[str, Any]", reply)
        if answer.get("error") is not None:
            raise BackendError(f"{self.address}: {_message(answer['error'])}")
        return answer.get("result")

    def _post(self, body: bytes) -> bytes:
        connection = self._connection()
        try:
            connection.request("POST", "/" if self._scheme == "unix" else self._path, body, self._headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise BackendUnavailable(f"{self.address}: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise BackendError(f"{self.address}: status {response.status} {response.reason}")
        return answer

    def _connection(self) -> http.client.HTTPConnection:
        if self._scheme == "unix":
            return _UnixConnection(self._path)
        kind = http.client.HTTPSConnection if self._scheme == "https" else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=_TIMEOUT)


def _message(error: object) -> str:
    if isinstance(error, dict):
        return str(cast("dict[str, object]", error).get("message", "an error without a message"))
    return str(error)
