"""The shares of the queues of a worker that has weights, a strict order, or limits for single queues."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from qworker.queue_share import QueueShare
from qworker.worker.delivery import Delivery

__all__ = ["Round", "Shares"]


class Shares:
    """Divides the leases of a worker.

    Each lease gives each queue credit for its share, and what it gets is taken from its credit. So the shares are
    exact over time, also if there is room for one message only. A queue that is empty saves no credit.

    Args:
        shares: The queues, in a strict order the most important first.
        held: The leases of the worker.
        strict: Whether a queue gets nothing before those in front of it are empty.
    """

    def __init__(self, shares: Sequence[QueueShare], held: AbstractSet[Delivery], *, strict: bool) -> None:
        self._shares = tuple(shares)
        self._strict = strict
        self._held = held
        self._is_limited = any(share.concurrency is not None for share in shares)
        self._credits = dict.fromkeys([share.name for share in shares], 0.0)

    def free(self) -> dict[str, int]:
        """Return how many messages each queue may get now. Queues at their own concurrency are left out."""
        running: Counter[str] = Counter()
        if self._is_limited:
            # A message that is settled runs no more. A handler that waits for another job makes room for it.
            running.update(
                delivery.lease.message.queue
                for delivery in self._held
                if delivery.settlement is None and not delivery.waits
            )
        rooms = {
            share.name: sys.maxsize if share.concurrency is None else share.concurrency - running[share.name]
            for share in self._shares
        }
        return {name: room for name, room in rooms.items() if room > 0}

    def room(self) -> int:
        """Return how many messages all queues may get now."""
        return min(sum(self.free().values()), sys.maxsize) if self._is_limited else sys.maxsize

    def begin(self, room: int, left: Collection[str]) -> Round:
        """Begin to lease.

        Args:
            room: The number of messages to lease.
            left: Queues that are left to other workers now.
        """
        free = self.free()
        here = [share for share in self._shares if share.name in free and share.name not in left]
        if self._strict:
            return Round([share.name for share in here], free, None)
        total = sum(share.weight for share in here)
        for share in here:
            self._credits[share.name] += room * share.weight / total
        return Round(sorted([share.name for share in here], key=lambda name: -self._credits[name]), free, self._credits)


class Round:
    """One lease from all queues.

    Args:
        queues: The queues to lease from, in this order.
        free: How many messages each may get.
        credits: How many messages are due to each. None: as many as there are.

    Attributes:
        queues: The queues to lease from, in this order.
    """

    def __init__(self, queues: list[str], free: dict[str, int], credits: dict[str, float] | None) -> None:  # noqa: A002
        self.queues = queues
        self._free = free
        self._credits = credits

    def share(self, queue: str, room: int) -> int:
        """Return how many messages a queue gets of what is left."""
        most = min(self._free[queue], room)
        return most if self._credits is None else min(most, max(1, round(self._credits[queue])))

    def rest(self, queue: str, room: int) -> int:
        """Return how many messages a queue gets of what the others have left over."""
        return min(self._free[queue], room)

    def took(self, queue: str, wanted: int, found: int) -> None:
        """Record how many messages a queue had."""
        self._free[queue] -= found
        if self._credits is not None:
            # What is left over belongs to no queue, so nothing is owed for it. An empty queue saves nothing.
            left = max(-1.0, self._credits[queue] - found)
            self._credits[queue] = min(left, 1.0 if found == wanted else 0.0)
