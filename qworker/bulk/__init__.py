"""Bulk writes: many processes publish as one, exactly once (docs/pipeline/writing.md).

`open` gives the writer of a load: the store's own one where the backend has it (`OffersBulk`), otherwise one that
spools to files.
"""

from __future__ import annotations

from pathlib import Path

from qworker.backend import Backend
from qworker.bulk.contract import (
    BulkStore,
    BulkWriter,
    IncompleteLoad,
    LoadDone,
    Manifest,
    OffersBulk,
    StagedPartition,
    check_load,
    message_id,
)

__all__ = [
    "BulkStore",
    "BulkWriter",
    "IncompleteLoad",
    "LoadDone",
    "Manifest",
    "OffersBulk",
    "StagedPartition",
    "check_load",
    "incomplete_loads",
    "message_id",
    "open",
]


def open(backend: Backend, queue: str, name: str, folder: Path | None = None) -> BulkWriter:  # noqa: A001
    """Open the writer of one load: all of its messages are published, each once, or none. Nothing is changed yet.

    Args:
        backend: The store.
        queue: The queue of the messages. It is created when the load is sealed, if it does not exist.
        name: The load's name. Within a queue, the same name means the same messages.
        folder: Where to spool, on a file system that all processes of the load see. A store with its own writer does
            not need it. None: next to the store's directory.

    Raises:
        InvalidName: The queue's or the load's name is not valid.
        UsageError: A folder is needed, and none was given.
    """
    store = _own_store(backend)
    if store is not None:
        return store.writer(queue, name)
    from qworker.bulk.spool import SpooledBulkWriter

    return SpooledBulkWriter(backend, queue, name, folder)


async def incomplete_loads(backend: Backend, queue: str, folder: Path | None = None) -> list[IncompleteLoad]:
    """Return the loads that were sealed and are not completely published, the oldest first.

    Another process publishes such a load now, or the process died. In that case the rest is published when the load is
    run again.

    Args:
        backend: The store.
        queue: The queue of the messages.
        folder: The folder that `open` was given.

    Raises:
        BackendError: The store failed, or a seal is damaged.
    """
    store = _own_store(backend)
    if store is not None:
        return await store.incomplete_loads(queue)
    from qworker.bulk.spool import incomplete_spooled

    return await incomplete_spooled(backend, queue, folder)


def _own_store(backend: Backend) -> BulkStore | None:
    found: object = backend
    return found.bulk if isinstance(found, OffersBulk) else None
