"""Who has which file locked, as the kernel tells it: nobody is disturbed by the question, as a tried lock would.

Locks of processes in other PID namespaces, and of other hosts, are not shown: what they work on looks ready.
"""

from __future__ import annotations

import os

__all__ = ["lock_holders"]

# These give files another device number than the file system that keeps their locks.
_OTHER_DEVICE = frozenset({"overlay", "btrfs"})


def lock_holders(directory: int, kind: str) -> dict[int, int]:
    """The pids that hold a lock, by inode.

    Args:
        directory: of the file system that is asked about.
        kind: the file system's name.
    """
    device = os.fstat(directory).st_dev
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}"
    found: dict[int, int] = {}
    try:
        with open("/proc/locks", encoding="ascii") as lines:
            for line in lines:
                fields = line.split()
                # Somebody who waits for a lock has an arrow before the kind.
                if len(fields) < 6 or fields[1] not in {"FLOCK", "POSIX"}:
                    continue
                place, _, inode = fields[5].rpartition(":")
                if place == wanted or kind in _OTHER_DEVICE:
                    found[int(inode)] = int(fields[4])
    except FileNotFoundError:
        # No /proc here: only our own are known.
        pass
    return found
