"""Cells: small named records of a queue, in groups, and the operations on them.

A cell is stored completely or not at all. Each put gives it a new version, so that a writer can say which version it
has seen. A cell with a lifetime is absent as soon as it has expired.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from qworker.errors import UsageError

__all__ = [
    "CELLS_PER_PAGE",
    "MOST_RANK",
    "MOST_VALUE",
    "Cell",
    "CellAction",
    "CellOp",
    "CellReply",
    "CellWatch",
    "check_cell_name",
    "check_cell_ops",
]

CellAction: TypeAlias = Literal["get", "put", "delete", "list", "close"]

# Bytes of a value.
MOST_VALUE = 65_536
# The largest rank, and the smallest negative one: two fencing tokens in nanoseconds fit.
MOST_RANK = 2**63 - 1
# Seconds of the longest lifetime.
_MOST_TTL = 2**53 / 1e7
# The most cells in one reply to `list`. A page may be shorter, so that a reply has a bounded size.
CELLS_PER_PAGE = 100
# Bytes of the name of a group or a cell.
_MOST_NAME = 1_000


class Cell(msgspec.Struct, frozen=True, gc=False):
    """A small named record of a queue.

    Attributes:
        group: The name of its group: any text.
        name: Its name in the group: any text.
        value: At most 64 KiB.
        version: Differs between any two puts of a name, and is never empty. The store sets it.
        ttl: Seconds until it expires; in a reply, those that are left. None: it does not expire.
        rank: A put with a lower rank than that of the stored cell is refused, so that it never goes back.
    """

    group: str
    name: str
    value: bytes = b""
    version: str = ""
    ttl: float | None = None
    rank: int = 0


class CellOp(msgspec.Struct, frozen=True, gc=False):
    """One operation of `Backend.cells`.

    Attributes:
        do: `get` reads a cell. `put` stores one in place of an older one. `delete` removes one. `list` reads a page of
            a group: the cells whose names follow `cell.name`, in the order of their names. Without a group, it lists
            the names of the groups that follow `cell.name`, each as a cell without a name. A page that continues the
            one before may lack a cell that another process has put since the first page. `close` says whether a group
            has no cells.
        cell: The cell. `get` and `delete` need its group and its name only, and `close` its group. The version is not
            used: see `only`.
        only: The condition of a put or a delete. None: none. An empty text: only if the cell is absent. Another text:
            only if the stored cell has this version.
    """

    do: CellAction
    cell: Cell
    only: str | None = None


class CellReply(msgspec.Struct, frozen=True):
    """The reply to one operation.

    Attributes:
        done: `get`: the cell is there. `put`: it is stored. `delete`: it was there and is removed. `list`: always
            true. `close`: the group has no cells.
        cell: `get`: the cell. `put`: the cell as it is stored, with its version. A refused `put` or `delete`: the
            stored cell, or None if it is absent.
        cells: `list`: the cells of the page.
        empty: `close`: the group has no cells. `list`: nothing follows this page.
    """

    done: bool
    cell: Cell | None = None
    cells: list[Cell] = []
    empty: bool = False


class CellWatch(msgspec.Struct, frozen=True, gc=False):
    """A cell for which `Backend.wait` waits.

    Attributes:
        queue: The queue.
        group: The group.
        name: The cell's name.
        version: The version that the caller has seen; empty: the cell was absent. The wait ends when the stored version
            is another one.
    """

    queue: str
    group: str
    name: str
    version: str = ""


def check_cell_ops(ops: Sequence[CellOp]) -> None:
    """Check the operations of one call, before any of them is carried out.

    Raises:
        UsageError: A name is empty or too long, or a value, a rank or a lifetime is out of its range.
    """
    for op in ops:
        cell = op.cell
        if op.do == "list":
            _check_text("group", cell.group)
            _check_text("name", cell.name)
            continue
        check_cell_name("group", cell.group)
        if op.do == "close":
            continue
        check_cell_name("name", cell.name)
        if op.do == "put":
            _check_put(cell)


def check_cell_name(what: str, text: str) -> None:
    """Check the name of a group or a cell.

    Raises:
        UsageError: It is empty, has more than 1,000 bytes, or a lone surrogate.
    """
    if not text:
        raise UsageError(f"the {what} of a cell must not be empty")
    _check_text(what, text)


def _check_text(what: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise UsageError(f"the {what} of a cell must be valid text (got {text!r})") from None
    if size > _MOST_NAME:
        raise UsageError(f"the {what} of a cell must have at most {_MOST_NAME} bytes (got {size})")


def _check_put(cell: Cell) -> None:
    if len(cell.value) > MOST_VALUE:
        raise UsageError(f"the value of a cell must have at most {MOST_VALUE} bytes (got {len(cell.value)})")
    if abs(cell.rank) > MOST_RANK:
        raise UsageError(f"the rank of a cell must be at most 2**63 - 1 (got {cell.rank})")
    if cell.ttl is not None and not 0 < cell.ttl <= _MOST_TTL:
        raise UsageError(f"the ttl of a cell must be a number of seconds above 0 (got {cell.ttl})")
