"""The wait with which `Backend.lease` of most backends begins if it has a timeout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from qworker.errors import UsageError

__all__ = ["Waits", "check_limit", "wait_for_ready"]


class Waits(Protocol):
    """The part of a backend that is needed here."""

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Wait: see `Backend.wait`."""


async def wait_for_ready(backend: Waits, queue: str, limit: int, timeout: float) -> None:
    """Return at once if something may be ready, otherwise when something is, and after `timeout` seconds at the latest.

    Raises:
        UsageError: `limit` is less than 1.
    """
    check_limit(limit)
    if timeout > 0:
        await backend.wait([queue], timeout)


def check_limit(limit: int) -> None:
    """Refuse to lease no messages: such a call in a loop would never wait.

    Raises:
        UsageError: `limit` is less than 1.
    """
    if limit < 1:
        raise UsageError(f"the number of messages to lease must be at least 1 (got {limit})")
