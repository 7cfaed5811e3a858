"""Moving the cells of a queue from one backend to another.

Each cell is stored at the target before it leaves the source. If the move is killed in between, another run removes it
from the source.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from qworker.backend import Backend
from qworker.cell import Cell, CellOp

__all__ = ["count_cells", "move_cells"]


async def move_cells(source: Backend, target: Backend, queue: str) -> int:
    """Move the cells of a queue, with their ranks and the rest of their lifetimes, and return their number.

    A cell of the target stays if its rank is not lower.
    """
    count = 0
    async for cell in _list_cells(source, queue):
        count += await _move_cell(source, target, queue, cell)
    return count


async def count_cells(source: Backend, queue: str) -> int:
    """Count the cells of a queue."""
    count = 0
    async for _ in _list_cells(source, queue):
        count += 1
    return count


async def _list_cells(source: Backend, queue: str) -> AsyncIterator[Cell]:
    async for group in _list(source, queue, ""):
        async for cell in _list(source, queue, group.group):
            yield cell


async def _list(source: Backend, queue: str, group: str) -> AsyncIterator[Cell]:
    """Yield the cells of a group, or without a group the groups."""
    after, is_last = "", False
    while not is_last:
        (page,) = await source.cells(queue, [CellOp("list", Cell(group, after))])
        for cell in page.cells:
            yield cell
            after = cell.name if group else cell.group
        is_last = page.empty


async def _move_cell(source: Backend, target: Backend, queue: str, cell: Cell) -> bool:
    """Move one cell, in its newest version; False if it has gone meanwhile."""
    current: Cell | None = cell
    while current is not None:
        (stored,) = await target.cells(queue, [CellOp("put", current, "")])
        if stored.cell is not None and stored.cell.rank < current.rank:
            await target.cells(queue, [CellOp("put", current)])
        (removed,) = await source.cells(queue, [CellOp("delete", current, current.version)])
        if removed.done:
            return True
        current = removed.cell
    return False
