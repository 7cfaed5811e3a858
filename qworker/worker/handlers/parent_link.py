"""The child's end of the socket to its parent: a thread of its own reads it, so that the parent can send at any time.

Both directions carry a length (4 bytes, big endian) and msgpack: data only, no pickled objects. The parent sends
requests, the answers to checks of the lease, and `STOPPING`.
"""

from __future__ import annotations

import queue
import socket
import threading
from typing import Any, Generic, Literal, TypeVar

import msgspec

from qworker.context import Stopping

__all__ = ["LENGTH", "STOPPING", "ParentLink", "receive_frame", "to_frame"]

Request = TypeVar("Request")

# Bytes of the length in front of each map.
LENGTH = 4
# What the parent sends when its worker begins to stop.
STOPPING: Literal["stopping"] = "stopping"


def to_frame(value: Any) -> bytes:
    """Encode what either side sends, with its length."""
    encoded = msgspec.msgpack.encode(value)
    return len(encoded).to_bytes(LENGTH, "big") + encoded


def receive_frame(parent: socket.socket) -> bytes | None:
    """Read one frame. None: the other side is gone."""
    head = _exactly(parent, LENGTH)
    return None if head is None else _exactly(parent, int.from_bytes(head, "big"))


def _exactly(parent: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = parent.recv(min(count - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


class ParentLink(Generic[Request]):
    """Reads what the parent sends, from the end of the set-up on.

    Args:
        parent: The socket.
        request_type: The type of a request.

    Attributes:
        stopping: The notice that the parent's worker stops.
    """

    def __init__(self, parent: socket.socket, request_type: type[Request]) -> None:
        self._parent = parent
        self._decoder: Any = msgspec.msgpack.Decoder(request_type | bool | Literal["stopping"])
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bool | None] = queue.SimpleQueue()
        self._is_gone = False
        self.stopping = Stopping()
        threading.Thread(target=self._read, name="qworker-parent", daemon=True).start()

    def _read(self) -> None:
        try:
            while (data := receive_frame(self._parent)) is not None:
                self._take(self._decoder.decode(data))
        except OSError:
            # The main thread has closed the socket, or the connection was reset.
            pass
        finally:
            self._is_gone = True
            self._requests.put(None)
            self._answers.put(None)

    def _take(self, value: Any) -> None:
        if value == STOPPING:
            self.stopping.set()
        elif isinstance(value, bool):
            self._answers.put(value)
        else:
            self._requests.put(value)

    def next_request(self) -> Request | None:
        """Wait for the next message. None: the parent is gone."""
        return self._requests.get()

    def send(self, value: Any) -> None:
        """Send something to the parent."""
        self._parent.sendall(to_frame(value))

    def ask(self, question: Any) -> bool | None:
        """Ask something and wait for the answer. One thread at a time. None: the parent is gone."""
        if self._is_gone:
            return None
        try:
            self.send(question)
        except OSError:
            return None
        return self._answers.get()
