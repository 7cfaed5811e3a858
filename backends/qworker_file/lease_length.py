"""How long a lease on a shared file system lasts, without trust in any host's clock.

The expiry in a lease's name is by the clock of its holder's host. The holder's file in workers/ shows how far that
clock is from the file server's clock: the holder sets the file's mtime by its own clock, and the server sets the ctime
of the same change. A holder marks its clock so before its first lease, after a step of its clock, and after every
extension. So the expiry and the server's time of the lease's name can be compared.

An older release does not mark its clock. Then a lease is never taken to be shorter than from its claim to its expiry,
both by the clock of its holder.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import msgspec

__all__ = ["CLOCK_STEP", "ClockMark", "ClockMarks", "LeaseTimes", "read_lease_times", "shared_length"]

# Seconds by which a wall clock must have stepped to be marked again.
CLOCK_STEP = 0.25


class ClockMark(msgspec.Struct, frozen=True, gc=False):
    """The clock of a holder's host at one moment."""

    # Seconds that it was ahead of the file server's clock.
    ahead: float
    # Unix seconds, by the file server's clock: of this mark, and of the first known one since the clock's last step.
    at: float
    since: float


class LeaseTimes(msgspec.Struct, frozen=True, gc=False):
    """The times of a lease's file, in Unix seconds."""

    # When the lease got its name, by the file server's clock.
    made_at: float
    # When the message was claimed, by the holder's clock; later if an earlier token was later.
    claimed_at: float


class ClockMarks:
    """The marks of the holders in one directory, each with the one before it that differs.

    Args:
        workers: The open directory.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._known: dict[str, tuple[ClockMark, ...]] = {}
        self._read: set[str] = set()

    def begin_round(self, holders: Collection[str]) -> None:
        """Let marks be read again, and forget those of other holders."""
        self._read.clear()
        self._known = {holder: marks for holder, marks in self._known.items() if holder in holders}

    def of(self, holder: str) -> tuple[ClockMark, ...]:
        """Return the marks of a holder, the last one first. They are read at most once per round.

        Raises:
            OSError: The store failed.
        """
        if holder not in self._read:
            self._read.add(holder)
            try:
                status = os.stat(holder, dir_fd=self._workers, follow_symlinks=False)
            except FileNotFoundError:
                return self._known.get(holder, ())
            ahead, at = status.st_mtime - status.st_ctime, status.st_ctime
            known = self._known.get(holder, ())
            if known and abs(known[0].ahead - ahead) <= CLOCK_STEP:
                self._known[holder] = (ClockMark(ahead, at, known[0].since), *known[1:])
            else:
                self._known[holder] = (ClockMark(ahead, at, at), *known[:1])
        return self._known.get(holder, ())


def read_lease_times(leases: int, name: str) -> LeaseTimes | None:
    """Return the times of a lease, or None if it is gone.

    Raises:
        OSError: The store failed.
    """
    try:
        status = os.stat(name, dir_fd=leases, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return LeaseTimes(status.st_ctime, status.st_mtime)


def shared_length(expiry: float, times: LeaseTimes, marks: Sequence[ClockMark]) -> tuple[float, bool]:
    """Return the seconds that a lease lasts, and whether a later mark cannot change that.

    Args:
        expiry: Unix seconds, by the holder's clock.
        times: The times of the lease.
        marks: Those of its holder, as `ClockMarks.of` returns them.
    """
    remaining = expiry - times.made_at
    # The lease may be from before the clock's last step.
    counted = marks if marks and times.made_at <= marks[0].since else marks[:1]
    lasts = max([remaining - mark.ahead for mark in counted], default=remaining)
    if marks and marks[0].at >= times.made_at:
        return lasts, True
    # The lease may have been extended after the mark, or the holder may be an older release. A lease that was not
    # extended lasts from its claim. An extended one is counted too long until its mark is seen.
    return max(lasts, expiry - times.claimed_at), False
