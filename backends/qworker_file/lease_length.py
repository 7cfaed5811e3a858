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

import msgspec

__all__ = ["ClockMark", "LeaseTimes", "read_clock_mark", "read_lease_times", "shared_length"]


class ClockMark(msgspec.Struct, frozen=True, gc=False):
    """The clock of a holder's host at one moment."""

    # Seconds that it was ahead of the file server's clock.
    ahead: float
    # Unix seconds, by the file server's clock.
    at: float


class LeaseTimes(msgspec.Struct, frozen=True, gc=False):
    """The times of a lease's file, in Unix seconds."""

    # When the lease got its name, by the file server's clock.
    made_at: float
    # When the message was claimed, by the holder's clock; later if an earlier token was later.
    claimed_at: float


def read_clock_mark(workers: int, holder: str) -> ClockMark | None:
    """Return the mark of a holder, or None if it has no file in workers/.

    Raises:
        OSError: The store failed.
    """
    try:
        status = os.stat(holder, dir_fd=workers, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return ClockMark(status.st_mtime - status.st_ctime, status.st_ctime)


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


def shared_length(expiry: float, times: LeaseTimes, mark: ClockMark | None) -> tuple[float, bool]:
    """Return the seconds that a lease lasts, and whether a later mark cannot change that.

    Args:
        expiry: Unix seconds, by the holder's clock.
        times: The times of the lease.
        mark: The last known mark of its holder.
    """
    lasts = expiry - times.made_at - (0.0 if mark is None else mark.ahead)
    if mark is not None and mark.at >= times.made_at and lasts >= 0:
        return lasts, True
    # The clock may have stepped between the mark and the lease. A lease that was not extended lasts from its claim. An
    # extended one is counted too long until its mark is seen.
    return max(lasts, expiry - times.claimed_at), False
