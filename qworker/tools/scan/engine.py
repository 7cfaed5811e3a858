"""Running a program for each piece of work, one after another."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Protocol

import msgspec

__all__ = ["Ended", "Exits", "ScanDown", "ScanError", "ScanOptions", "Source", "Work", "scan"]


class ScanError(Exception):
    """The scan cannot begin, or go on; its text says why."""


class ScanDown(ScanError):
    """The queue is down."""


class Ended(Enum):
    """What a program said of its work."""

    SUCCESS = auto()
    FAIL_TMP = auto()
    FAIL_PERM = auto()


class Exits(msgspec.Struct, frozen=True):
    """The exit statuses that mean something; every other one is a permanent failure."""

    success: int = 0
    fail_tmp: int = 111
    fail_perm: int = 100

    def meaning(self, status: int) -> Ended:
        """What a status means."""
        if status == self.success:
            return Ended.SUCCESS
        return Ended.FAIL_TMP if status == self.fail_tmp else Ended.FAIL_PERM


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


class Work(Protocol):
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
        """A descriptor at the beginning of its contents; stays the work's."""
        ...

    def end(self, how: Ended, reason: str) -> str | None:
        """Let it be what the program said; the words for what became of it instead, None when it is as said."""
        ...

    def leave(self) -> None:
        """Let go of it as it is."""
        ...


class Source(Protocol):
    """Where work comes from, in its order."""

    @property
    def exits(self) -> Exits:
        """The exit statuses, here."""
        ...

    def work(self, say: Callable[[str], None]) -> Iterator[Work]:
        """One piece after another; each is ended or left before the next is asked for.

        Args:
            say: is told of what cannot be worked on.

        Raises:
            ScanError: it cannot go on.
        """
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


def scan(source: Source, program: Sequence[str], options: ScanOptions, say: Callable[[str], None]) -> int:
    """Run `program` for all of a source's work.

    Args:
        source: of the work.
        program: and its first arguments.
        options: see there.
        say: prints a line.

    Returns:
        The exit status: 0, or `fail_tmp` when the queue is down or absent or a program was killed.
    """
    exits = source.exits
    try:
        for work in _paced(source.work(say), options.rate):
            if not _run(work, program, options, exits, say):
                return exits.fail_tmp
    except ScanError as error:
        say(str(error))
        return exits.fail_tmp
    return 0


def _paced(works: Iterator[Work], rate: int) -> Iterator[Work]:
    due = time.monotonic()
    for work in works:
        if rate > 0:
            pause = due - time.monotonic()
            if pause > 0:
                time.sleep(pause)
            due = max(due, time.monotonic()) + 1 / rate
        yield work


def _run(work: Work, program: Sequence[str], options: ScanOptions, exits: Exits, say: Callable[[str], None]) -> bool:
    """Run it for one piece of work; False when the scan must not go on."""
    command = [*program, *work.arguments]
    if options.verbose:
        say(f"working on {work.name} ...")
    try:
        status = _status(work, command, options)
    except BaseException:
        # The program may still run: it keeps the lock with its standard input, where there is one.
        work.leave()
        raise
    if isinstance(status, str):
        say(f"{work.name}: {status}")
        how, reason = Ended.FAIL_TMP, status
    elif status < 0:
        how, reason = Ended.FAIL_PERM, f"processing terminated by signal {-status}"
    else:
        how, reason = exits.meaning(status), f"exit status {status}"
    if options.done:
        _end(work, how, reason, options, say)
    else:
        work.leave()
    if not isinstance(status, str) and status < 0:
        say(f"{work.name}: {reason}; aborting")
        return False
    return True


def _status(work: Work, command: Sequence[str], options: ScanOptions) -> int | str:
    """The exit status, negative for a signal; or why the program cannot be run."""
    if not command:
        return "cannot exec: no program, and the item has no arguments"
    environment = {**os.environ, **work.environment()} if options.env else None
    stdin = work.contents() if options.open else subprocess.DEVNULL
    try:
        return subprocess.run(command, stdin=stdin, env=environment, check=False).returncode
    except OSError as error:
        return f"cannot exec {command[0]}: {error.strerror}"
    except ValueError as error:
        return f"cannot exec {command[0]}: {error}"


_WORDS = {
    Ended.SUCCESS: "succeeded",
    Ended.FAIL_TMP: "failed temporarily",
    Ended.FAIL_PERM: "failed permanently",
}


def _end(work: Work, how: Ended, reason: str, options: ScanOptions, say: Callable[[str], None]) -> None:
    name = work.name
    instead = work.end(how, reason)
    if instead is not None:
        say(instead)
    elif how is not Ended.SUCCESS or options.verbose:
        say(f"{name}: {_WORDS[how]}")
