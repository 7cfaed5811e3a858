"""Delayed messages: `.qworker/due/<queue>/<due ms>.<id>`.

mq's own mover, which has one delay for all messages, does not see them.
"""

from __future__ import annotations

import os
import time

__all__ = ["DueIndex"]

_TICK_NS = 50_000_000
_RESCAN = 30.0


class DueIndex:
    """The due times of the delayed messages in one queue. The directory is read again only after it changed.

    Args:
        directory: Descriptor of the queue's `due` directory.
    """

    def __init__(self, directory: int) -> None:
        self._directory = directory
        self._due: dict[str, int] = {}
        # The names whose number has leading zeros, by their ids.
        self._padded: dict[str, str] = {}
        self._next = 0
        self._stamp: int = -1
        self._listed_at = 0.0
        self._is_stable = False

    def refresh(self) -> None:
        """Read the directory if it may have changed."""
        stamp = os.fstat(self._directory).st_mtime_ns
        now = time.monotonic()
        if self._is_stable and stamp == self._stamp and now - self._listed_at < _RESCAN:
            return
        self._is_stable = time.time_ns() - stamp > _TICK_NS
        self._stamp = stamp
        self._listed_at = now
        self._due, self._padded = {}, {}
        for name in os.listdir(self._directory):
            due, dot, message_id = name.partition(".")
            if dot and due.isascii() and due.isdigit():
                self._due[message_id] = int(due)
                if due[0] == "0":
                    self._padded[message_id] = name
        self._next = min(self._due.values(), default=0)

    def next_due(self) -> float | None:
        """Return when the first message becomes due, in Unix seconds. None: no message is delayed."""
        self.refresh()
        return self._next / 1000 if self._due else None

    def list_due(self, now: float) -> list[str]:
        """Return the ids of the messages that are due at `now`, the first due first."""
        self.refresh()
        limit = int(now * 1000)
        if not self._due or self._next > limit:
            return []
        return sorted((i for i, due in self._due.items() if due <= limit), key=lambda i: self._due[i])

    def get(self, message_id: str) -> int | None:
        """Return when a message is due, in Unix milliseconds. None: it is not delayed."""
        self.refresh()
        return self._due.get(message_id)

    def list_all(self) -> list[tuple[int, str]]:
        """Return due times in Unix milliseconds, and ids, in order."""
        self.refresh()
        return sorted((due, message_id) for message_id, due in self._due.items())

    def file_name(self, message_id: str) -> str:
        """Return the name of a delayed message's file."""
        return self._padded.get(message_id) or f"{self._due[message_id]}.{message_id}"

    def drop(self, message_id: str) -> None:
        """Drop a message that was moved. Other processes see it by the change time of the directory."""
        self._padded.pop(message_id, None)
        if self._due.pop(message_id, None) == self._next:
            self._next = min(self._due.values(), default=0)
