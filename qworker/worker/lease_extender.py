"""The lease extender: a thread that extends leases, so that a handler that blocks the event loop keeps its message.

A lease is extended when a third of its visibility timeout has passed at the latest. If it is lost, its handler is
cancelled, after the reaper has asked the store why. If it could not be extended, its handler is cancelled before it
expires, by the monotonic clock. The extension and the settlement of one lease never overlap: see `stop_extending`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

from qworker.context import CancelReason
from qworker.worker.delivery import Delivery, expiry_margin
from qworker.worker.outage import BACKEND_ERRORS
from qworker.worker.state import WorkerState

__all__ = ["LeaseExtender"]


class LeaseExtender:
    """Extends every lease that is held, until it is settled. `Backend.extend` is called from the thread."""

    def __init__(self, state: WorkerState) -> None:
        self._backend = state.backend
        self._held = state.held
        self._visibility = state.options.visibility_timeout
        self._clock = state.clock
        self._events = state.events
        self._outage = state.outage("keeper")
        # Half of the third: a lease is extended between one and two rounds after its start.
        self._round = self._visibility / 6
        self._lock = threading.Lock()
        self._extending: frozenset[Delivery] = frozenset()
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="qworker-keeper", daemon=True)

    def start(self) -> None:
        """Start to extend."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, patience: float) -> bool:
        """End the thread. Return False if it hangs in the store for more than `patience` seconds."""
        self._stopping.set()
        until = self._clock.monotonic() + patience
        while self._thread.is_alive() and self._clock.monotonic() < until:
            await asyncio.sleep(0.002)
        return not self._thread.is_alive()

    def stop_extending(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """Let no new extension of these start. Return those whose extension is under way: call again for them later."""
        with self._lock:
            extending = self._extending
            busy: list[Delivery] = []
            for delivery in deliveries:
                if delivery in extending:
                    busy.append(delivery)
                else:
                    delivery.settling = True
            return busy

    async def watch(self) -> None:
        """Cancel handlers whose lease is about to expire: on the event loop, because the thread may hang in the store.

        Raises:
            BaseException: The error that ended the thread.
        """
        tick = min(self._visibility / 12, 1.0)
        margin = expiry_margin(self._visibility)
        while True:
            await asyncio.sleep(tick)
            if self._error is not None:
                raise self._error
            latest = self._clock.monotonic() + margin
            for delivery in list(self._held):
                if delivery.expires <= latest and not delivery.settling and delivery.cancel_reason is None:
                    delivery.cancel(CancelReason.LEASE_LOST)

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            pause = self._round
            while not self._stopping.wait(pause):
                pause = self._extend(self._leases_to_extend())
        except BaseException as error:  # noqa: BLE001 - `watch` raises it on the loop
            self._error = error

    def _leases_to_extend(self) -> list[Delivery]:
        # The copy is one step under the interpreter's lock, while the loop's thread continues to change the set.
        with self._lock:
            before = self._clock.monotonic() - self._round
            due = [
                delivery for delivery in list(self._held) if delivery.extended_at <= before and not delivery.settling
            ]
            self._extending = frozenset(due)
            return due

    def _extend(self, due: list[Delivery]) -> float:
        if not due:
            return self._round
        began = self._clock.monotonic()
        lost: set[int] = set()
        extended: list[Delivery] = []
        pause = self._round
        try:
            lost = {id(lease) for lease in self._backend.extend([delivery.lease for delivery in due], self._visibility)}
        except BACKEND_ERRORS as error:
            pause = min(self._outage.record_failure(error), self._round / 2)
        else:
            self._outage.record_success()
            extended = [delivery for delivery in due if id(delivery.lease) not in lost]
            for delivery in extended:
                delivery.extended_at = began
                delivery.expires = began + self._visibility
        finally:
            with self._lock:
                self._extending = frozenset()
        self._post_result([delivery for delivery in due if id(delivery.lease) in lost], extended)
        return pause

    def _post_result(self, lost: list[Delivery], extended: list[Delivery]) -> None:
        loop = self._loop
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._on_result, lost, extended)
        except RuntimeError:
            # The loop has closed while the thread hung in the store, so no loop needs the result.
            if not self._stopping.is_set():
                raise

    def _on_result(self, lost: list[Delivery], extended: list[Delivery]) -> None:
        missing = [delivery for delivery in lost if delivery in self._held]
        if missing:
            self._events.leases_missing(missing)
        self._events.leases_extended(extended)
