"""Stored messages that are larger than `max_body`: each is reported once, and is tried again after growing pauses."""

from __future__ import annotations

import structlog

from qworker import log_events as events
from qworker.kit.max_body import describe_too_large
from qworker.names import printable

__all__ = ["LargeMessages"]

# Seconds until a message is tried again: the first pause, and the longest.
_FIRST, _LAST = 1.0, 60.0
# Messages that are known at a time.
_MOST = 50_000

_log = structlog.get_logger("qworker.store")


class LargeMessages:
    """The messages of one backend that were too large when they were tried last.

    Args:
        most: The largest body in bytes. None: no message is too large.
    """

    __slots__ = ("_most", "_pauses")

    def __init__(self, most: int | None) -> None:
        self._most = most
        # The time of the next attempt and the last pause, by queue and name.
        self._pauses: dict[tuple[str, str], tuple[float, float]] = {}

    def waits(self, queue: str, name: str, now: float) -> bool:
        """Return whether a message is not tried now, in the seconds of the clock that `skip` gets."""
        return bool(self._pauses) and self._pauses.get((queue, name), (now, 0.0))[0] > now

    def is_too_large(self, size: int) -> bool:
        """Return whether a message of this size is not leased."""
        return self._most is not None and size > self._most

    def skip(self, queue: str, name: str, size: int, now: float) -> float:
        """Report a message if it is new, and return the time of its next attempt."""
        known = self._pauses.get((queue, name))
        if known is None:
            if len(self._pauses) >= _MOST:
                self._pauses.clear()
            reason = describe_too_large(size, self._most or 0)
            _log.error(events.MESSAGE_TOO_LARGE, queue=queue, file=printable(name), reason=reason)
        pause = _FIRST if known is None else min(known[1] * 2, _LAST)
        self._pauses[queue, name] = now + pause, pause
        return now + pause
