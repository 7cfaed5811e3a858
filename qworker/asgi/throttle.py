"""A limit for guesses of a token, by the address of the client."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque

import msgspec

from qworker.clock import Clock

__all__ = ["Throttle"]

# Wrong tokens that an address can send at once. One more is allowed each second.
_BURST = 10
_PER_SECOND = 1.0
# Addresses and wrong tokens that are remembered.
_MOST_ADDRESSES = 10_000
_MOST_KNOWN = 16


class _Guesses(msgspec.Struct):
    """The wrong tokens of one address: how many count at a time, and the digests of the last ones."""

    count: float
    at: float
    known: deque[bytes]


class Throttle:
    """The wrong tokens of the last time.

    A wrong token that is sent again is not another guess. So a program with an old token does not lock out the others
    on its machine.

    Args:
        clock: The clock that measures the time between guesses.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._guesses: OrderedDict[str, _Guesses] = OrderedDict()

    def is_blocked(self, address: str, token: bytes) -> bool:
        """Return whether a token from this address must not be compared now."""
        if not self._guesses:
            return False
        guesses = self._guesses.get(address)
        if guesses is None or _digest(token) in guesses.known:
            return False
        return self._count(guesses) > _BURST - 1

    def add(self, address: str, token: bytes) -> None:
        """Count a wrong token."""
        now, digest = self._clock.monotonic(), _digest(token)
        guesses = self._guesses.setdefault(address, _Guesses(0.0, now, deque(maxlen=_MOST_KNOWN)))
        self._guesses.move_to_end(address)
        if digest not in guesses.known:
            guesses.count, guesses.at = self._count(guesses) + 1, now
            guesses.known.append(digest)
        while len(self._guesses) > _MOST_ADDRESSES:
            self._guesses.popitem(last=False)

    def _count(self, guesses: _Guesses) -> float:
        return max(0.0, guesses.count - _PER_SECOND * (self._clock.monotonic() - guesses.at))


def _digest(token: bytes) -> bytes:
    return hashlib.blake2b(token, digest_size=16).digest()
