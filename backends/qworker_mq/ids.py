"""mq's message ids: UUIDs of version 1, which contain the time of their creation.

Times are in ticks: intervals of 100 ns since the UUID epoch.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time

__all__ = ["derive_uuid", "is_uuid", "new_uuids", "parse_ticks", "to_ticks"]

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
# Ticks between the UUID epoch (1582-10-15) and the Unix epoch.
_EPOCH = 0x01B21DD213814000


class _IdGenerator:
    """Generates ids that rise within the process, and that no other process or container generates."""

    __slots__ = ("_last", "_tail")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._last = 0
        self._tail = _make_tail(secrets.randbits(14), secrets.randbits(48))

    def take(self, count: int) -> list[str]:
        first = max(time.time_ns() // 100 + _EPOCH, self._last + 1)
        self._last = first + count - 1
        tail = self._tail
        return [_format_uuid(ticks, tail) for ticks in range(first, first + count)]


def _make_tail(sequence: int, node: int) -> str:
    # A random node has its multicast bit set, so that it is not the network address of a machine.
    return f"{0x8000 | sequence:04x}-{node | (1 << 40):012x}"


def _format_uuid(ticks: int, tail: str) -> str:
    return f"{ticks & 0xFFFFFFFF:08x}-{(ticks >> 32) & 0xFFFF:04x}-{0x1000 | (ticks >> 48) & 0x0FFF:04x}-{tail}"


_generator = _IdGenerator()
os.register_at_fork(after_in_child=_generator.reset)


def new_uuids(count: int) -> list[str]:
    """Return `count` new ids, which rise within this process."""
    return _generator.take(count)


def derive_uuid(original_id: str, ticks: int) -> str:
    """Return the id of a message that has another id in another store: always the same one.

    Args:
        original_id: The id in the other store.
        ticks: The time of the new id.
    """
    digest = int.from_bytes(hashlib.sha256(original_id.encode(errors="surrogateescape")).digest()[:8])
    return _format_uuid(ticks, _make_tail(digest >> 50, digest & 0xFFFFFFFFFFFF))


def is_uuid(text: str) -> bool:
    """Return whether `text` is a UUID in mq's notation: lower case, with hyphens."""
    return _UUID.fullmatch(text) is not None


def parse_ticks(message_id: str) -> int | None:
    """Return when an id was created, in ticks. None: it is not a UUID of version 1."""
    if len(message_id) != 36 or message_id[14] != "1" or not is_uuid(message_id):
        return None
    return int(message_id[15:18] + message_id[9:13] + message_id[:8], 16)


def to_ticks(seconds: float) -> int:
    """Convert Unix seconds to ticks."""
    return int(seconds * 10_000_000) + _EPOCH
