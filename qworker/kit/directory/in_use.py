"""The queues that calls use now, and those that can be closed because others need their descriptors."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from functools import cached_property

from qworker.kit.files import raise_file_limit

__all__ = ["LEAST_OPEN", "QueuesInUse", "most_open"]

# Queues that are open at once: fewer if this process may open few files.
_MOST_OPEN, LEAST_OPEN = 256, 8
# Seconds between two looks of waits at a queue that is not open, while many are.
_LOOK_EVERY = 1.0


def most_open(descriptors: int) -> int:
    """Return how many queues are open at once, if each takes so many descriptors."""
    return max(LEAST_OPEN, min(_MOST_OPEN, raise_file_limit() // 4 // descriptors))


class QueuesInUse:
    """The use of the queues of one store.

    Args:
        descriptors: How many descriptors an open queue takes.
    """

    def __init__(self, descriptors: int) -> None:
        self._descriptors = descriptors
        self._users: Counter[str] = Counter()
        # Monotonic seconds.
        self._used_at: dict[str, float] = {}
        self._looked_at: dict[str, float] = {}

    @cached_property
    def most_open(self) -> int:
        """How many queues are open at once."""
        return most_open(self._descriptors)

    @contextmanager
    def using(self, *queues: str) -> Generator[None]:
        """Keep queues open until the end of the block, if they are open or are opened in it."""
        for queue in queues:
            self._users[queue] += 1
        try:
            yield
        finally:
            now = time.monotonic()
            for queue in queues:
                self._used_at[queue] = now
                self._users[queue] -= 1
                if not self._users[queue]:
                    del self._users[queue]

    def to_close(self, opened: Collection[str], is_needed: Callable[[str], bool]) -> list[str]:
        """Return the queues to close before one more is opened, those first that no call has used for longest.

        Args:
            opened: The names of the open queues.
            is_needed: Returns whether a queue must stay open although no call uses it.
        """
        if len(opened) < self.most_open:
            return []
        unused = [queue for queue in opened if queue not in self._users and not is_needed(queue)]
        unused.sort(key=lambda queue: self._used_at.get(queue, 0.0))
        chosen = unused[: len(opened) - self.most_open + 1 + self.most_open // 8]
        for queue in chosen:
            self._used_at.pop(queue, None)
        return chosen

    def is_full(self, queue: str, opened: Collection[str]) -> bool:
        """Return whether a queue cannot be opened to lease from it, because too many are open."""
        return queue not in opened and len(opened) >= 2 * self.most_open

    def can_skip(self, queue: str, opened: Collection[str]) -> bool:
        """Return whether a wait need not look at a queue now: it is not open, and was looked at a moment ago."""
        if queue in opened or len(opened) < self.most_open // 2:
            return False
        now = time.monotonic()
        if now - self._looked_at.get(queue, 0.0) < _LOOK_EVERY:
            return True
        self._looked_at[queue] = now
        return False
