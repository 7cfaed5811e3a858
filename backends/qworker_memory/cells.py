"""The cells of one queue in memory. The caller of each method holds the store's lock."""

from __future__ import annotations

import itertools
from typing import assert_never

import msgspec

from qworker.cell import CELLS_PER_PAGE, Cell, CellOp, CellReply

__all__ = ["MemoryCells"]

# No two puts have the same version, also not after a queue was deleted.
_versions = itertools.count(1)


class _Entry(msgspec.Struct, frozen=True, gc=False):
    """A stored cell, and the Unix seconds at which it expires."""

    cell: Cell
    expires_at: float


class MemoryCells:
    """The cells of one queue, by group and name."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, _Entry]] = {}

    def carry_out(self, op: CellOp, now: float) -> CellReply:
        """Carry out one operation."""
        match op.do:
            case "get":
                cell = self._get(op.cell.group, op.cell.name, now)
                return CellReply(cell is not None, cell)
            case "put":
                return self._put(op, now)
            case "delete":
                return self._delete(op, now)
            case "list":
                return self._list(op.cell, now) if op.cell.group else self._list_groups(op.cell.name, now)
            case "close":
                is_empty = not self._names(op.cell.group, now)
                return CellReply(is_empty, empty=is_empty)
        assert_never(op.do)

    def version(self, group: str, name: str, now: float) -> str:
        """Return the version of a cell; empty if it is absent."""
        cell = self._get(group, name, now)
        return "" if cell is None else cell.version

    def expires_at(self, group: str, name: str) -> float:
        """Return the Unix seconds at which a cell expires."""
        entry = self._groups.get(group, {}).get(name)
        return float("inf") if entry is None else entry.expires_at

    def sweep(self, now: float) -> None:
        """Remove the expired cells, and the groups without cells."""
        for group in tuple(self._groups):
            self._names(group, now)

    def _get(self, group: str, name: str, now: float) -> Cell | None:
        entry = self._groups.get(group, {}).get(name)
        if entry is None or entry.expires_at <= now:
            return None
        ttl = None if entry.cell.ttl is None else entry.expires_at - now
        return msgspec.structs.replace(entry.cell, ttl=ttl)

    def _put(self, op: CellOp, now: float) -> CellReply:
        cell = op.cell
        stored = self._get(cell.group, cell.name, now)
        if _is_refused(op, stored) or (stored is not None and cell.rank < stored.rank):
            return CellReply(False, stored)
        put = msgspec.structs.replace(cell, version=str(next(_versions)))
        expires_at = float("inf") if cell.ttl is None else now + cell.ttl
        self._groups.setdefault(cell.group, {})[cell.name] = _Entry(put, expires_at)
        return CellReply(True, put)

    def _delete(self, op: CellOp, now: float) -> CellReply:
        stored = self._get(op.cell.group, op.cell.name, now)
        if stored is None or _is_refused(op, stored):
            return CellReply(False, stored)
        del self._groups[op.cell.group][op.cell.name]
        return CellReply(True)

    def _list(self, after: Cell, now: float) -> CellReply:
        names = [name for name in self._names(after.group, now) if name > after.name]
        found = [self._get(after.group, name, now) for name in names[:CELLS_PER_PAGE]]
        return CellReply(True, cells=[cell for cell in found if cell is not None], empty=len(names) <= CELLS_PER_PAGE)

    def _list_groups(self, after: str, now: float) -> CellReply:
        self.sweep(now)
        groups = sorted(group for group in self._groups if group > after)
        page = [Cell(group, "") for group in groups[:CELLS_PER_PAGE]]
        return CellReply(True, cells=page, empty=len(groups) <= CELLS_PER_PAGE)

    def _names(self, group: str, now: float) -> list[str]:
        """Return the names of a group, sorted, after its expired cells were removed."""
        entries = self._groups.get(group, {})
        for name in [name for name, entry in entries.items() if entry.expires_at <= now]:
            del entries[name]
        if not entries:
            self._groups.pop(group, None)
        return sorted(entries)


def _is_refused(op: CellOp, stored: Cell | None) -> bool:
    """Return whether the condition of an operation does not hold."""
    return op.only is not None and op.only != ("" if stored is None else stored.version)
