"""The consumers: persistent asyncio tasks, as many as messages can run at once, that take from one deque.

No task is created per message, and no wake-up is sent per message: a consumer that finds the deque filled wakes two
more. So handlers that wait spread over all consumers in a few turns, and handlers that never wait run one after the
other in one consumer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from qworker.jobs.handler_wait import HANDLER_WAITS
from qworker.logs import RUNNING
from qworker.message import SettleAction
from qworker.worker.delivery import Delivery
from qworker.worker.state import WorkerState

__all__ = ["Consumers"]

# Seconds that handlers which never wait may run in a row before the loop gets its turn.
_SLICE = 0.002


class _Executor(Protocol):
    def prepare(self, delivery: Delivery) -> bool: ...
    def is_suspect(self, delivery: Delivery) -> bool: ...
    async def run(self, delivery: Delivery, consumer: asyncio.Task[None]) -> None: ...
    async def decide_misfit(self, delivery: Delivery) -> None: ...
    async def report_failure(self, delivery: Delivery) -> None: ...


class Consumers:
    """Runs each message in a free consumer.

    Args:
        state: The state of the worker.
        executor: The executor of messages.
        isolated: Whether these consumers run the suspects that others pass on.
    """

    def __init__(self, state: WorkerState, executor: _Executor, *, isolated: bool = False) -> None:
        self._state = state
        self._isolated = isolated
        self._limit = state.options.isolated if isolated else state.options.concurrency
        self._waits = state.waits
        self._executor = executor
        self._events = state.events
        # This function is called for each message.
        self._finish = state.events.delivery_finished
        self._clock = state.clock
        self._queue: deque[Delivery] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        # Consumers that were woken and do not run yet.
        self._woken = 0
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._end: asyncio.Future[None] = self._loop.create_future()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    def feed(self, deliveries: list[Delivery]) -> None:
        """Take leased messages."""
        self._queue.extend(deliveries)
        if self._closing:
            self.release_waiting()
        else:
            self._wake(len(self._queue))

    def waits_changed(self) -> None:
        """Run what waits, if a handler that waits for another job has made room."""
        if self._queue:
            self._wake(len(self._queue))

    def release_waiting(self) -> None:
        """Release the messages that have not started."""
        while self._queue:
            self._release(self._queue.popleft())

    async def watch(self) -> None:
        """Wait for the error that ends a consumer, and raise it. No consumer ends by itself."""
        await self._failed

    async def close(self, patience: float) -> bool:
        """End every consumer. Return False if a handler does not end within `patience` seconds.

        The caller has cancelled the handlers: a second cancellation would cut their clean-up short.
        """
        self._closing = True
        self.release_waiting()
        self._wake_all()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=patience)
        return not self._tasks

    # -- one consumer ------------------------------------------------------------------------------------------------

    async def _consume(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._woken -= 1
        # The handlers run in copies of this context.
        HANDLER_WAITS.set(self._waits)
        while not self._closing:
            try:
                await self._work(task)
            except asyncio.CancelledError:
                # Consumers are never cancelled: it was meant for a handler that has ended.
                await _clear_pending_cancellations(task)

    async def _work(self, task: asyncio.Task[None]) -> None:
        while not self._queue:
            if self._closing:
                return
            await self._rest()
        self._wake(len(self._queue) - 1)
        turn = self._clock.monotonic()
        while self._queue and not self._closing:
            await self._execute(self._queue.popleft(), task)
            now = self._clock.monotonic()
            if now - turn > _SLICE:
                await asyncio.sleep(0)
                turn = now

    async def _execute(self, delivery: Delivery, task: asyncio.Task[None]) -> None:
        executor = self._executor
        if self._isolated or delivery.cancel_reason is not None or executor.prepare(delivery):
            if not self._isolated and delivery.cancel_reason is None and executor.is_suspect(delivery):
                # Nothing waits for a suspect: this consumer takes the next message.
                self._events.message_isolated(delivery)
                return
            await executor.run(delivery, task)
            if task.cancelling():
                await _clear_pending_cancellations(task)
        elif delivery.settlement is None:
            await self._complete(executor.decide_misfit, delivery, task)
        if delivery.unreported:
            await self._complete(executor.report_failure, delivery, task)
        if delivery.settlement is not None:
            self._finish(delivery)
        else:
            self._events.lease_lost(delivery, "it was lost while the handler ran")
        if delivery.leftover is not None:
            await self._wait_for_thread(delivery.leftover)

    async def _complete(
        self, step: Callable[[Delivery], Awaitable[None]], delivery: Delivery, task: asyncio.Task[None]
    ) -> None:
        """Carry out a step after the handler. A cancellation in it was meant for a handler that has ended.

        A step can be repeated. Without its end, the message would be held for ever.
        """
        while True:
            try:
                return await step(delivery)
            except asyncio.CancelledError:
                if self._closing:
                    raise
                await _clear_pending_cancellations(task)

    async def _wait_for_thread(self, leftover: asyncio.Future[None]) -> None:
        """Keep the consumer in use until its thread ends: a thread cannot be cancelled."""
        self._state.leftover_threads += 1
        try:
            await asyncio.wait((leftover, self._end), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._state.leftover_threads -= 1
            self._events.consumer_freed()

    def _release(self, delivery: Delivery) -> None:
        if delivery.gone is not None:
            self._events.lease_lost(delivery, "it was lost before the handler ran")
            return
        delivery.settle(SettleAction.RELEASE)
        self._finish(delivery)

    # -- rest and wake -----------------------------------------------------------------------------------------------

    async def _rest(self) -> None:
        """Wait for a wake-up."""
        # Keep nothing of the last message.
        RUNNING.set(None)
        woken: asyncio.Future[None] = self._loop.create_future()
        self._idle.append(woken)
        try:
            await woken
        finally:
            if woken.cancelled():
                self._idle.remove(woken)
            else:
                self._woken -= 1

    def _wake(self, work: int) -> None:
        """Wake two consumers, unless as many as there are messages were woken already."""
        wanted = min(2, work - self._woken)
        limit = self._limit + (self._state.waiting_suspects if self._isolated else self._state.waiting)
        while wanted > 0 and (self._idle or len(self._tasks) < limit):
            wanted -= 1
            self._woken += 1
            if self._idle:
                self._idle.pop().set_result(None)
            else:
                task = self._loop.create_task(self._consume(), name=f"qworker-consumer-{len(self._tasks)}")
                self._tasks.add(task)
                task.add_done_callback(self._on_task_end)

    def _wake_all(self) -> None:
        while self._idle:
            self._woken += 1
            self._idle.pop().set_result(None)
        if not self._end.done():
            self._end.set_result(None)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)


async def _clear_pending_cancellations(consumer: asyncio.Task[None]) -> None:
    """Drop cancellations that were meant for a handler, so that the next message does not get them."""
    try:
        # A handler that cancels its own task and returns leaves one that has not been delivered yet.
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        pass
    while consumer.cancelling():
        consumer.uncancel()
