"""mq's message ids: UUIDs of version 1, which carry the time of their making."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time

__all__ = ["at_unix", "is_uuid", "made_at", "new_uuids", "uuid_of"]

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
# 100 ns intervals between the UUID epoch (1582-10-15) and the Unix epoch.
_EPOCH = 0x01B21DD213814000


class _Maker:
    """Makes ids that rise within the process, and that no other process or container makes."""

    __slots__ = ("_last", "_tail")

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self._last = 0
        self._tail = _tail(secrets.randbits(14), secrets.randbits(48))

    def take(self, count: int) -> list[str]:
        first = max(time.time_ns() // 100 + _EPOCH, self._last + 1)
        self._last = first + count - 1
        tail = self._tail
        return [_uuid(ticks, tail) for ticks in range(first, first + count)]


def _tail(sequence: int, node: int) -> str:
    # A node that is made up has its multicast bit set, so that it is nobody's network address.
    return f"{0x8000 | sequence:04x}-{node | (1 << 40):012x}"


def _uuid(ticks: int, tail: str) -> str:
    return f"{ticks & 0xFFFFFFFF:08x}-{(ticks >> 32) & 0xFFFF:04x}-{0x1000 | (ticks >> 48) & 0x0FFF:04x}-{tail}"


_maker = _Maker()
os.register_at_fork(after_in_child=_maker.renew)


def new_uuids(count: int) -> list[str]:
    """`count` new ids, rising within this process."""
    return _maker.take(count)


def uuid_of(origin: str, ticks: int) -> str:
    """The id of a message that had another one in another store: the same whenever it is asked for.

    Args:
        origin: that id.
        ticks: its time, as `made_at` tells it.
    """
    digest = int.from_bytes(hashlib.sha256(origin.encode(errors="surrogateescape")).digest()[:8])
    return _uuid(ticks, _tail(digest >> 50, digest & 0xFFFFFFFFFFFF))


def is_uuid(text: str) -> bool:
    """Whether `text` is a UUID as mq writes it: lower case, with hyphens."""
    return _UUID.fullmatch(text) is not None


def made_at(message_id: str) -> int | None:
    """When an id was made, in 100 ns since the UUID epoch; None for anything but a UUID of version 1."""
    if len(message_id) != 36 or message_id[14] != "1" or not is_uuid(message_id):
        return None
    return int(message_id[15:18] + message_id[9:13] + message_id[:8], 16)


def at_unix(seconds: float) -> int:
    """A Unix time on the scale of `made_at`."""
    return int(seconds * 10_000_000) + _EPOCH
