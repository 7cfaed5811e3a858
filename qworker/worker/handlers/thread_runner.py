"""Plain functions run in threads: one per busy consumer, never shared with commits or extensions."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections import deque

from qworker.attempt.providers import WorkerProviders
from qworker.failure_text import NotBegun, error_type
from qworker.worker.delivery import Delivery

__all__ = ["ThreadRunner"]


class _ThreadCall:
    """One call of a handler, on its way to a thread and back."""

    __slots__ = ("context", "delivery", "done", "ended", "error", "leftover")

    def __init__(self, delivery: Delivery, done: asyncio.Future[None]) -> None:
        self.delivery = delivery
        self.context = contextvars.copy_context()
        self.done = done
        # Created if the caller is cancelled before the thread ends.
        self.leftover: asyncio.Future[None] | None = None
        # Whether the loop knows that the thread has ended the call.
        self.ended = False
        self.error: BaseException | None = None

    def finish(self) -> None:
        """Report on the event loop that the thread has ended the call."""
        self.ended = True
        for future in (self.done, self.leftover):
            if future is not None and not future.done():
                future.set_result(None)


class ThreadRunner:
    """Runs handlers in threads, which start when they are needed and stay.

    They are daemons: a thread cannot be stopped, and one that hangs must not keep a drained worker from its end.
    """

    def __init__(self, limit: int, providers: WorkerProviders) -> None:
        self._limit = limit
        # Handlers that wait for other jobs. Their threads do no work meanwhile.
        self.waiting = 0
        self._providers = providers
        self._work: queue.SimpleQueue[_ThreadCall | None] = queue.SimpleQueue()
        self._threads = 0
        self._busy = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        # Calls that have ended, and whether the loop has been woken for them.
        self._ended: deque[_ThreadCall] = deque()
        self._wake_pending = False

    async def run(self, delivery: Delivery) -> BaseException | None:
        """Run a handler. Return what it raised, or None.

        A cancellation does not end the thread: `delivery.leftover` is done when the thread ends.
        """
        loop = self._loop = asyncio.get_running_loop()
        call = _ThreadCall(delivery, loop.create_future())
        if self._busy >= self._threads and self._threads < self._limit + self.waiting:
            try:
                self._start_thread()
            except RuntimeError as error:
                return NotBegun(error_type(error), f"no thread can be started: {error}")
        self._busy += 1
        self._work.put(call)
        try:
            await call.done
        except asyncio.CancelledError:
            # Both can happen in one turn of the loop: then there is no thread to wait for.
            if not call.ended:
                delivery.leftover = call.leftover = loop.create_future()
            raise
        return call.error

    def set_waiting(self, waiting: int) -> None:
        """Take the number of handlers that wait, and start the threads that calls in the queue lack."""
        self.waiting = waiting
        while self._busy > self._threads and self._threads < self._limit + waiting:
            before = self._threads
            self._start_thread()
            if self._threads == before:
                # The system allows no more.
                return

    def close(self) -> None:
        """Let every thread end after its call."""
        for _ in range(self._threads):
            self._work.put(None)

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run_calls, name=f"qworker-handler-{self._threads + 1}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The system allows no more threads. The others do the work.
            if not self._threads:
                raise
        else:
            self._threads += 1

    def _run_calls(self) -> None:
        while (call := self._work.get()) is not None:
            try:
                call.error = call.context.run(self._run_handler, call.delivery)
            except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its message's outcome
                call.error = error
            self._ended.append(call)
            del call
            if not self._wake_pending and not self._wake_loop():
                return

    def _run_handler(self, delivery: Delivery) -> BaseException | None:
        handler = delivery.handler
        assert handler is not None
        if handler.runner is None:
            return delivery.take_value(handler.function(*delivery.args, **delivery.kwargs))
        assert delivery.context is not None
        value = handler.runner.run_sync(delivery.context, delivery.args, delivery.kwargs, self._providers)
        return delivery.take_value(value)

    def _wake_loop(self) -> bool:
        """Wake the event loop once for all calls that end until it reacts. Return False if the loop has closed."""
        self._wake_pending = True
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._collect)
        except RuntimeError:
            return False
        return True

    def _collect(self) -> None:
        # In this order: a call that ends after the last check finds the flag down, and wakes the loop again.
        self._wake_pending = False
        while self._ended:
            self._busy -= 1
            self._ended.popleft().finish()
