"""What people did with the dashboard: a log line for each action, and a cell where the store has cells.

The cell is in the queue of the action, in the group `actions`. Its name begins with the time, counted backwards: so the
first page of a group has its newest actions.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from typing import Literal

import msgspec
import structlog

from qworker.backend import Backend
from qworker.cell import Cell, CellOp
from qworker.errors import QworkerError
from qworker.ui.access import Role

__all__ = ["ACTIONS", "Action", "ActionRecord", "read_newest", "record"]

ACTIONS = "actions"
# Seconds for which an action is kept.
_KEPT_S = 30 * 86_400.0
# The microseconds from which the time counts backwards: in the year 2286.
_END = 10**16
# Queues that are read at once.
_AT_ONCE = 8
# Characters of a text that are kept, so that the cell is never too large.
_MOST_TEXT = 2_000

Action = Literal[
    "pause",
    "resume",
    "pause schedule",
    "resume schedule",
    "run schedule",
    "run now",
    "cancel",
    "requeue",
    "edit",
    "remove",
    "requeue many",
    "remove many",
    "purge",
]

_log = structlog.get_logger("qworker.ui")


class ActionRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One action of a user.

    Attributes:
        at: Unix seconds.
        user: The user.
        role: The user's role.
        action: What was asked for.
        queue: The queue.
        what: The message's id, the schedule's name or the state. Empty: the queue, or what the filter chooses.
        filter: The filter of an action on many messages, in words.
        count: Number of messages that were changed. None: the action does not count.
        result: `begun`, `done`, `stopped`, `nothing`, or why it failed.
        key: Identifies the action. An action that begins and then ends has one record.
    """

    at: float
    user: str
    role: Role
    action: Action
    queue: str
    what: str = ""
    filter: str = ""
    count: int | None = None
    result: str = "done"
    key: str = ""


async def record(backend: Backend, given: ActionRecord) -> None:
    """Log an action, and store it where the store has cells.

    The action has happened. So an error of the store is logged with it, and not raised.
    """
    problem: str | None = None
    try:
        await _store(backend, given)
    except (QworkerError, OSError) as error:
        problem = str(error)
    _log.info(
        "ui_action",
        user=given.user,
        role=given.role,
        action=given.action,
        queue=given.queue,
        what=given.what,
        filter=given.filter,
        count=given.count,
        result=given.result,
        not_recorded=problem,
    )


async def _store(backend: Backend, given: ActionRecord) -> None:
    if "cells" in backend.deviations:
        return
    kept = msgspec.structs.replace(
        given, what=given.what[:_MOST_TEXT], filter=given.filter[:_MOST_TEXT], result=given.result[:_MOST_TEXT]
    )
    name = f"{_END - round(given.at * 1e6):016d}-{given.key}"
    await backend.cells(given.queue, [CellOp("put", Cell(ACTIONS, name, msgspec.json.encode(kept), ttl=_KEPT_S))])


async def read_newest(backend: Backend, queues: Sequence[str], limit: int) -> list[ActionRecord]:
    """Return the newest actions in some queues, the newest first.

    Of each queue, only its first page of cells is read, with its newest actions. A store without cells has none.

    Raises:
        BackendError: The store cannot be asked.
    """
    if "cells" in backend.deviations:
        return []
    room = asyncio.Semaphore(_AT_ONCE)

    async def read(queue: str) -> list[ActionRecord]:
        async with room:
            (reply,) = await backend.cells(queue, [CellOp("list", Cell(ACTIONS, ""))])
        return [one for cell in reply.cells if (one := _read(cell)) is not None]

    found = await asyncio.gather(*map(read, queues))
    return heapq.nlargest(limit, (one for page in found for one in page), key=lambda one: one.at)


def _read(cell: Cell) -> ActionRecord | None:
    try:
        return msgspec.json.decode(cell.value, type=ActionRecord)
    except msgspec.MsgspecError:
        # Written by a newer release, or by another program.
        return None
