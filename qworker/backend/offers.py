"""What a backend class may offer besides the contract, found by name on the class. A backend needs none of it.

Each offer is a class method: `doctor` adds checks to `qworker doctor`, `open_scan` takes work for `qworker scan` in the protocol's own
way, `follower` follows a store that is a log, for Spark's streams. Import inside it what only it needs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, runtime_checkable

from qworker.backend.registry import backend_class
from qworker.backend.scan_source import ScanOptions, ScanSource
from qworker.kit.doctor_check import Check
from qworker.message import StoredMessage
from qworker.url import BackendURL

__all__ = [
    "Follower",
    "OffersDoctor",
    "OffersFollower",
    "OffersScan",
    "doctor_of",
    "follower_of",
    "scan_of",
]


class Follower(Protocol):
    """Reads one queue's log by positions, as the channel that the URL names.

    Positions are short text without a meaning to others; each process opens a follower of its own.
    """

    async def open(self) -> None:
        """Open the queue, and make it and the channel where they are absent."""
        ...

    async def aclose(self) -> None:
        """Let go of everything. Idempotent."""
        ...

    async def begin(self, where: str) -> str:
        """Return the position of the first message that the `channel` has not finished, or that is kept at all (`earliest`), or the end (`latest`)."""
        ...

    async def end(self) -> str:
        """Return the position behind the last message that is there."""
        ...

    async def ahead(self, start: str, limit: int, end: str) -> str:
        """Return the position behind the next `limit` messages, or `end` where there are fewer before it."""
        ...

    async def divide(self, start: str, end: str, wanted: int) -> list[str]:
        """About `wanted` parts that together hold every message between two positions once."""
        ...

    def read(self, part: str) -> AsyncIterator[list[StoredMessage]]:
        """Return the messages of a part, in order and in pages: the same ones whenever it is asked, until `commit` lets them go."""
        ...

    async def commit(self, end: str) -> None:
        """Say that everything before a position is finished for the channel."""
        ...


@runtime_checkable
class OffersDoctor(Protocol):
    """A backend class with checks of its own."""

    async def doctor(self, url: BackendURL) -> list[Check]:
        """Try what queues need behind a URL."""
        ...


@runtime_checkable
class OffersScan(Protocol):
    """A backend class whose protocol has its own way of taking work for a program."""

    def open_scan(self, url: BackendURL, queue: str, options: ScanOptions) -> ScanSource:
        """Open the source of a queue's work.

        Raises:
            ScanError: There is no such queue.
        """
        ...


@runtime_checkable
class OffersFollower(Protocol):
    """A backend class whose queues are logs."""

    def follower(self, url: BackendURL, queue: str) -> Follower:
        """Make a follower of one queue's log, without touching the store."""
        ...


def doctor_of(scheme: str) -> OffersDoctor | None:
    """Return the backend class of a scheme if it has checks of its own.

    Raises:
        InvalidURL: No installed backend serves the scheme.
        MissingExtra: Its driver is not installed.
    """
    found: object = backend_class(scheme)
    return found if isinstance(found, OffersDoctor) else None


def scan_of(scheme: str) -> OffersScan | None:
    """Return the backend class of a scheme if it takes work for programs in its own way; raises like `doctor_of`."""
    found: object = backend_class(scheme)
    return found if isinstance(found, OffersScan) else None


def follower_of(scheme: str) -> OffersFollower | None:
    """Return the backend class of a scheme if its queues are logs; raises like `doctor_of`."""
    found: object = backend_class(scheme)
    return found if isinstance(found, OffersFollower) else None
