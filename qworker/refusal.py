"""The cell that keeps since when the arguments of a call are refused: written by workers, read by `explain`."""

from __future__ import annotations

from qworker.cell import Cell

__all__ = ["MISFITS", "refused_since"]

# The group of the cells. Each has the name of its message's id.
MISFITS = "misfits"


def refused_since(cell: Cell | None) -> float | None:
    """Return the Unix seconds of the first refusal, or None if there is no cell or it cannot be read."""
    try:
        return None if cell is None else float(cell.value)
    except ValueError:
        return None
