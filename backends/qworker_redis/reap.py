"""Reaping: expired and due messages become ready, and finished messages whose retention has ended are removed."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import partial
from typing import cast

from qworker.message import LostLease, ReapResult
from qworker_redis.connection import Connection
from qworker_redis.error_replies import Reply
from qworker_redis.own_leases import RedisLease
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
        self._own = store.own
        self._host_clock = store.host_clock
        failed, done = store.options.keep_failed, store.options.keep_done
        self._ages = _microseconds(failed.age), _microseconds(done.age)
        self._counts = _number(failed.count), _number(done.count)
        # The server's time and this host's time at the last reap of a queue. They show whether the server's clock was
        # set.
        self._last: dict[str, tuple[str, int]] = {}

    async def reap(self, queue: str) -> ReapResult:
        """Make messages ready, and check the leases of this instance, some with each call."""
        total, more, now = 0, 1, 0
        held = self._own.held(queue)
        found: list[tuple[RedisLease, int]] = []
        while more or held:
            leases, held = held[:_BATCH], held[_BATCH:]
            reply = await self._pool.repeat(queue_slot(queue), partial(self._attempt, queue, leases))
            count, more, now, is_there, *gone = cast("list[int]", reply)
            self._last[queue] = (str(now) if is_there else "", self._host_clock.microseconds())
            total += count
            found += [(leases[number - 1], named) for number, named in zip(gone[::2], gone[1::2], strict=True)]
        # Only now: if a call has failed, the next reap names them again.
        lost: list[LostLease] = []
        for lease, is_cancelled in found:
            # A settlement that began in the meantime has ended it.
            if not lease.ended:
                lease.ended = True
                lost.append(LostLease(lease.message.id, lease.token, bool(is_cancelled)))
        return ReapResult(total, lost, now / 1e6)

    def _attempt(
        self, queue: str, leases: Sequence[RedisLease], connection: Connection, again: bool
    ) -> Awaitable[Reply]:
        del again
        # Each attempt has its own times: a pause between two of them must not look as if the server's clock was set.
        before, at = self._last.get(queue, ("", 0))
        elapsed = self._host_clock.microseconds() - at
        here = self._host_clock.reading()
        claims = [argument for lease in leases for argument in (lease.message.id, lease.claim)]
        arguments = (_BATCH, *self._ages, before, elapsed, *self._counts, here, *claims)
        return self._pool.evaluate(connection, "reap", queue, arguments)


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else str(int(seconds * 1e6))


def _number(count: int | None) -> str:
    return "" if count is None else str(count)
