"""The state of a worker for tests of single loops, with a record of their events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from qworker import Tasks
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.worker import WorkerOptions
from qworker.worker.state import WorkerEvents, WorkerState

__all__ = ["EventRecorder", "make_state"]


class EventRecorder:
    """A receiver of events that records them: the name of each, and its arguments."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in vars(WorkerEvents):
            raise AttributeError(name)
        return lambda *args: self.events.append((name, *args))

    def count(self, name: str) -> int:
        """Return how often an event happened."""
        return sum(event[0] == name for event in self.events)


def make_state(backend: Any, *, clock: Clock = SYSTEM_CLOCK, **options: Any) -> WorkerState:
    """Return the state of a worker on a queue `q`, with the given options, whose events are recorded."""
    state = WorkerState(
        app=Tasks("memory://"),
        backend=backend,
        queues=("q",),
        options=WorkerOptions(**options),
        clock=clock,
        draw=lambda: 0.0,
        log=structlog.get_logger(),
    )
    recorder: Any = EventRecorder()
    state.events = recorder
    return state
