"""Find which process holds the lock on which file, as the kernel shows it. Trying a lock would disturb other processes.

Locks of processes in other PID namespaces, and of other hosts, are not shown: their items are listed as ready.
"""

from __future__ import annotations

import os

__all__ = ["lock_holders"]

# On these file systems a file's device number differs from that in the list of locks.
_OTHER_DEVICE = frozenset({"overlay", "btrfs"})


def lock_holders(directory: int, kind: str) -> dict[int, int]:
    """Return the pids of the processes that hold a lock, by inode.

    Args:
        directory: A descriptor on the file system.
        kind: The name of the file system.
    """
    device = os.fstat(directory).st_dev
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}"
    found: dict[int, int] = {}
    try:
        with open("/proc/locks", encoding="ascii") as lines:
            for line in lines:
                fields = line.split()
                # For a process that waits for a lock, an arrow comes before the kind.
                if len(fields) < 6 or fields[1] not in {"FLOCK", "POSIX"}:
                    continue
                place, _, inode = fields[5].rpartition(":")
                if place == wanted or kind in _OTHER_DEVICE:
                    found[int(inode)] = int(fields[4])
    except FileNotFoundError:
        # Without /proc only the locks of this process are known.
        pass
    return found
