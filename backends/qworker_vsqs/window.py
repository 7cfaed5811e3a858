"""The ready ids of a queue in order, and the expiries of the others: a listing that events keep up to date.

Strict FIFO: every name that arrives in the directory enters the window, because the kernel reports it. If the kernel
may not report all of them (other hosts, or no inotify), a window is used for at most 100 ms. Otherwise it is used for 1
s, because the names alone keep it exact.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable

from qworker_vsqs.names import parse

__all__ = ["IdWindow"]

# In seconds.
_FRESH = 0.1
_FRESH_WATCHED = 1.0


class IdWindow:
    """The listing of one queue.

    Attributes:
        is_watched: Whether the kernel reports every change in the directory.
    """

    def __init__(self) -> None:
        self._ready: list[int] = []
        self._timed: list[tuple[int, int]] = []
        self._listed_at = float("-inf")
        self.is_watched = False

    def invalidate(self) -> None:
        """Discard the window, so that the directory is listed again before it is used."""
        self._listed_at = float("-inf")

    @property
    def is_fresh(self) -> bool:
        """Whether the last listing can still be used."""
        return time.monotonic() - self._listed_at < (_FRESH_WATCHED if self.is_watched else _FRESH)

    def fill(self, names: Iterable[str], listed_at: float) -> None:
        """Replace everything with a listing that began at `listed_at` (monotonic seconds)."""
        ready: list[int] = []
        timed: list[tuple[int, int]] = []
        for name in names:
            # This is the common case, without the general parser: a plain number of the usual length.
            if len(name) == 16 and name.isascii() and name.isdigit() and name[0] != "0":
                ready.append(int(name))
            elif (found := parse(name)) is not None:
                if found[1] is None:
                    ready.append(found[0])
                else:
                    timed.append((found[1], found[0]))
        heapq.heapify(ready)
        heapq.heapify(timed)
        self._ready, self._timed = ready, timed
        self._listed_at = listed_at

    def add(self, name: str) -> None:
        """Add a name that arrived in the directory."""
        found = parse(name)
        if found is None:
            return
        if found[1] is None:
            heapq.heappush(self._ready, found[0])
        else:
            heapq.heappush(self._timed, (found[1], found[0]))

    def on_arrival(self, name: str | None) -> None:
        """Add a name that inotify reports. None: events were lost, so the directory is listed again."""
        if name is None:
            self.invalidate()
        else:
            self.add(name)

    def take(self) -> int | None:
        """Remove the oldest ready id and return it; None if there is none."""
        ready = self._ready
        if not ready:
            return None
        number = heapq.heappop(ready)
        while ready and ready[0] == number:
            heapq.heappop(ready)
        return number

    def take_expired(self, now: int) -> list[tuple[int, int]]:
        """Remove the ids that have expired and return (id, expiry) of each, in the order of the expiries."""
        found: list[tuple[int, int]] = []
        while self._timed and self._timed[0][0] <= now:
            expiry, number = heapq.heappop(self._timed)
            found.append((number, expiry))
        return found

    def next_expiry(self) -> int | None:
        """Return when the next lease or delay ends, as far as is known."""
        return self._timed[0][0] if self._timed else None

    @property
    def has_ready(self) -> bool:
        """Whether an id is ready, as far as is known."""
        return bool(self._ready)
