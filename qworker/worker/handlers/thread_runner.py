"""Running plain functions in threads: one per busy consumer, never shared with commits or extensions."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections import deque
from typing import Any

from qworker.definition.callables import unrun
from qworker.worker.delivery import Delivery

__all__ = ["ThreadRunner"]


class _ThreadCall:
    """One call on its way to a thread and back."""

    __slots__ = ("context", "done", "error", "leftover", "run")

    def __init__(self, run: Delivery, done: asyncio.Future[None]) -> None:
        self.run = run
        self.context = contextvars.copy_context()
        self.done = done
        # Made when the caller has gone before the end.
        self.leftover: asyncio.Future[None] | None = None
        self.error: BaseException | None = None

    def finish(self) -> None:
        """On the loop: the thread has ended its call."""
        for future in (self.done, self.leftover):
            if future is not None and not future.done():
                future.set_result(None)


class ThreadRunner:
    """Threads that begin when they are needed and stay.

    They are daemons: a thread cannot be stopped, and one that hangs must not keep a drained worker from its end.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._work: queue.SimpleQueue[_ThreadCall | None] = queue.SimpleQueue()
        self._threads = 0
        self._busy = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        # Calls that have ended, and whether the loop has been woken for them.
        self._ended: deque[_ThreadCall] = deque()
        self._told = False

    async def run(self, run: Delivery) -> BaseException | None:
        """What the handler raised, or None. Cancelled, it leaves the thread to itself, and `run.leftover` tells its end."""
        loop = self._loop = asyncio.get_running_loop()
        ticket = _ThreadCall(run, loop.create_future())
        if self._busy >= self._threads and self._threads < self._limit:
            self._begin_thread()
        self._busy += 1
        self._work.put(ticket)
        try:
            await ticket.done
        except asyncio.CancelledError:
            run.leftover = ticket.leftover = loop.create_future()
            raise
        return ticket.error

    def close(self) -> None:
        """Let every thread end after its call."""
        for _ in range(self._threads):
            self._work.put(None)

    def _begin_thread(self) -> None:
        thread = threading.Thread(target=self._work_on, name=f"qworker-handler-{self._threads + 1}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The system gives no more: those that are there do the work.
            if not self._threads:
                raise
        else:
            self._threads += 1

    def _work_on(self) -> None:
        while (ticket := self._work.get()) is not None:
            try:
                ticket.error = unrun(ticket.context.run(_call, ticket.run))
            except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its message's outcome
                ticket.error = error
            self._ended.append(ticket)
            del ticket
            if not self._told and not self._tell():
                return

    def _tell(self) -> bool:
        """Wake the loop, once for all that end until it comes; False: it has closed, and nobody waits any more."""
        self._told = True
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._collect)
        except RuntimeError:
            return False
        return True

    def _collect(self) -> None:
        # In this order: what ends after the last look finds the flag down, and wakes the loop again.
        self._told = False
        while self._ended:
            self._busy -= 1
            self._ended.popleft().finish()


def _call(run: Delivery) -> Any:
    assert run.handler is not None
    return run.handler.function(*run.args, **run.kwargs)
