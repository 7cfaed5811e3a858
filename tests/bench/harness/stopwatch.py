"""The one way to measure how long something takes."""

from __future__ import annotations

import time

__all__ = ["Stopwatch"]


class Stopwatch:
    """Runs from its creation; each reading is up to now."""

    __slots__ = ("_cpu", "_wall")

    def __init__(self) -> None:
        self._cpu = time.process_time()
        self._wall = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds on the wall."""
        return time.perf_counter() - self._wall

    @property
    def cpu_seconds(self) -> float:
        """Seconds of CPU that this process has taken."""
        return time.process_time() - self._cpu
