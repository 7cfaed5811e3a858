"""The holds of the reports of failures: `requeue` frees them, so that the next failure is reported again.

A report is a message of any queue of the store, with an id that is made from the id of the message that has failed.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence

from qworker.kit.files import has_entry
from qworker.kit.opening import open_directory
from qworker.kit.store_errors import DENIED, NOT_A_FILE
from qworker.names import failure_id
from qworker_file.holds import free_holds
from qworker_file.names import hold_name, index_name
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
        """Free the holds of the reports of these messages, also those of reports that still wait.

        Raises:
            OSError: One cannot be freed.
        """
        if not ids:
            return
        reports = [failure_id(message_id) for message_id in ids]
        self._left -= len(reports)
        if self._left < 0 and self._listed is None:
            found = {queue: self._list(queue) for queue in self._queues}
            self._listed = {queue: names for queue, names in found.items() if names}
        for queue in self._queues if self._listed is None else list(self._listed):
            known = [one for one in reports if self._may_have(queue, one)]
            if known:
                await self._free_in(queue, known)

    def _may_have(self, queue: str, report: str) -> bool:
        """Return whether a queue has a report or its hold."""
        names = (hold_name(report), index_name(report))
        if self._listed is not None:
            return not self._listed[queue].isdisjoint(names)
        return any(self._has_entry(f"{queue}/names/{name}") for name in names)

    def _has_entry(self, path: str) -> bool:
        try:
            return has_entry(path, self._store.root)
        except OSError as error:
            if error.errno in _NOT_HERE:
                return False
            raise

    def _list(self, queue: str) -> set[str]:
        try:
            directory = open_directory(f"{queue}/names", self._store.root)
        except OSError as error:
            if error.errno in _NOT_HERE:
                return set()
            raise
        try:
            return {name for name in os.listdir(directory) if name.startswith(("hold-", "id-"))}
        finally:
            os.close(directory)

    async def _free_in(self, queue: str, reports: Sequence[str]) -> None:
        try:
            opened = self._store.get(queue)
            if opened is None:
                return
            with opened.files:
                if await free_holds(opened.files, reports):
                    await self._store.commit({opened.files.names})
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
        await asyncio.sleep(0)
