"""Reaping: expired and due messages become ready, and finished messages whose retention has ended are removed."""

from __future__ import annotations

from typing import cast

from qworker_redis.store import RedisStore

__all__ = ["RedisQueueReaper"]

_BATCH = 500


class RedisQueueReaper:
    """Reaps the queues of one backend.

    Args:
        store: The store of the backend.
    """

    def __init__(self, store: RedisStore) -> None:
        self._pool = store.pool
        self._clock = store.clock
        failed, done = store.options.keep_failed, store.options.keep_done
        self._ages = _microseconds(failed.age), _microseconds(done.age)
        self._counts = _number(failed.count), _number(done.count)
        # The server's time and this process's time at the last reap of a queue. They show whether the server's clock
        # was set.
        self._last: dict[str, tuple[str, float]] = {}

    async def reap(self, queue: str) -> int:
        """Return the number of messages that became ready."""
        total, more = 0, 1
        while more:
            before, at = self._last.get(queue, ("", 0.0))
            elapsed = int((self._clock.monotonic() - at) * 1e6)
            reply = await self._pool.run_script("reap", queue, (_BATCH, *self._ages, before, elapsed, *self._counts))
            count, more, now = cast("tuple[int, int, int]", reply)
            self._last[queue] = (str(now) if now else "", self._clock.monotonic())
            total += count
        return total


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else str(int(seconds * 1e6))


def _number(count: int | None) -> str:
    return "" if count is None else str(count)
