"""What was listed of a queue: the ready ids in order, and the expiries, kept up to date by events between listings.

Strict FIFO: every name that comes into the directory enters the window, as the kernel tells of it. Where it may not tell of all (another
host's, or without inotify) a window is believed for 100 ms at most; else for 1 s, for the names alone keep it exact.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable

from qworker_vsqs.names import parse

__all__ = ["Window"]

_BELIEVED = 0.1
_BELIEVED_WATCHED = 1.0


class Window:
    """One queue's listing."""

    def __init__(self) -> None:
        self._ready: list[int] = []
        self._timed: list[tuple[int, int]] = []
        self._listed_at = float("-inf")
        # True: the kernel tells of every change in the directory.
        self.watched = False
        # Names seen at the last listing that are messages.
        self.count = 0

    def stale(self) -> None:
        """Believe nothing: the directory has to be listed."""
        self._listed_at = float("-inf")

    @property
    def fresh(self) -> bool:
        """Whether the last listing may still be believed."""
        return time.monotonic() - self._listed_at < (_BELIEVED_WATCHED if self.watched else _BELIEVED)

    def fill(self, names: Iterable[str], listed_at: float) -> None:
        """Replace everything by a listing that began at `listed_at` (monotonic seconds)."""
        ready: list[int] = []
        timed: list[tuple[int, int]] = []
        for name in names:
            # The common case by hand: a plain number of the usual length.
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
        self.count = len(ready) + len(timed)

    def came(self, name: str) -> None:
        """A name came into the directory."""
        found = parse(name)
        if found is None:
            return
        if found[1] is None:
            heapq.heappush(self._ready, found[0])
        else:
            heapq.heappush(self._timed, (found[1], found[0]))

    def take(self) -> int | None:
        """The oldest ready id, which leaves the window."""
        ready = self._ready
        if not ready:
            return None
        number = heapq.heappop(ready)
        while ready and ready[0] == number:
            heapq.heappop(ready)
        return number

    def put_back(self, number: int) -> None:
        """An id that was taken is ready after all."""
        heapq.heappush(self._ready, number)

    def expired(self, now: int) -> list[tuple[int, int]]:
        """(id, expiry) of what is not leased any more, in the order of the expiries; each leaves the window."""
        found: list[tuple[int, int]] = []
        while self._timed and self._timed[0][0] <= now:
            expiry, number = heapq.heappop(self._timed)
            found.append((number, expiry))
        return found

    def next_expiry(self) -> int | None:
        """When the next lease or delay ends, as far as is known."""
        return self._timed[0][0] if self._timed else None

    @property
    def some_ready(self) -> bool:
        """Whether an id is ready, as far as is known."""
        return bool(self._ready)
