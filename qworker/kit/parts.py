"""Reading a state in parts, in parallel by many processes. Backends share this code.

If a store has no cheaper division, a backend lists all names for every part and reads those of its share. The crc of a
name decides the share.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from zlib import crc32

import msgspec

from qworker.errors import UsageError
from qworker.kit.body_slices import finish_reading
from qworker.message import StoredMessage
from qworker.names import printable

__all__ = ["PAGE_BYTES", "PAGE_MESSAGES", "WHOLE", "HashShare", "bad_part", "in_pages", "make_shares"]

# The only part of a store that cannot divide.
WHOLE = "whole"

# A page ends when it has this many messages.
PAGE_MESSAGES = 4000
PAGE_BYTES = 8 << 20
# Messages that are read before other tasks of the loop run.
_SLICE = 50


class HashShare(msgspec.Struct, frozen=True):
    """One of `of` shares of all names. `str` and `parse` are inverse."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @classmethod
    def parse(cls, text: str) -> HashShare:
        """Return the share that `str` named.

        Raises:
            UsageError: It is not a share.
        """
        number, _, of = text.partition("/")
        if not (number.isdecimal() and of.isdecimal() and len(of) < 10 and int(number) < int(of)):
            raise bad_part(text)
        return cls(int(number), int(of))

    def has(self, name: str) -> bool:
        """Return whether a name is in this share. Exactly one of `of` shares has it."""
        return self.of == 1 or crc32(name.encode(errors="surrogateescape")) % self.of == self.number


def bad_part(text: str) -> UsageError:
    """Return the error for a text that is not a part of a state."""
    return UsageError(
        f"{printable(text[:60])!r} is not a valid part: use one that `parts` gave for the same queue and state"
    )


def make_shares(count: int) -> list[str]:
    """Return `count` shares, at least one."""
    of = max(1, count)
    return [str(HashShare(number, of)) for number in range(of)]


async def in_pages(found: Iterable[StoredMessage | None]) -> AsyncIterator[list[StoredMessage]]:
    """Yield lists of bounded size. Messages that are gone (None) are left out, and unread bodies are read."""
    page: list[StoredMessage] = []
    size = 0
    for count, stored in enumerate(found):
        if stored is not None:
            page.append(await finish_reading(stored))
            size += len(page[-1].message.body)
        if len(page) >= PAGE_MESSAGES or size >= PAGE_BYTES:
            yield page
            page, size = [], 0
        if count % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
    if page:
        yield page
