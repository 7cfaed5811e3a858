"""Leases whose holders are not in this process: they are found again by their names in lease/."""

from __future__ import annotations

from collections.abc import Callable

from qworker.clock import Clock
from qworker.kit.store_errors import store_errors
from qworker.message import Lease
from qworker.names import check_queue
from qworker_file.lease import find_lease
from qworker_file.store import Store

__all__ = ["RemoteFileLeases"]


class RemoteFileLeases:
    """See `qworker.backend.RemoteLeases`.

    Args:
        opened: gives the open root.
        clock: says when a lease that was found ends.
    """

    def __init__(self, opened: Callable[[], Store], clock: Clock) -> None:
        self._opened = opened
        self._clock = clock

    async def find(self, queue: str, message_id: str, token: int) -> Lease | None:
        """Find the lease that has this token."""
        store = self._opened()
        with store_errors(f"find a lease of {queue!r}"):
            local = store.queue(check_queue(queue))
            return None if local is None else await find_lease(local.files, local.own, message_id, token, self._clock)
