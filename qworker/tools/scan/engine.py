"""Run a program for each item, one after another."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

from qworker.backend.scan_source import ExitCodes, ProgramOutcome, ScanError, ScanItem, ScanOptions, ScanSource

__all__ = ["scan"]


def scan(source: ScanSource, program: Sequence[str], options: ScanOptions, say: Callable[[str], None]) -> int:
    """Run `program` for all items of a source.

    Args:
        source: The source of the items.
        program: The program and its first arguments.
        options: The options of the scan.
        say: Prints a line.

    Returns:
        The exit status: 0, or `fail_tmp` if the queue is paused or missing, or a program was killed.
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


def _paced(works: Iterator[ScanItem], rate: int) -> Iterator[ScanItem]:
    due = time.monotonic()
    for work in works:
        if rate > 0:
            pause = due - time.monotonic()
            if pause > 0:
                time.sleep(pause)
            due = max(due, time.monotonic()) + 1 / rate
        yield work


def _run(
    work: ScanItem, program: Sequence[str], options: ScanOptions, exits: ExitCodes, say: Callable[[str], None]
) -> bool:
    """Run the program for one item. Return False if the scan must stop."""
    command = [*program, *work.arguments]
    if options.verbose:
        say(f"working on {work.name} ...")
    try:
        status = _status(work, command, options)
    except BaseException:
        # The program may still run. If it has the item as its standard input, it keeps the lock with it.
        work.leave()
        raise
    if isinstance(status, str):
        say(f"{work.name}: {status}")
        how, reason = ProgramOutcome.FAIL_TMP, status
    elif status < 0:
        how, reason = ProgramOutcome.FAIL_PERM, f"processing terminated by signal {-status}"
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


def _status(work: ScanItem, command: Sequence[str], options: ScanOptions) -> int | str:
    """Return the exit status, which is negative for a signal, or the reason why the program cannot be run."""
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
    ProgramOutcome.SUCCESS: "succeeded",
    ProgramOutcome.FAIL_TMP: "failed temporarily",
    ProgramOutcome.FAIL_PERM: "failed permanently",
}


def _end(work: ScanItem, how: ProgramOutcome, reason: str, options: ScanOptions, say: Callable[[str], None]) -> None:
    name = work.name
    instead = work.end(how, reason)
    if instead is not None:
        say(instead)
    elif how is not ProgramOutcome.SUCCESS or options.verbose:
        say(f"{name}: {_WORDS[how]}")
