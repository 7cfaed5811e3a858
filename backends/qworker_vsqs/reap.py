"""Making messages ready whose lease has expired or which are due."""

from __future__ import annotations

import time

from qworker.kit.directory.blocked import is_about_one_file
from qworker.kit.files import list_names
from qworker_vsqs.names import leased_name
from qworker_vsqs.queue_dir import QueueDirectory
from qworker_vsqs.store import VsqsStore

__all__ = ["reap_expired"]


async def reap_expired(store: VsqsStore, queue: QueueDirectory) -> int:
    """Bring the window of a queue up to date, make its expired messages ready, and return their number."""
    store.read_events()
    async with queue.refreshing:
        if not queue.window.is_fresh:
            began = time.monotonic()
            queue.window.fill(await list_names(queue.fd), began)
            store.read_events()
        queue.retry_blocked()
        expired = queue.window.take_expired(store.options.unit.ticks(store.clock.time()))
        return await _requeue(queue, expired) if expired else 0


async def _requeue(queue: QueueDirectory, expired: list[tuple[int, int]]) -> int:
    count = 0
    async with queue.locked():
        for number, expiry in expired:
            if (name := leased_name(number, expiry)) in queue.blocked:
                continue
            try:
                requeued = queue.requeue_expired(number, expiry)
            except OSError as error:
                if not is_about_one_file(error, queue.side):
                    raise
                # The messages behind it must not wait for it. The next listing finds it again.
                queue.blocked.add(name, error)
                continue
            if requeued:
                queue.window.add(str(number))
                count += 1
    return count
