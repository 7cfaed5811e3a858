"""Waiting in tests. Only this module can sleep, and tests/unit/test_hygiene.py checks this."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Self, TypeVar

__all__ = ["PATIENCE", "Stalls", "becomes_true", "block_for", "give_turns", "let_pass", "wait_for", "work_for"]

T = TypeVar("T")

# Seconds for anything to happen on a machine that is busy with other tests.
PATIENCE = 50.0
_STEP = 0.005
# Seconds without a beat that are no delay of a busy interpreter.
_STALL = 0.1


def wait_for(
    condition: Callable[[], T], what: str = "", show: Callable[[], str] = lambda: "", timeout: float = PATIENCE
) -> T:
    """Poll a condition until its result is true, and return it. For coroutines use `qworker.testing.wait_until`.

    Args:
        condition: Called every 5 ms. It may raise to end the wait.
        what: What the test waits for.
        show: Returns what explains a failure, such as the output of a process.
        timeout: Seconds after which the condition has failed.

    Raises:
        AssertionError: The condition was still false after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what or condition}: not within {timeout} s\n{show()[-3000:]}")
        time.sleep(_STEP)
    return result


def becomes_true(condition: Callable[[], object], within: float) -> bool:
    """Poll a condition for up to `within` seconds, and return whether it became true."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_STEP)
    return True


class Stalls:
    """How long this process did not run while a block ran: the machine's fault, and not that of what is measured."""

    def __init__(self) -> None:
        # The seconds so far, and when this process was last seen to run.
        self._seen = 0.0, time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._seen = 0.0, time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_STEP):
            self._seen = self.seconds, time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds until now, also of a stall that has only just ended."""
        seconds, beat = self._seen
        silent = time.monotonic() - beat
        return seconds + (silent if silent > _STALL else 0.0)


async def give_turns(count: int = 100) -> None:
    """Let all tasks run on the event loop that do not wait for time, to check that something does not happen."""
    for _ in range(count):
        await asyncio.sleep(0)


async def work_for(seconds: float) -> None:
    """Work as a handler that takes so long."""
    await asyncio.sleep(seconds)


def block_for(seconds: float) -> None:
    """Block this thread: as a handler that computes, or until the moment at which a test strikes."""
    time.sleep(seconds)


async def let_pass(seconds: float) -> None:
    """Let time pass which the test is about: an outage that lasts, a random moment, the pace of a publisher."""
    await asyncio.sleep(seconds)
