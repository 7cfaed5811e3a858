"""What the last run listed: a run in which no list has changed does not read the messages again.

_qworker/listed.json      by queue and state, the version of the list whose messages are in the tables
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from qworker.backend.offers import heads_of
from qworker.errors import QueueNotFound
from qworker.message import State
from qworker.pipeline.source.reader import open_store
from qworker.pipeline.spark.storage import Storage

__all__ = ["is_archived", "list_versions", "note_archived"]

_LISTED = "_qworker/listed.json"
Versions = dict[str, str | None]


async def list_versions(url: str, queues: Sequence[str] | None, states: Sequence[str]) -> Versions:
    """Return the version of each list, by `QUEUE/STATE`. None: it is not known."""
    versions: Versions = {}
    async with open_store(url) as backend:
        quick = heads_of(backend)
        for queue in await backend.queues() if queues is None else queues:
            for state in states:
                try:
                    version = None if quick is None else await quick.heads_version(queue, State(state))
                except QueueNotFound:
                    # The read says so.
                    version = None
                versions[f"{queue}/{state}"] = version
    return versions


def is_archived(folder: Storage, versions: Versions) -> bool:
    """Return whether the tables have all messages of these lists."""
    known = _read(folder)
    return all(version is not None and known.get(name) == version for name, version in versions.items())


def note_archived(folder: Storage, versions: Versions) -> None:
    """Record the lists whose messages are durable in the tables. They were determined before they were read."""
    known = _read(folder)
    now = known | {name: version for name, version in versions.items() if version is not None}
    if now != known:
        folder.write(_LISTED, msgspec.json.encode(now))


def _read(folder: Storage) -> dict[str, str]:
    content = folder.read(_LISTED)
    return {} if content is None else msgspec.json.decode(content, type=dict[str, str])
