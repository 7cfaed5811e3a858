"""The number of worker processes that a backlog needs, for `--workers MIN:MAX`."""

from __future__ import annotations

import msgspec

__all__ = ["Scaler"]

# Seconds for which fewer processes must be enough before one of them ends.
_PATIENCE = 30.0


class Scaler(msgspec.Struct):
    """The number of processes for a backlog. It rises at once, and falls by one when fewer are enough for a time."""

    least: int
    most: int
    # The number of messages that one process runs at once.
    concurrency: int
    target: int = 0
    # Monotonic seconds since which fewer than `target` are enough. None: they are not.
    _idle_since: float | None = None

    def __post_init__(self) -> None:
        self.target = max(self.target, self.least)

    def needed(self, backlog: int) -> int:
        """Return how many processes give each message of `backlog` a consumer, within the limits."""
        return min(self.most, max(self.least, -(-backlog // self.concurrency)))

    def observe(self, backlog: int, now: float) -> int:
        """Return how many processes should run.

        Args:
            backlog: The number of ready and leased messages.
            now: Monotonic seconds.
        """
        needed = self.needed(backlog)
        if needed >= self.target:
            self.target = needed
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= _PATIENCE:
            self.target -= 1
            self._idle_since = now
        return self.target
