"""Reaping: expired and due messages become ready, and finished messages whose retention has ended are removed."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import cast

from qworker_redis.connection import Connection
from qworker_redis.error_replies import Reply
from qworker_redis.store import RedisStore
from qworker_redis.topology import queue_slot

__all__ = ["RedisQueueReaper"]

_BATCH = 500


class RedisQueueReaper:
    """Reaps the queues of one backend.

    Args:
        store: The store of the backend.
    """

    def __init__(self, store: RedisStore) -> None:
        self._pool = store.pool
        self._host_clock = store.host_clock
        failed, done = store.options.keep_failed, store.options.keep_done
        self._ages = _microseconds(failed.age), _microseconds(done.age)
        self._counts = _number(failed.count), _number(done.count)
        # The server's time and this host's time at the last reap of a queue. They show whether the server's clock was
        # set.
        self._last: dict[str, tuple[str, int]] = {}

    async def reap(self, queue: str) -> int:
        """Return the number of messages that became ready."""
        total, more = 0, 1
        while more:
            reply = await self._pool.repeat(queue_slot(queue), partial(self._attempt, queue))
            count, more, now = cast("tuple[int, int, int]", reply)
            self._last[queue] = (str(now) if now else "", self._host_clock.microseconds())
            total += count
        return total

    def _attempt(self, queue: str, connection: Connection, again: bool) -> Awaitable[Reply]:
        del again
        # Each attempt has its own times: a pause between two of them must not look as if the server's clock was set.
        before, at = self._last.get(queue, ("", 0))
        elapsed = self._host_clock.microseconds() - at
        here = self._host_clock.reading()
        arguments = (_BATCH, *self._ages, before, elapsed, *self._counts, here)
        return self._pool.evaluate(connection, "reap", queue, arguments)


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else str(int(seconds * 1e6))


def _number(count: int | None) -> str:
    return "" if count is None else str(count)
