"""Reading a large body off the event loop, in slices: a call that is cancelled ends after one slice."""

from __future__ import annotations

import os

import msgspec

from qworker.kit.files import read_all
from qworker.kit.threads import BlockingCall, run_in_thread
from qworker.message import StoredMessage

__all__ = ["ON_LOOP", "OwnDescriptor", "finish_reading", "leave_unread", "read_body", "read_in_slices"]

# Bytes. A body of at most this size is read on the loop, which takes less time than the hop to a thread.
ON_LOOP = 1 << 20
_SLICE = 8 << 20


class OwnDescriptor:
    """A second descriptor of a file.

    It is closed when neither the call nor its last thread uses it. A cancelled call ends before its thread does, and
    its caller closes the first descriptor. The thread must not read from the number that another file has then.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = os.dup(fd)

    def __del__(self) -> None:
        # An instance whose `dup` failed has no descriptor.
        if hasattr(self, "fd"):
            os.close(self.fd)


def read_body(fd: int, size: int) -> bytes | OwnDescriptor:
    """Read a body. A large one is left for `read_in_slices`.

    Args:
        fd: The open file, from the beginning.
        size: Its size in bytes.

    Raises:
        OSError: It cannot be read.
    """
    return read_all(fd, size) if size <= ON_LOOP else OwnDescriptor(fd)


async def read_in_slices(file: OwnDescriptor) -> bytes:
    """Read a whole file from its beginning. The position of the descriptor does not change.

    Raises:
        OSError: It cannot be read.
    """
    parts: list[bytes] = []
    size = 0
    while part := await run_in_thread(BlockingCall.READ, _read_slice, file, size):
        parts.append(part)
        size += len(part)
    # This copies the whole body, so it is not done on the loop.
    return await run_in_thread(BlockingCall.READ, b"".join, parts)


def _read_slice(file: OwnDescriptor, offset: int) -> bytes:
    return os.pread(file.fd, _SLICE, offset)


class _UnreadMessage(StoredMessage, frozen=True, kw_only=True):
    """A stored message whose body is still to be read.

    Attributes:
        file: The file of the body.
    """

    file: OwnDescriptor


def leave_unread(stored: StoredMessage, body: bytes | OwnDescriptor) -> StoredMessage:
    """Return a message that `finish_reading` gives its body, if the body is still to be read.

    Args:
        stored: The message. Without a body, if that is still to be read.
        body: What `read_body` returned.
    """
    if isinstance(body, bytes):
        return stored
    return _UnreadMessage(**msgspec.structs.asdict(stored), file=body)


async def finish_reading(stored: StoredMessage) -> StoredMessage:
    """Return a message with its body, which is read off the loop if it was left unread.

    Raises:
        OSError: It cannot be read.
    """
    if not isinstance(stored, _UnreadMessage):
        return stored
    message = msgspec.structs.replace(stored.message, body=await read_in_slices(stored.file))
    fields = {name: getattr(stored, name) for name in StoredMessage.__struct_fields__}
    return msgspec.structs.replace(StoredMessage(**fields), message=message)
