"""What the features in use keep in a queue, counted for people."""

from __future__ import annotations

from qworker.backend import Backend
from qworker.cell import Cell, CellOp
from qworker.jobs.records import CANCELS, PROGRESS, RESULTS

__all__ = ["MOST_COUNTED", "count_kept", "used_groups"]

# More cells of a group are not counted.
MOST_COUNTED = 1_000
# The words for the groups. Of a schedule, only its definition is counted.
_WORDS = {"schedules": "schedules", RESULTS: "results", PROGRESS: "progress", CANCELS: "cancels"}
_FIRST = {"schedules": "definition:"}


async def count_kept(backend: Backend, queue: str) -> dict[str, int]:
    """Count what a queue keeps of schedules, results, progress, and cancels that are not finished.

    Returns:
        The counts by word, at most `MOST_COUNTED` each. What is not used is not in it.
    """
    used = await used_groups(backend, queue)
    counts = {word: await _count(backend, queue, group) for group, word in _WORDS.items() if group in used}
    return {word: count for word, count in counts.items() if count}


async def used_groups(backend: Backend, queue: str) -> set[str]:
    """Return the groups of cells that a queue has. Without any, the look costs next to nothing."""
    if "cells" in backend.deviations:
        return set()
    found: set[str] = set()
    after = ""
    while True:
        (reply,) = await backend.cells(queue, [CellOp("list", Cell("", after))])
        found |= {cell.group for cell in reply.cells}
        if reply.empty or not reply.cells:
            return found
        after = reply.cells[-1].group


async def _count(backend: Backend, queue: str, group: str) -> int:
    first = _FIRST.get(group, "")
    count, after = 0, first
    while count < MOST_COUNTED:
        (reply,) = await backend.cells(queue, [CellOp("list", Cell(group, after))])
        count += sum(cell.name.startswith(first) for cell in reply.cells)
        if reply.empty or not reply.cells or not reply.cells[-1].name.startswith(first):
            break
        after = reply.cells[-1].name
    return min(count, MOST_COUNTED)
