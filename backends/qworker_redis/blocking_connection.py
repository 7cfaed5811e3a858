"""A connection for threads, which needs no event loop."""

from __future__ import annotations

import socket
import time
from typing import Self

from hiredis import ProtocolError, Reader, ReplyError

from qworker.kit.network import error_text
from qworker_redis.connection import Argument, hello_commands, pack, parse_hello, unreachable
from qworker_redis.error_replies import ConnectionLost, Reply, to_error
from qworker_redis.options import Address, Options, UnixAddress

__all__ = ["BlockingConnection"]


class BlockingConnection:
    """A connection that one thread at a time uses.

    Args:
        options: The options of the connection.
        address: The server.
        sentinel: Whether the server is a sentinel, which has its own password and no databases.

    Raises:
        BackendUnavailable: The server cannot be reached.
        PermissionDenied: It refuses this user.
    """

    def __init__(self, options: Options, address: Address, *, sentinel: bool = False) -> None:
        self.address = address
        self._timeout = options.timeout
        self._reader = Reader(protocolError=ProtocolError, replyError=ReplyError)
        self._socket = self._open(options)
        try:
            replies = [self.call(*command) for command in hello_commands(options, sentinel=sentinel)]
        except ConnectionLost as error:
            self.close()
            raise unreachable(options, address, error) from error
        except BaseException:
            self.close()
            raise
        self.version = parse_hello(replies[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self, options: Options) -> socket.socket:
        address = self.address
        try:
            if isinstance(address, UnixAddress):
                opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    opened.settimeout(self._timeout)
                    opened.connect(address.path)
                except OSError:
                    opened.close()
                    raise
            else:
                opened = socket.create_connection(address, timeout=self._timeout)
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if options.tls is not None and not isinstance(address, UnixAddress):
                opened = options.tls.wrap_socket(opened, server_hostname=address.host)
        except OSError as error:
            raise unreachable(options, address, error) from error
        return opened

    def call(self, *arguments: Argument) -> Reply:
        """Send a command and wait for its answer.

        Raises:
            ConnectionLost: No answer. The connection cannot be used any more.
            BackendError: The server's error.
        """
        deadline = time.monotonic() + self._timeout
        try:
            self._socket.settimeout(self._timeout)
            self._socket.sendall(pack(arguments))
            reply: Reply = self._reader.gets()
            while reply is False:
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                data = self._socket.recv(65536)
                if not data:
                    raise ConnectionResetError("closed by the server")
                self._reader.feed(data)
                reply = self._reader.gets()
        except (OSError, ProtocolError) as error:
            self.close()
            raise ConnectionLost(
                f"the connection to {self.address} was lost: {error_text(error)}", sent=True
            ) from error
        if isinstance(reply, ReplyError):
            raise to_error(reply)
        return reply

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
