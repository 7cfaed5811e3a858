"""The feeder: leases as many messages as consumers are free, fairly over the queues, and waits when there are none."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from typing import Any, TypeVar

from qworker import log_events as events
from qworker.backend.offers import count_too_large_in
from qworker.errors import UNUSABLE, QueueNotFound
from qworker.message import Lease
from qworker.worker.outage import BACKEND_ERRORS
from qworker.worker.shares import Shares
from qworker.worker.state import WorkerState

__all__ = ["Feeder"]

T = TypeVar("T")

# Seconds of the longest wait. After it, the feeder leases even if the store has missed a wake-up.
_LONGEST_WAIT = 1.0
# Seconds between two checks of a burst that may be over.
_BURST_PAUSE = 0.05
# Seconds. After two waits in a row that end within this time and give nothing, the feeder pauses for this time.
_AT_ONCE = 0.001


class Feeder:
    """Leases messages until it is stopped."""

    def __init__(self, state: WorkerState) -> None:
        options = state.options
        self._state = state
        self._backend = state.backend
        self._queues = deque(state.queues)
        # None: all queues get the same.
        shares = options.shares or ()
        is_equal = not options.strict and all(share.weight == 1 and share.concurrency is None for share in shares)
        self._shares = None if is_equal else Shares(shares, state.held, strict=options.strict)
        # Whether the wait that is going on leaves out queues that are at their own concurrency.
        self._leaves_out = False
        self._visibility = options.visibility_timeout
        self._burst = options.burst
        self._held = state.held
        self._capacity = state.capacity
        self._events = state.events
        self._log = state.log
        self._outage = state.outage("feeder")
        self._clock = state.clock
        # An expiry counts from before the wait that ends in a lease, so the wait must be short in comparison.
        self._longest_wait = min(_LONGEST_WAIT, self._visibility / 3)
        self._stopped = False
        self._wake = asyncio.Event()
        # The task that waits for messages, and whether the feeder itself has ended the wait.
        self._waiting: asyncio.Task[Any] | None = None
        self._interrupted = False
        # Whether more messages may be ready, because the last lease gave as many as it asked for.
        self._more = True
        # Waits in a row that ended at once and gave nothing.
        self._in_vain = 0
        # The queues whose last lease failed. Others can still work.
        self._failing: set[str] = set()
        # The queues that are left to others, and until when, in seconds of the event loop.
        self._left: dict[str, float] = {}

    def stop(self) -> None:
        """Lease nothing more, and end a wait for messages at once."""
        self._stopped = True
        self.interrupt()

    def wake(self) -> None:
        """Check the capacity again."""
        self._wake.set()
        if self._leaves_out:
            self.interrupt()

    def interrupt(self) -> None:
        """End a wait for messages, because there is no capacity now."""
        self._wake.set()
        if self._waiting is not None and not self._interrupted:
            self._interrupted = True
            self._waiting.cancel()

    def stay_away(self, queue: str, seconds: float) -> None:
        """Lease nothing from a queue for some time, because another worker is to lease first."""
        until = asyncio.get_running_loop().time() + seconds
        if queue not in self._left:
            # The wait that is going on would lease from it.
            self.interrupt()
        self._left[queue] = max(until, self._left.get(queue, until))

    async def run(self) -> None:
        """Lease until stopped, or until a burst is over."""
        empty_looks = 0
        while not self._stopped:
            try:
                if await self._fill():
                    empty_looks = 0
                elif self._burst and not self._held:
                    empty_looks = empty_looks + 1 if await self._is_drained() else 0
                    if empty_looks >= 2:
                        await self._report_blocked()
                        return
                if not self._failing:
                    self._outage.record_success()
            except BACKEND_ERRORS as error:
                # A wait for many queues does not say which one has failed. A lease from each finds it.
                self._more = True
                await self._pause(self._outage.record_failure(error))

    async def _fill(self) -> bool:
        """Lease once. Return whether anything was leased."""
        room = self._room()
        if room <= 0:
            self._wake.clear()
            await self._wake.wait()
            return True
        if self._left and not self._return_to_queues():
            await self._pause(self._until_return())
            return True
        began = self._clock.monotonic()
        waited = not self._more
        # A store names the loss of a lease once, perhaps before the leases of the next queue are here.
        self._state.early_losses = {}
        try:
            leases = await self._lease_within(room) if waited else await self._lease(room)
            self._more = len(leases) >= room
            if leases:
                self._events.messages_leased(leases, began)
        finally:
            self._state.early_losses = None
        # The consumers first: to start the next wait costs a store more than to start a handler. And always, but not
        # too often: a store may report at once that it has something, and give nothing.
        in_vain = waited and not leases and self._clock.monotonic() - began < _AT_ONCE
        self._in_vain = self._in_vain + 1 if in_vain else 0
        await asyncio.sleep(_AT_ONCE if self._in_vain > 1 else 0)
        return bool(leases)

    def _room(self) -> int:
        room = self._capacity()
        return room if self._shares is None else min(room, self._shares.room())

    async def _lease(self, room: int) -> list[Lease]:
        if len(self._queues) == 1:
            return await self._backend.lease(self._queues[0], room, self._visibility)
        return await self._lease_each(room)

    async def _lease_each(self, room: int) -> list[Lease]:
        return await (self._lease_fairly(room) if self._shares is None else self._lease_shares(self._shares, room))

    def _return_to_queues(self) -> bool:
        """Lease again from the queues that were left for long enough. Return whether there is a queue to lease from."""
        now = asyncio.get_running_loop().time()
        self._left = {queue: until for queue, until in self._left.items() if until > now}
        return len(self._left) < len(self._queues)

    def _until_return(self) -> float:
        """Return the seconds until the first queue is leased from again."""
        return max(0.0, min(self._left.values()) - asyncio.get_running_loop().time())

    async def _lease_fairly(self, room: int) -> list[Lease]:
        """Lease an equal share of each queue first, then the rest from the queues that have more."""
        share = max(1, room // len(self._queues))
        leases: list[Lease] = []
        having_more: list[str] = []
        for _ in range(len(self._queues)):
            wanted = min(share, room - len(leases))
            if wanted <= 0:
                break
            queue = self._queues[0]
            self._queues.rotate(-1)
            if queue in self._left:
                continue
            found = await self._try(queue, wanted, leases)
            if found == wanted:
                having_more.append(queue)
        for queue in having_more:
            if len(leases) < room:
                await self._try(queue, room - len(leases), leases)
        return leases

    async def _lease_shares(self, shares: Shares, room: int) -> list[Lease]:
        """Lease the share of each queue first, then the rest from the queues that have more."""
        turn = shares.begin(room, self._left)
        leases: list[Lease] = []
        having_more: list[str] = []
        for amount, queues in ((turn.share, turn.queues), (turn.rest, having_more)):
            for queue in tuple(queues):
                wanted = amount(queue, room - len(leases))
                if wanted <= 0:
                    continue
                found = await self._try(queue, wanted, leases)
                turn.took(queue, wanted, found)
                if found == wanted:
                    having_more.append(queue)
        return leases

    async def _try(self, queue: str, wanted: int, leases: list[Lease]) -> int:
        try:
            found = await self._backend.lease(queue, wanted, self._visibility)
        except BACKEND_ERRORS as error:
            # The messages of other queues are leased, and must run. If all queues fail, the loop pauses.
            self._failing.add(queue)
            if len(self._failing) == len(self._queues) and not leases:
                raise
            self._outage.record_failure(error)
            return 0
        self._failing.discard(queue)
        leases.extend(found)
        return len(found)

    async def _lease_within(self, room: int) -> list[Lease]:
        timeout = _BURST_PAUSE if self._burst else self._longest_wait
        if len(self._queues) == 1:
            queue = self._queues[0]
            return await self._interruptible(self._backend.lease(queue, room, self._visibility, timeout)) or []
        # A queue that refuses to lease may report at once that it has something: it is tried after each other wait.
        free = self._queues if self._shares is None else self._shares.free()
        here = [queue for queue in self._queues if queue not in self._left and queue in free]
        well = [queue for queue in here if queue not in self._failing] or here
        if self._left:
            timeout = min(timeout, self._until_return())
        self._leaves_out = len(free) < len(self._queues)
        try:
            await self._interruptible(self._backend.wait(well, timeout) if well else asyncio.sleep(timeout))
        finally:
            self._leaves_out = False
        # The next turn leases, because the capacity may have changed.
        self._more = True
        if self._stopped or (self._left and not self._return_to_queues()):
            return []
        return await self._lease_each(self._room())

    async def _interruptible(self, waiting: Awaitable[T]) -> T | None:
        # Every message to an idle worker passes here: a cancel scope would cost as much as the rest of the turn.
        task = asyncio.current_task()
        assert task is not None
        self._waiting, self._interrupted = task, False
        try:
            return await waiting
        except asyncio.CancelledError:
            if not self._interrupted or task.cancelling() > 1:
                raise
            return None
        finally:
            self._waiting = None
            if self._interrupted:
                task.uncancel()

    async def _is_drained(self) -> bool:
        """Return whether no queue has messages that are leased, or that are ready and can be leased."""
        for queue in tuple(self._queues):
            try:
                stats = await self._backend.stats(queue)
            except (QueueNotFound, *UNUSABLE):
                # The queue was deleted while the worker ran, or cannot be used until an operator has acted.
                continue
            # Nothing was leased before this, so the blocked ones are still blocked.
            if stats.leased + stats.ready > stats.blocked and (stats.leased or not stats.paused):
                return False
        return True

    async def _report_blocked(self) -> None:
        """Report the messages that a burst leaves because no worker can lease them."""
        for queue in tuple(self._queues):
            try:
                blocked = (await self._backend.stats(queue)).blocked + await count_too_large_in(self._backend, queue)
            except (QueueNotFound, *UNUSABLE):
                continue
            if blocked:
                reason = "they cannot be read or are larger than max_body: see `qworker doctor URL`"
                self._log.warning(events.MESSAGES_LEFT, queue=queue, blocked=blocked, reason=reason)

    async def _pause(self, seconds: float) -> None:
        await self._interruptible(asyncio.sleep(seconds))
