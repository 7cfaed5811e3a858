"""Which of two definitions of one name counts: that of the newer `qworker run`.

The rank of a definition is the store's time at which its command started. Workers with the stored definition refresh
it, and it expires when none of them is left. Then any worker stores its own.
"""

from __future__ import annotations

from qworker.backend import Backend
from qworker.cell import Cell, CellOp
from qworker.schedules.records import Definition, LastTick, definition_op, read_definition, tick_cell

__all__ = ["KEPT", "REFRESHED", "forward", "register"]

# Seconds after the last refresh for which a definition is kept, and between two refreshes.
KEPT = 600.0
REFRESHED = 200.0


async def register(
    backend: Backend, own: Definition, stored: Cell | None, rank: int, *, since: float, refresh: bool
) -> Definition | None:
    """Register the definition of this worker's code, and return the one that counts.

    Args:
        backend: The store.
        own: The definition.
        stored: The cell of the definition that was read in the queue of the call. None: it was absent.
        rank: The store's time at which the command of this worker started, in ms.
        since: The store's time from which a schedule counts that has never ticked.
        refresh: Whether to refresh an equal definition.

    Returns:
        The definition that is stored now. None: this release cannot read it.
    """
    found = read_definition(stored)
    if stored is None:
        # The last tick comes first: a definition without one would have no beginning.
        first = CellOp("put", tick_cell(own.name, LastTick(int(since), times=own.times)), "")
        *_, reply = await backend.cells(own.queue, [first, definition_op(own, rank, ttl=KEPT, only="")])
        return own if reply.done else read_definition(reply.cell)
    if found == own:
        if refresh or rank > stored.rank:
            put = definition_op(own, max(rank, stored.rank), ttl=KEPT, only=stored.version)
            (reply,) = await backend.cells(own.queue, [put])
            if not reply.done:
                return read_definition(reply.cell)
        return own
    if stored.rank >= rank:
        return found
    (reply,) = await backend.cells(own.queue, [definition_op(own, rank, ttl=KEPT, only=stored.version)])
    return own if reply.done else read_definition(reply.cell)


async def forward(backend: Backend, own: Definition, home: str, stored: Cell, rank: int) -> None:
    """Show the definition to workers that look for an older one in another queue, where its call was before."""
    await backend.cells(home, [definition_op(own, rank, ttl=KEPT, only=stored.version)])
