"""The leases of this instance that are gone: expired for another process, removed, or cancelled.

An instance knows its own leases, and each reap lists lease/ anyway. So a loss is found without a cost per message.
"""

from __future__ import annotations

from collections.abc import Collection

from qworker.kit.files import find_inode, has_entry
from qworker.message import LostLease
from qworker_file.layout import QueueDir
from qworker_file.lease import FileLease
from qworker_file.names import cancelled_name

__all__ = ["LossDetector", "drop_lost"]


def drop_lost(lease: FileLease, own: dict[str, FileLease], losses: list[LostLease], *, cancelled: bool = False) -> None:
    """Give up a lease that is gone, and report it once."""
    lease.lost = True
    lease.close()
    if own.get(lease.item) is lease:
        del own[lease.item]
    losses.append(LostLease(lease.message.id, lease.token, cancelled))


class LossDetector:
    """Finds the leases of one queue and this instance that are gone.

    Args:
        files: The queue.
        own: This instance's leases, by item.
        losses: Receives the lost leases.
        local_disk: True if no other machine uses the directory. If not, one look can show an old view.
    """

    def __init__(
        self, files: QueueDir, own: dict[str, FileLease], losses: list[LostLease], *, local_disk: bool
    ) -> None:
        self._files = files
        self._own = own
        self._losses = losses
        self._local_disk = local_disk
        # The names that the last look did not find, by item.
        self._missing: dict[str, str] = {}

    def look(self, names: Collection[str]) -> None:
        """Find the lost leases.

        Args:
            names: The names in lease/, listed just now.
        """
        missing: dict[str, str] = {}
        for item, lease in tuple(self._own.items()):
            if lease.is_ending or (lease.path in names and not lease.lost) or not self._is_gone(lease):
                continue
            if self._is_cancelled(lease):
                drop_lost(lease, self._own, self._losses, cancelled=True)
            elif self._local_disk or lease.lost or self._missing.get(item) == lease.path:
                drop_lost(lease, self._own, self._losses)
            else:
                missing[item] = lease.path
        self._missing = missing

    def _is_gone(self, lease: FileLease) -> bool:
        # An extension in another thread renames the file, from `path` to `moves_to`, and then sets `path`. So if both
        # names are looked for in this order, and neither has changed meanwhile, no extension has hidden the file.
        while not lease.lost:
            path, moves_to = lease.path, lease.moves_to
            if has_entry(path, self._files.lease) or (moves_to and has_entry(moves_to, self._files.lease)):
                return False
            if (path, moves_to) == (lease.path, lease.moves_to):
                return True
        return True

    def _is_cancelled(self, lease: FileLease) -> bool:
        return find_inode(cancelled_name(lease.item), self._files.fail) == lease.inode
