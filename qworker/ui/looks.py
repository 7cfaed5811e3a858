"""Reads of a store with a budget: one read serves all viewers, and an expensive one happens less often."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

import msgspec

from qworker.backend.each_queue import describe_problem
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import QueueNotFound, QworkerError

__all__ = ["Look", "Looks"]

T = TypeVar("T")

# The part of the time that one kind of read may take.
_SHARE = 0.02
# Seconds that a request waits for the first read of its kind.
_PATIENCE_S = 2.0
# Seconds that it waits for a repeated read, if the last one did not take longer.
_QUICK_S = 0.05
_MOST_KEPT = 200


class Look(msgspec.Struct, Generic[T], frozen=True):
    """What a read has found.

    Attributes:
        at: Unix seconds at which it began. None: it has not ended yet.
        value: The result. None: it has not ended yet, or failed.
        problem: Why it failed, in one line.
        missing: Whether the queue does not exist.
    """

    at: float | None = None
    value: T | None = None
    problem: str | None = None
    missing: bool = False


class _Kept(msgspec.Struct):
    """One read that is repeated."""

    look: Look[object] = msgspec.field(default_factory=Look[object])
    due: float = float("-inf")
    took_s: float = 0.0
    # What the read was made of. None: it is not known.
    basis: object = None
    task: asyncio.Task[None] | None = None
    # Whether the store was changed since the last read has begun.
    is_outdated: bool = False


class Looks:
    """Keeps the results of reads.

    Args:
        every: Seconds between two reads of a cheap kind.
        clock: The clock.

    Attributes:
        changes: How often `expire` was called.
    """

    def __init__(self, every: float = 2.0, clock: Clock = SYSTEM_CLOCK) -> None:
        self._every = every
        self._clock = clock
        self.changes = 0
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    async def look(
        self,
        key: Hashable,
        read: Callable[[], Awaitable[T]],
        every: float | None = None,
        *,
        most: float = math.inf,
        basis: object = None,
    ) -> Look[T]:
        """Return the last result of a read. If it is old, start another read and do not wait for it.

        Only the first read of a kind, and the first one after a change, is waited for, and not for long.

        Args:
            key: What is read.
            read: The function that reads.
            every: Seconds between two reads, if it is not that of all.
            most: Seconds between two reads at most, for one that is expensive only the first time.
            basis: Something that is another object after each change of what is read. While it is the same, nothing is
                read. None: what is read may have changed.
        """
        kept = self._kept.setdefault(key, _Kept())
        self._kept.move_to_end(key)
        is_awaited = kept.look.at is None or kept.is_outdated
        if kept.is_outdated and kept.task is not None:
            await asyncio.wait([kept.task], timeout=_PATIENCE_S)
        stands = basis is not None and kept.basis is basis and kept.look.at is not None and kept.look.problem is None
        if stands and kept.task is None and not kept.is_outdated:
            kept.look = msgspec.structs.replace(kept.look, at=self._clock.time())
        elif kept.task is None and (kept.is_outdated or self._clock.monotonic() >= kept.due):
            kept.basis, kept.is_outdated = basis, False
            kept.task = asyncio.create_task(self._read(kept, read, self._every if every is None else every, most))
        # What is cheap is fresh. What is expensive is shown as it was.
        if kept.task is not None and (is_awaited or kept.took_s < _QUICK_S):
            await asyncio.wait([kept.task], timeout=_PATIENCE_S if is_awaited else _QUICK_S)
        self._forget()
        return kept.look  # type: ignore[return-value]

    def expire(self) -> None:
        """Make the next look of each kind read again, because the store was changed."""
        self.changes += 1
        for kept in self._kept.values():
            kept.is_outdated = True

    async def aclose(self) -> None:
        """End the reads that run. Idempotent."""
        running = [kept.task for kept in self._kept.values() if kept.task is not None]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        self._kept.clear()

    async def _read(self, kept: _Kept, read: Callable[[], Awaitable[object]], every: float, most: float) -> None:
        began, at = self._clock.monotonic(), self._clock.time()
        try:
            kept.look = Look(at, await read())
        except QueueNotFound as error:
            kept.look = Look(at, problem=str(error), missing=True)
        except (QworkerError, OSError) as error:
            # What was seen before is still the best that is known.
            kept.look = Look(kept.look.at or at, kept.look.value, describe_problem(error))
        finally:
            now = self._clock.monotonic()
            kept.took_s = now - began
            kept.due = began + max(every, min(most, (now - began) / _SHARE))
            kept.task = None

    def _forget(self) -> None:
        while len(self._kept) > _MOST_KEPT:
            oldest, kept = next(iter(self._kept.items()))
            if kept.task is not None:
                return
            del self._kept[oldest]
