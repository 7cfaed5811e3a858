"""The CPU time of one coroutine among others on the same event loop."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Generator
from typing import Any, Generic, TypeVar, cast

__all__ = ["Timed"]

T = TypeVar("T")


class Timed(Generic[T]):
    """Awaits something, and measures the CPU time of this thread while it runs. Other tasks do not count.

    Args:
        awaited: What to await.

    Attributes:
        cpu_s: The seconds so far.
    """

    def __init__(self, awaited: Awaitable[T]) -> None:
        self._steps = awaited.__await__()
        self.cpu_s = 0.0

    def __await__(self) -> Generator[Any, Any, T]:
        """Run it step by step, as the event loop would."""
        sent: Any = None
        thrown: BaseException | None = None
        while True:
            began = time.thread_time()
            try:
                waits_for = self._steps.send(sent) if thrown is None else self._steps.throw(thrown)
            except StopIteration as end:
                return cast("T", end.value)
            finally:
                self.cpu_s += time.thread_time() - began
            try:
                sent, thrown = (yield waits_for), None
            except BaseException as error:  # noqa: BLE001 - what is raised is that of the awaited code
                sent, thrown = None, error
