"""What a run is about to do to a folder of tables, written down first: after a crash the next run goes through with it.

    _qworker/intent.json      what is being done; absent: nothing is half done
    _qworker/positions.json   up to where each part of the history is in the tables
    _qworker/staging/         what the present run has made, and nobody reads
    _qworker/lock             held by the present run

New files are whole and durable in staging/ before the intent is written. From then on they will be in their tables: the moves come
first, then the positions, then the files that the new ones replace are removed, then the intent. Every step may be repeated.
Between a move and the removals that belong to it a reader may see replaced rows twice.
"""

from __future__ import annotations

import msgspec

from qworker.pipeline.folder import Folder

__all__ = ["STAGING", "Intent", "carry_out", "positions", "recover"]

STAGING = "_qworker/staging"
_INTENT = "_qworker/intent.json"
_POSITIONS = "_qworker/positions.json"


class Intent(msgspec.Struct, kw_only=True):
    """Changes that belong together."""

    # From staging to their places.
    moves: list[tuple[str, str]] = []
    # What the moved files replace.
    removes: list[str] = []
    # Parts of the history, and the positions up to which they are read; of other parts what is known stays.
    positions: dict[str, str] = {}


def positions(folder: Folder) -> dict[str, str]:
    """Up to where each part of the history is in the tables."""
    content = folder.read(_POSITIONS)
    return {} if content is None else msgspec.json.decode(content, type=dict[str, str])


def carry_out(folder: Folder, intent: Intent) -> None:
    """Do it, all or, after a crash, all at the next `recover`."""
    if not (intent.moves or intent.removes or intent.positions):
        return
    folder.sync(source for source, _ in intent.moves)
    folder.write(_INTENT, msgspec.json.encode(intent))
    _apply(folder, intent)


def recover(folder: Folder) -> bool:
    """Finish what a run has left half done, and clear what it has left in staging; whether there was something to finish."""
    content = folder.read(_INTENT)
    if content is not None:
        _apply(folder, msgspec.json.decode(content, type=Intent))
    folder.remove(STAGING)
    return content is not None


def _apply(folder: Folder, intent: Intent) -> None:
    for source, target in intent.moves:
        folder.move(source, target)
    folder.sync(target for _, target in intent.moves)
    if intent.positions:
        folder.write(_POSITIONS, msgspec.json.encode({**positions(folder), **intent.positions}))
    for name in intent.removes:
        folder.remove(name)
    folder.remove(_INTENT)
