"""Files that are larger than `max_body`: they stay where they are, are reported once, and are tried again later."""

from __future__ import annotations

import heapq
import os

import structlog

from qworker import log_events as events
from qworker.kit.max_body import describe_too_large
from qworker.names import printable
from qworker_file.layout import QueueDir

__all__ = ["OversizedFiles"]

# Seconds until a file is tried again: the first pause, and the longest.
_FIRST, _LAST = 1.0, 60.0
# Names that are known at a time: as many as a window has.
_MOST = 50_000


class OversizedFiles:
    """The files of one queue that were too large when they were tried last.

    Args:
        files: The queue.

    Attributes:
        pauses: The pause in seconds of each name that is not tried now. Listings leave these names out.
    """

    __slots__ = ("_due", "_files", "_last", "_log", "pauses")

    def __init__(self, files: QueueDir) -> None:
        self._files = files
        self.pauses: dict[str, float] = {}
        # The last pause of names that are being tried again, or were.
        self._last: dict[str, float] = {}
        # (monotonic seconds of the next attempt, directory, name).
        self._due: list[tuple[float, int, str]] = []
        self._log = structlog.get_logger("qworker.file")

    def skip(self, directory: int, name: str, now: float) -> None:
        """Try a file again after a pause, which doubles each time.

        Args:
            directory: The descriptor of its directory.
            name: Its name there.
            now: Monotonic seconds.
        """
        if name in self.pauses:
            return
        if len(self.pauses) >= _MOST:
            # They are found again by the next listing.
            self.pauses.clear()
            self._due.clear()
        last = self._last.pop(name, None)
        if last is None:
            self._report(directory, name)
        self.pauses[name] = pause = _FIRST if last is None else min(last * 2, _LAST)
        heapq.heappush(self._due, (now + pause, directory, name))

    def _report(self, directory: int, name: str) -> None:
        try:
            size = os.stat(name, dir_fd=directory, follow_symlinks=False).st_size
        except FileNotFoundError:
            return
        reason = describe_too_large(size, self._files.max_body or 0)
        self._log.error(events.MESSAGE_TOO_LARGE, queue=self._files.name, file=printable(name), reason=reason)

    def take_due(self, now: float) -> list[tuple[int, str]]:
        """Return the files to try again now, as (directory, name)."""
        found: list[tuple[int, str]] = []
        while self._due and self._due[0][0] <= now:
            _, directory, name = heapq.heappop(self._due)
            if (pause := self.pauses.pop(name, None)) is not None:
                if len(self._last) >= _MOST:
                    self._last.clear()
                self._last[name] = pause
                found.append((directory, name))
        return found

    def next_at(self) -> float:
        """Return when the next file is tried again, in monotonic seconds."""
        return self._due[0][0] if self._due else float("inf")
