"""Messages that this worker cannot run and another one may: how they are released, so that the other one gets them.

Each is released in turns for some time, in which this worker looks at what is behind it, and for no time. Then it is
ready at once, which wakes idle workers, and this worker leaves them its queue for a moment. No store wakes a worker for
a message that will be due.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Releases"]

# Seconds of the first release of a message and of the longest one. Each lasts twice as long as the one before.
_FIRST, _LONGEST = 0.1, 10.0
# Seconds, at least, for which other workers can lease first. They need a part of it to wake up.
_HEAD_START = 0.1
# The number of remembered messages. One that is forgotten is released for the first time again.
_MOST = 10_000


class Releases:
    """Decides how long each message is released.

    Args:
        draw: Returns uniform numbers from [0, 1). Two workers that leave messages to each other return at two times.
    """

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        # The last delay of each message, negative if it was offered since, and when. In the order of their releases.
        self._delays: dict[str, tuple[float, float]] = {}
        # The time until which each queue is left to others.
        self._left_until: dict[str, float] = {}

    def next(self, queue: str, message_id: str, now: float) -> tuple[float, float]:
        """Decide about one release.

        Args:
            queue: The message's queue.
            message_id: The message's id.
            now: The time.

        Returns:
            Seconds for which the message is released, and seconds for which the queue is left to others from now on.
        """
        delays = self._delays
        last, _ = delays.pop(message_id, (0.0, 0.0))
        first = _FIRST
        if len(delays) >= _MOST:
            oldest, at = delays.pop(next(iter(delays)))
            if now - at < 2 * _LONGEST:
                # There are more than are remembered. They must not all return as new ones, at full speed.
                first = min(_LONGEST, abs(oldest) * 2)
        if last > 0:
            pause = self._pause(queue, now)
            if pause:
                delays[message_id] = -last, now
                return 0.0, pause
        delay = min(_LONGEST, abs(last) * 2 or first)
        delays[message_id] = delay, now
        return delay, 0.0

    def _pause(self, queue: str, now: float) -> float:
        """Return how long the queue is left to others. 0.0: it was left to them a moment ago.

        The messages of others never keep this worker from its own for more than half of the time.
        """
        until = self._left_until.get(queue, now - _HEAD_START)
        if now < until + _HEAD_START:
            return max(0.0, until - now)
        pause = _HEAD_START * (1 + self._draw())
        self._left_until[queue] = now + pause
        return pause
