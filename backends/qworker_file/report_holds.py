"""The holds of the reports of failures: `requeue` frees them, so that the next failure is reported again.

A report is a message of any queue of the store, with an id that is made from the id of the message that has failed.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence

from qworker.kit.files import has_at_most, has_entry
from qworker.kit.opening import open_directory
from qworker.kit.store_errors import DENIED, NOT_A_FILE
from qworker.names import failure_id
from qworker_file.holds import free_holds
from qworker_file.names import hold_name, index_name
from qworker_file.store import Store

__all__ = ["ReportHolds"]

# Names looked for between two turns of the loop; about 2 ms of work.
_SLICE = 1000
# A queue that another user owns, or that was deleted in the meantime, has no hold that this process can free.
_NOT_HERE = DENIED | NOT_A_FILE | {errno.ENOENT, errno.ENOTDIR}


class ReportHolds:
    """The holds of reports in the queues of a store, for one call of `requeue`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # The queues that have holds or given ids. None: not known yet.
        self._queues: list[str] | None = None
        self._looked_for = 0

    async def free(self, ids: Sequence[str]) -> None:
        """Free the holds of the reports of these messages, also those of reports that still wait.

        Each one is looked for by its name: names/ is never listed, because it can have a name for every message.

        Raises:
            OSError: One cannot be freed.
        """
        if not ids:
            return
        if self._queues is None:
            self._queues = [queue for queue in self._store.names() if self._has_names(queue)]
        reports = [failure_id(message_id) for message_id in ids]
        for queue in self._queues:
            known = [one for one in reports if self._may_have(queue, one)]
            if known:
                await self._free_in(queue, known)
            self._looked_for += len(reports)
            if self._looked_for >= _SLICE:
                self._looked_for = 0
                await asyncio.sleep(0)

    def _may_have(self, queue: str, report: str) -> bool:
        """Return whether a queue has a report or its hold."""
        return any(self._has_entry(f"{queue}/names/{name}") for name in (hold_name(report), index_name(report)))

    def _has_entry(self, path: str) -> bool:
        try:
            return has_entry(path, self._store.root)
        except OSError as error:
            if error.errno in _NOT_HERE:
                return False
            raise

    def _has_names(self, queue: str) -> bool:
        try:
            directory = open_directory(f"{queue}/names", self._store.root)
        except OSError as error:
            if error.errno in _NOT_HERE:
                return False
            raise
        try:
            return not has_at_most(directory, 0)
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
