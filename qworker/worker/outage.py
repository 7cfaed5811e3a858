"""Outages of the store: each is logged once, calls are retried with growing pauses, and the end is logged once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qworker import log_events as events
from qworker.errors import BackendError
from qworker.logs import one_line

__all__ = ["BACKEND_ERRORS", "Outage"]

# The errors that a backend can raise without ending the worker.
BACKEND_ERRORS = (BackendError, OSError)

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0


class Outage:
    """The store's failed calls, as one loop sees them."""

    def __init__(self, loop_name: str, log: Any, draw: Callable[[], float]) -> None:
        self._log = log.bind(**{events.LOOP: loop_name})
        self._draw = draw
        self._failures = 0

    def record_failure(self, error: BaseException) -> float:
        """Record a failed call. Return the seconds to wait before the next one."""
        if not self._failures:
            self._log.warning(
                events.BACKEND_UNAVAILABLE,
                **{events.ERROR_TYPE: type(error).__name__, events.ERROR: one_line(str(error))},
            )
        ceiling = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(self._failures, 10))
        self._failures += 1
        # The delay is random and at least half of the maximum, so that loops do not retry at once or in step.
        return ceiling * (0.5 + self._draw() / 2)

    def record_success(self) -> None:
        """Record a call that succeeded."""
        if self._failures:
            self._log.warning(events.BACKEND_RECOVERED, failures=self._failures)
            self._failures = 0
