"""Where `qworker scan` gets its work from: the interface that each source of work has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from typing import Protocol

import msgspec

__all__ = ["ExitCodes", "ProgramOutcome", "QueuePaused", "ScanError", "ScanItem", "ScanOptions", "ScanSource"]


class ScanError(Exception):
    """The scan cannot begin, or go on; its text says why."""


class QueuePaused(ScanError):
    """The queue is down."""


class ProgramOutcome(Enum):
    """What a program said of its work."""

    SUCCESS = auto()
    FAIL_TMP = auto()
    FAIL_PERM = auto()


class ExitCodes(msgspec.Struct, frozen=True):
    """The exit statuses that mean something; every other one is a permanent failure."""

    success: int = 0
    fail_tmp: int = 111
    fail_perm: int = 100

    def meaning(self, status: int) -> ProgramOutcome:
        """Return what a status means."""
        if status == self.success:
            return ProgramOutcome.SUCCESS
        return ProgramOutcome.FAIL_TMP if status == self.fail_tmp else ProgramOutcome.FAIL_PERM


class ScanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says; None: what the source's own settings say."""

    verbose: bool = False
    # Tell the program of its item by environment variables.
    env: bool = True
    # Give it the contents on standard input.
    open: bool = True
    ignore_down: bool = False
    # Without a program, run the item's own arguments.
    empty_ok: bool = False
    # Let the exit status decide; False: leave every item as it is.
    done: bool = True
    lock: bool | None = None
    # Seconds.
    ttl: float | None = None
    max_tries: int | None = None
    # Programs a second; 0: no limit.
    rate: int = 0
    success: int | None = None
    fail_tmp: int | None = None
    fail_perm: int | None = None
    all_hosts: bool = False
    hosts: tuple[str, ...] = ()


class ScanItem(Protocol):
    """One item, which is ours until it is ended or left."""

    @property
    def name(self) -> str:
        """What people know it by."""
        ...

    @property
    def arguments(self) -> tuple[str, ...]:
        """What it was enqueued with."""
        ...

    def environment(self) -> Mapping[str, str]:
        """Variables that tell of it."""
        ...

    def contents(self) -> int:
        """Return a descriptor at the beginning of its contents; stays the work's."""
        ...

    def end(self, how: ProgramOutcome, reason: str) -> str | None:
        """Let it be what the program said; the words for what became of it instead, None when it is as said."""
        ...

    def leave(self) -> None:
        """Let go of it as it is."""
        ...


class ScanSource(Protocol):
    """Where work comes from, in its order."""

    @property
    def exits(self) -> ExitCodes:
        """The exit statuses, here."""
        ...

    def work(self, say: Callable[[str], None]) -> Iterator[ScanItem]:
        """Return one piece after another; each is ended or left before the next is asked for.

        Args:
            say: Is told of what cannot be worked on.

        Raises:
            ScanError: It cannot go on.
        """
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...
