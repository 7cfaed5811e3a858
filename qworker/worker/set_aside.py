"""Settlements that the store cannot take while it takes others: each is tried again, with growing pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from qworker import log_events as events
from qworker.failure_text import error_type
from qworker.logs import one_line
from qworker.worker.delivery import Delivery

__all__ = ["SetAside"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0


class SetAside:
    """Deliveries whose settlements wait for their next try.

    Args:
        log: The worker's log.
        draw: Returns uniform numbers from [0, 1), for jitter.
        submit: Takes a delivery whose pause is over.
    """

    def __init__(self, log: Any, draw: Callable[[], float], submit: Callable[[Delivery], None]) -> None:
        self._log = log
        self._draw = draw
        self._submit = submit
        # The last pause of each, until it is settled or given up.
        self._pauses: dict[Delivery, float] = {}
        self._timers: dict[Delivery, asyncio.TimerHandle] = {}

    @property
    def waiting(self) -> bool:
        """Whether a delivery waits."""
        return bool(self._timers)

    def knows(self, batch: Iterable[Delivery]) -> bool:
        """Whether each of these was set aside before."""
        return bool(self._pauses) and all(delivery in self._pauses for delivery in batch)

    def add(self, delivery: Delivery, error: BaseException) -> None:
        """Let a delivery wait."""
        pause = self._pauses.get(delivery, 0.0)
        if not pause:
            self._log.warning(
                events.SETTLEMENT_DELAYED,
                **delivery.fields(),
                **{events.ERROR_TYPE: error_type(error), events.ERROR: one_line(str(error))},
            )
        pause = min(_LONGEST_PAUSE, pause * 2 or _FIRST_PAUSE)
        self._pauses[delivery] = pause
        # The pauses of two deliveries soon differ: then the error of a batch is that of one.
        pause *= 0.5 + self._draw() / 2
        self._timers[delivery] = asyncio.get_running_loop().call_later(pause, self._end_pause, delivery)

    def _end_pause(self, delivery: Delivery) -> None:
        self._timers.pop(delivery).cancel()
        self._submit(delivery)

    def submit_all(self) -> None:
        """End all pauses now."""
        for delivery in list(self._timers):
            self._end_pause(delivery)

    def forget(self, batch: Iterable[Delivery]) -> None:
        """Forget deliveries that were settled or given up."""
        if self._pauses:
            for delivery in batch:
                self._pauses.pop(delivery, None)
