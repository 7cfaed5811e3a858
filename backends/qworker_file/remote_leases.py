"""Leases whose holders are not in this process: they are found again by their names in lease/."""

from __future__ import annotations

import os

from qworker.clock import Clock
from qworker.kit.body_slices import ON_LOOP
from qworker.kit.directory.opener import StoreOpener
from qworker.kit.files import list_names, read_all
from qworker.kit.opening import open_file
from qworker.kit.store_errors import store_errors
from qworker.message import Lease
from qworker.names import check_existing_queue
from qworker_file.holder import DETACHED
from qworker_file.layout import QueueDir
from qworker_file.lease import FileLease, make_lease, read_large_body
from qworker_file.names import parse_id, parse_item, parse_lease
from qworker_file.open_queue import OpenQueue
from qworker_file.store import Store

__all__ = ["RemoteFileLeases"]


class RemoteFileLeases:
    """The leases of remote holders, as `qworker.backend.RemoteLeases`.

    Args:
        stores: Opens the root.
        clock: Says when a lease that was found ends.
    """

    def __init__(self, stores: StoreOpener[Store, OpenQueue], clock: Clock) -> None:
        self._stores = stores
        self._clock = clock

    async def find(self, queue: str, message_id: str, token: int) -> Lease | None:
        """Find the lease that has this token."""
        store = self._stores.open()
        with store_errors(f"find a lease of {queue!r}"):
            opened = store.get(check_existing_queue(queue))
            if opened is None:
                return None
            with opened.files:
                found = await _find_lease(opened.files, opened.own, message_id, token, self._clock)
                if found is not None:
                    opened.files.found.add(found)
                    if found.is_unread:
                        await read_large_body(found)
            if found is not None and not store.is_local:
                # Its next extension is by the clock of this host, which this instance's own name shows.
                opened.create_liveness()
                found.extends_as = store.holder.name
            return found


async def _find_lease(
    files: QueueDir, own: dict[str, FileLease], message_id: str, token: int, clock: Clock
) -> FileLease | None:
    """Find the lease of a message by its token: of this instance, or one that ends by time alone."""
    for lease in own.values():
        if lease.message.id == message_id and lease.token == token:
            return lease
    for name in await list_names(files.lease):
        parsed = parse_lease(name)
        if parsed is None or not parsed[2].startswith(DETACHED) or parse_id(parsed[0]) != message_id:
            continue
        found = _reopen(files, name, parsed[0], token)
        if found is not None:
            found.expires_at = parsed[1] / 1000
            found.deadline = clock.monotonic() + max(0.0, found.expires_at - clock.time())
            return found
    return None


def _reopen(files: QueueDir, path: str, item: str, token: int) -> FileLease | None:
    parsed = parse_item(item)
    if parsed is None:
        return None
    try:
        fd, status = open_file(path, files.lease)
    except FileNotFoundError:
        return None
    try:
        if status.st_mtime_ns == token:
            is_large = status.st_size > ON_LOOP
            body = b"" if is_large else read_all(fd, status.st_size)
            lease = make_lease(files, fd, status, item, parsed, path, token, body)
            lease.is_unread = is_large
            fd = -1
            return lease
        return None
    finally:
        if fd >= 0:
            os.close(fd)
