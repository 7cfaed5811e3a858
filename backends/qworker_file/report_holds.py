"""The holds of the reports of failures: `requeue` frees them, so that the next failure is reported again.

A report is a message of any queue of the store, with an id that is made from the id of the message that has failed.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence

from qworker.kit.files import try_unlink
from qworker.kit.opening import open_directory
from qworker.kit.store_errors import DENIED, NOT_A_FILE
from qworker.names import failure_id
from qworker_file.names import hold_name
from qworker_file.store import Store

__all__ = ["ReportHolds"]

# Up to this number of messages, each hold is looked for by its name. For more, names/ is listed once.
_LOOKED_FOR = 100
# A queue that another user owns, or that was deleted in the meantime, has no hold that this process can free.
_NOT_HERE = DENIED | NOT_A_FILE | {errno.ENOENT, errno.ENOTDIR}


class ReportHolds:
    """The holds of reports in the queues of a store, for one call of `requeue`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queues = store.names()
        self._left = _LOOKED_FOR
        # The holds of each queue. None: not listed.
        self._listed: dict[str, set[str]] | None = None

    async def free(self, ids: Sequence[str]) -> None:
        """Free the holds of the reports of these messages.

        Raises:
            OSError: One cannot be removed.
        """
        if not ids:
            return
        wanted = {hold_name(failure_id(message_id)) for message_id in ids}
        self._left -= len(wanted)
        if self._left < 0 and self._listed is None:
            found = {queue: self._list(queue) for queue in self._queues}
            self._listed = {queue: holds for queue, holds in found.items() if holds}
        for queue in self._queues if self._listed is None else list(self._listed):
            await self._remove(queue, wanted if self._listed is None else wanted & self._listed[queue])

    def _list(self, queue: str) -> set[str]:
        directory = self._open(queue)
        if directory is None:
            return set()
        try:
            return {name for name in os.listdir(directory) if name.startswith("hold-")}
        finally:
            os.close(directory)

    async def _remove(self, queue: str, names: set[str]) -> None:
        directory = self._open(queue) if names else None
        if directory is None:
            return
        try:
            if [name for name in names if _try_remove(name, directory)]:
                await self._store.commit({directory})
        finally:
            os.close(directory)
        await asyncio.sleep(0)

    def _open(self, queue: str) -> int | None:
        try:
            base = open_directory(queue, self._store.root)
            try:
                return open_directory("names", base)
            finally:
                os.close(base)
        except OSError as error:
            if error.errno in _NOT_HERE:
                return None
            raise


def _try_remove(name: str, directory: int) -> bool:
    try:
        return try_unlink(name, directory)
    except OSError as error:
        if error.errno in DENIED:
            return False
        raise
