"""The interface of scan sources, from which `qworker scan` gets its items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from typing import Protocol

import msgspec

__all__ = ["ExitCodes", "ProgramOutcome", "QueuePaused", "ScanError", "ScanItem", "ScanOptions", "ScanSource"]


class ScanError(Exception):
    """The scan cannot start or continue. The text says why."""


class QueuePaused(ScanError):
    """The queue is paused."""


class ProgramOutcome(Enum):
    """The result of a program, from its exit status."""

    SUCCESS = auto()
    FAIL_TMP = auto()
    FAIL_PERM = auto()


class ExitCodes(msgspec.Struct, frozen=True):
    """The exit statuses with a meaning. Every other status is a permanent failure."""

    success: int = 0
    fail_tmp: int = 111
    fail_perm: int = 100

    def meaning(self, status: int) -> ProgramOutcome:
        """Return the meaning of an exit status."""
        if status == self.success:
            return ProgramOutcome.SUCCESS
        return ProgramOutcome.FAIL_TMP if status == self.fail_tmp else ProgramOutcome.FAIL_PERM


class ScanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line. None: the scan source has its own default.

    Attributes:
        verbose: Whether to print each item and each success.
        env: Whether to describe the item to the program in environment variables.
        open: Whether to give the program the contents on standard input.
        ignore_down: Whether to scan a paused queue too.
        empty_ok: Whether to run the arguments of the item if there is no program.
        done: Whether the exit status decides. False: every item stays unchanged.
        lock: Whether to lock each item while the program runs.
        ttl: Maximum age of an item in seconds.
        max_tries: Maximum number of tries of an item.
        rate: Maximum number of programs started per second. 0: no limit.
        success: Exit status for success.
        fail_tmp: Exit status for a temporary failure.
        fail_perm: Exit status for a permanent failure.
        all_hosts: Whether to scan the sub-queues of all hosts.
        hosts: The hosts whose sub-queues to scan.
    """

    verbose: bool = False
    env: bool = True
    open: bool = True
    ignore_down: bool = False
    empty_ok: bool = False
    done: bool = True
    lock: bool | None = None
    ttl: float | None = None
    max_tries: int | None = None
    rate: int = 0
    success: int | None = None
    fail_tmp: int | None = None
    fail_perm: int | None = None
    all_hosts: bool = False
    hosts: tuple[str, ...] = ()


class ScanItem(Protocol):
    """One item. The scan holds it until it calls `end` or `leave`."""

    @property
    def name(self) -> str:
        """The name of the item for messages."""
        ...

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments that the item was enqueued with."""
        ...

    def environment(self) -> Mapping[str, str]:
        """Return environment variables that describe the item."""
        ...

    def contents(self) -> int:
        """Return a descriptor at the beginning of the contents. The item closes it."""
        ...

    def end(self, how: ProgramOutcome, reason: str) -> str | None:
        """Settle the item as the program decided. Return a text if something else happened to it, or None."""
        ...

    def leave(self) -> None:
        """Release the item unchanged."""
        ...


class ScanSource(Protocol):
    """A source of items, in the order of the queue."""

    @property
    def exits(self) -> ExitCodes:
        """The exit statuses that this source uses."""
        ...

    def work(self, say: Callable[[str], None]) -> Iterator[ScanItem]:
        """Yield one item after another. The caller ends or leaves each item before it asks for the next one.

        Args:
            say: A function that is called with a text for each item that cannot run.

        Raises:
            ScanError: The scan cannot continue.
        """
        ...

    def close(self) -> None:
        """Close the source."""
        ...
