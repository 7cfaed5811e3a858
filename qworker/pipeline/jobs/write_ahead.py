"""The changes to a folder of tables, which are written before they are made. After a crash the next run completes them.

    _qworker/intent.json      the changes; absent if there are none
    _qworker/positions.json   the position up to which each log of the history is in the tables
    _qworker/staging/         the files of the present run, which no reader reads
    _qworker/lock             held by the present run

New files are complete and durable in staging/ before the intent is written. After that they are moved into their
tables, the positions are written, the replaced files are removed, and then the intent. Every step can be repeated.
Between a move and its removals, a reader can see replaced rows twice.
"""

from __future__ import annotations

import msgspec

from qworker.pipeline.spark.storage import Storage

__all__ = ["STAGING", "PendingChange", "apply", "positions", "recover"]

STAGING = "_qworker/staging"
_INTENT = "_qworker/intent.json"
_POSITIONS = "_qworker/positions.json"


class PendingChange(msgspec.Struct, kw_only=True):
    """Changes that belong together.

    Attributes:
        moves: Pairs of a path in staging and a path in a table.
        removes: The files that the moved ones replace.
        positions: The new positions of some logs of the history.
    """

    moves: list[tuple[str, str]] = []
    removes: list[str] = []
    positions: dict[str, str] = {}


def positions(folder: Storage) -> dict[str, str]:
    """Return the position up to which each log of the history is in the tables."""
    content = folder.read(_POSITIONS)
    return {} if content is None else msgspec.json.decode(content, type=dict[str, str])


def apply(folder: Storage, intent: PendingChange) -> None:
    """Make the changes. After a crash, the next `recover` completes them."""
    if not (intent.moves or intent.removes or intent.positions):
        return
    folder.sync(source for source, _ in intent.moves)
    folder.write(_INTENT, msgspec.json.encode(intent))
    _apply(folder, intent)


def recover(folder: Storage) -> bool:
    """Complete the changes of a run that died, and remove its staged files. Return whether there were changes."""
    content = folder.read(_INTENT)
    if content is not None:
        _apply(folder, msgspec.json.decode(content, type=PendingChange))
    folder.remove(STAGING)
    return content is not None


def _apply(folder: Storage, intent: PendingChange) -> None:
    for source, target in intent.moves:
        folder.move(source, target)
    folder.sync(target for _, target in intent.moves)
    if intent.positions:
        folder.write(_POSITIONS, msgspec.json.encode({**positions(folder), **intent.positions}))
    for name in intent.removes:
        folder.remove(name)
    folder.remove(_INTENT)
