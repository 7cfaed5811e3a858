"""Reading a large body off the event loop, in slices: a call that is cancelled ends after one slice."""

from __future__ import annotations

import os

from qworker.kit.threads import BlockingCall, run_in_thread

__all__ = ["ON_LOOP", "read_in_slices"]

# Bytes. A body of at most this size is read on the loop, which takes less time than the hop to a thread.
ON_LOOP = 1 << 20
_SLICE = 8 << 20


class _OwnDescriptor:
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


async def read_in_slices(fd: int) -> bytes:
    """Read a whole file from its beginning. The position of the descriptor does not change.

    Raises:
        OSError: It cannot be read.
    """
    file = _OwnDescriptor(fd)
    parts: list[bytes] = []
    size = 0
    while part := await run_in_thread(BlockingCall.READ, _read_slice, file, size):
        parts.append(part)
        size += len(part)
    # This copies the whole body, so it is not done on the loop.
    return await run_in_thread(BlockingCall.READ, b"".join, parts)


def _read_slice(file: _OwnDescriptor, offset: int) -> bytes:
    return os.pread(file.fd, _SLICE, offset)
