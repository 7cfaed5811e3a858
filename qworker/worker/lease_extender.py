"""The lease keeper: extends leases from a thread of its own, so that a handler that blocks the event loop keeps its message.

A lease is extended when a third of its visibility has gone at the latest. If it is lost, its handler is cancelled. If it could not be
extended, its handler is cancelled before it expires, by the monotonic clock. Extending and settling one lease never overlap: see `withdraw`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet

from qworker.backend import Backend
from qworker.clock import Clock
from qworker.worker.delivery import CancelReason, Delivery
from qworker.worker.outage import BACKEND_ERRORS, Outage

__all__ = ["LeaseExtender"]


class LeaseExtender:
    """Extends every lease in `held` until it is settled.

    Args:
        backend: the store; its `extend` is called from the thread.
        held: the worker's leases: changed on the loop's thread, read here.
        visibility: seconds.
        clock: the monotonic clock for expiries.
        outage: says once when extensions fail.
        extended: called on the loop's thread after each round of extensions, with those that were extended.
    """

    def __init__(
        self,
        backend: Backend,
        held: AbstractSet[Delivery],
        visibility: float,
        *,
        clock: Clock,
        outage: Outage,
        extended: Callable[[list[Delivery]], None],
    ) -> None:
        self._backend = backend
        self._held = held
        self._visibility = visibility
        self._clock = clock
        self._outage = outage
        self._extended = extended
        # Half of the third: a lease is extended between one and two rounds after its start.
        self._round = visibility / 6
        self._lock = threading.Lock()
        self._extending: frozenset[Delivery] = frozenset()
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="qworker-keeper", daemon=True)

    def start(self) -> None:
        """Begin to extend."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, patience: float) -> bool:
        """End the thread; False if it hangs in the store for more than `patience` seconds and is left to itself."""
        self._stopping.set()
        until = self._clock.monotonic() + patience
        while self._thread.is_alive() and self._clock.monotonic() < until:
            await asyncio.sleep(0.002)
        return not self._thread.is_alive()

    def withdraw(self, runs: Iterable[Delivery]) -> list[Delivery]:
        """Let no new extension of these begin; return those whose extension is under way, to be withdrawn again later."""
        with self._lock:
            extending = self._extending
            busy: list[Delivery] = []
            for run in runs:
                if run in extending:
                    busy.append(run)
                else:
                    run.settling = True
            return busy

    async def watch(self) -> None:
        """Cancel what is about to expire; on the loop, because the thread may hang in the store.

        Raises:
            BaseException: what ended the thread.
        """
        tick = min(self._visibility / 12, 1.0)
        margin = min(self._visibility / 6, 5.0)
        while True:
            await asyncio.sleep(tick)
            if self._error is not None:
                raise self._error
            latest = self._clock.monotonic() + margin
            for run in list(self._held):
                if run.expires <= latest and not run.settling and run.stop is None:
                    run.cancel(CancelReason.EXPIRING)

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            pause = self._round
            while not self._stopping.wait(pause):
                pause = self._renew(self._due())
        except BaseException as error:  # noqa: BLE001 - `watch` raises it on the loop
            self._error = error

    def _due(self) -> list[Delivery]:
        # The copy is one step under the interpreter's lock; the loop's thread goes on changing the set.
        with self._lock:
            before = self._clock.monotonic() - self._round
            due = [run for run in list(self._held) if run.extended_at <= before and not run.settling]
            self._extending = frozenset(due)
            return due

    def _renew(self, due: list[Delivery]) -> float:
        if not due:
            return self._round
        began = self._clock.monotonic()
        lost: set[int] = set()
        extended: list[Delivery] = []
        pause = self._round
        try:
            lost = {id(lease) for lease in self._backend.extend([run.lease for run in due], self._visibility)}
        except BACKEND_ERRORS as error:
            pause = min(self._outage.failed(error), self._round / 2)
        else:
            self._outage.over()
            extended = [run for run in due if id(run.lease) not in lost]
            for run in extended:
                run.extended_at = began
                run.expires = began + self._visibility
        finally:
            with self._lock:
                self._extending = frozenset()
        self._tell([run for run in due if id(run.lease) in lost], extended)
        return pause

    def _tell(self, lost: list[Delivery], extended: list[Delivery]) -> None:
        loop = self._loop
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._told, lost, extended)
        except RuntimeError:
            # The loop has closed under a thread that hung in the store: nobody is left to be told.
            if not self._stopping.is_set():
                raise

    def _told(self, lost: list[Delivery], extended: list[Delivery]) -> None:
        for run in lost:
            if run in self._held:
                run.cancel(CancelReason.LOST)
        self._extended(extended)
