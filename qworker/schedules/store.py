"""Reading and changing the records of schedules in a store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import datetime, tzinfo
from typing import Literal

import msgspec

from qworker.backend import Backend
from qworker.cell import Cell, CellOp
from qworker.errors import QueueNotFound, UsageError
from qworker.message import State, StoredMessage
from qworker.schedules.records import (
    DEFINITION,
    GROUP,
    PAUSE,
    TICK,
    Definition,
    LastTick,
    cell_name,
    definition_op,
    last_tick_of,
    read_definition,
    tick_cell,
)
from qworker.schedules.timetable import zone_of
from qworker.tick import tick_id

__all__ = [
    "Outcome",
    "ScheduleStatus",
    "StoredSchedule",
    "find_messages",
    "find_schedule",
    "newest",
    "put_definition",
    "read_schedules",
    "read_statuses",
    "remove_schedule",
    "set_paused",
    "status_of",
]

# A lost race means that another process has changed the cell meanwhile. So many in a row do not happen.
_ATTEMPTS = 20
Outcome = Literal["waiting", "running", "done", "failed", "skipped"]
_OUTCOMES: dict[State, Outcome] = {
    State.READY: "waiting",
    State.DELAYED: "waiting",
    State.LEASED: "running",
    State.FAILED: "failed",
    State.DONE: "done",
}


class StoredSchedule(msgspec.Struct, frozen=True):
    """A schedule as a store has it.

    Attributes:
        home: The queue that has the record. It is the queue of the call, or one that the call had before.
        definition: Its definition.
        cell: The cell of the definition.
        last: Its last tick. None: none is known.
        paused: Whether it is paused.
    """

    home: str
    definition: Definition
    cell: Cell
    last: LastTick | None
    paused: bool


class ScheduleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule, its last and its next tick.

    Attributes:
        name: Its name.
        queue: The queue of its calls.
        task: The task that is called.
        definition: Its times as text.
        cron: Its cron expression, or None.
        every: Its interval in seconds, or None.
        tz: The time zone of `cron`.
        catch_up: What happens with missed ticks.
        overlap: What happens while the call of an earlier tick waits or runs.
        in_code: Whether a decorator defines it.
        set: The set of the `sync` that has put it, or None.
        last: Its last tick, in its time zone. None: it has not ticked yet.
        next: Its next tick, in its time zone. None: it is paused, or this program cannot read its definition.
        outcome: What became of the call of the last tick: `waiting`, `running`, `done`, `failed`, or `skipped`, because
            an earlier one was not done. `done` also if its message was removed. None: it has not ticked yet.
        paused: Whether it is paused.
    """

    name: str
    queue: str
    task: str
    definition: str
    cron: str | None
    every: int | None
    tz: str
    catch_up: Literal["latest", "all", "none"]
    overlap: Literal["allow", "skip"]
    in_code: bool
    set: str | None
    last: datetime | None
    next: datetime | None
    outcome: Outcome | None
    paused: bool


async def _pages(backend: Backend, queue: str) -> AsyncIterator[list[Cell]]:
    after = ""
    while True:
        (reply,) = await backend.cells(queue, [CellOp("list", Cell(GROUP, after))])
        if reply.cells:
            yield reply.cells
            after = reply.cells[-1].name
        if reply.empty or not reply.cells:
            return


async def read_schedules(backend: Backend, queue: str, now: float) -> list[StoredSchedule]:
    """Return the schedules of a queue, by name. A definition that cannot be read is left out."""
    cells: dict[str, Cell] = {}
    async for page in _pages(backend, queue):
        cells.update({cell.name: cell for cell in page})
    return [
        StoredSchedule(
            queue, definition, cell, last_tick_of(cells.get(f"{TICK}:{rest}"), now), f"{PAUSE}:{rest}" in cells
        )
        for name, cell in cells.items()
        for kind, _, rest in (name.partition(":"),)
        if kind == DEFINITION and (definition := read_definition(cell)) is not None
    ]


async def find_schedule(backend: Backend, queues: Iterable[str], name: str, now: float) -> StoredSchedule | None:
    """Return a schedule by its name. If two queues have it, the one that was put last."""
    found: list[StoredSchedule] = []
    for queue in queues:
        kinds = [CellOp("get", cell_name(kind, name)) for kind in (DEFINITION, TICK, PAUSE)]
        replies = await backend.cells(queue, kinds)
        definition = read_definition(replies[0].cell)
        if definition is not None and replies[0].cell is not None:
            last = last_tick_of(replies[1].cell, now)
            found.append(StoredSchedule(queue, definition, replies[0].cell, last, replies[2].done))
    return next(iter(newest(found)), None)


def newest(stored: Iterable[StoredSchedule]) -> list[StoredSchedule]:
    """Return one schedule of each name: the one that was put last, from the queue of its call if it is there."""
    found: dict[str, StoredSchedule] = {}
    for one in stored:
        other = found.get(one.definition.name)
        if other is None or _age(one) >= _age(other):
            found[one.definition.name] = one
    return list(found.values())


def _age(stored: StoredSchedule) -> tuple[int, bool]:
    return stored.cell.rank, stored.home == stored.definition.queue


async def put_definition(backend: Backend, definition: Definition, now: float) -> None:
    """Store the definition of a schedule in place of an older one. It ticks from now on.

    Raises:
        UsageError: Its call is too large for a cell, or other processes change the schedule all the time.
    """
    rank = int(now * 1000)
    first = CellOp("put", tick_cell(definition.name, LastTick(int(now), times=definition.times)), "")
    for _ in range(_ATTEMPTS):
        # The last tick comes first: a definition without one would have no beginning.
        before, reply = await backend.cells(definition.queue, [first, definition_op(definition, rank)])
        if reply.done:
            if not before.done:
                await _begin_again(backend, definition, before.cell, now)
            return
        # The clock of whoever put the stored one is ahead of this one.
        rank = max(rank, 0 if reply.cell is None else reply.cell.rank + 1)
    raise UsageError("other processes change it all the time: try again")


async def _begin_again(backend: Backend, definition: Definition, tick: Cell | None, now: float) -> None:
    """Let a schedule whose times have changed tick from now on, also if no worker is there until later.

    If the process dies before it, or a worker has just changed the last tick, the schedule ticks from the moment at
    which a worker sees its new times.
    """
    last = last_tick_of(tick, now)
    if tick is None or last is None or last.times == definition.times:
        return
    changed = LastTick(max(int(now), last.at), last.run, times=definition.times)
    await backend.cells(definition.queue, [CellOp("put", tick_cell(definition.name, changed), tick.version)])


async def remove_schedule(backend: Backend, stored: StoredSchedule) -> bool:
    """Delete a schedule. Return False if it has changed meanwhile."""
    name, queue = stored.definition.name, stored.home
    (reply,) = await backend.cells(queue, [CellOp("delete", cell_name(DEFINITION, name), stored.cell.version)])
    if reply.cell is not None:
        return False
    # Also if there was no definition: perhaps the answer to a first delete was lost, or its process died after it.
    # Without a definition nothing reads these cells. The ids of its ticks stay held.
    await backend.cells(queue, [CellOp("delete", cell_name(kind, name)) for kind in (PAUSE, TICK)])
    return True


async def set_paused(backend: Backend, queue: str, name: str, *, paused: bool) -> None:
    """Pause or resume a schedule. Idempotent."""
    await backend.cells(queue, [CellOp("put" if paused else "delete", cell_name(PAUSE, name))])


async def read_statuses(backend: Backend, queues: Sequence[str], now: float) -> list[ScheduleStatus]:
    """Return the status of all schedules of some queues, by name."""
    found = [one for queue in queues for one in await read_schedules(backend, queue, now)]
    return await status_of(backend, sorted(newest(found), key=lambda one: one.definition.name), now)


async def status_of(backend: Backend, stored: Sequence[StoredSchedule], now: float) -> list[ScheduleStatus]:
    """Return the status of schedules, in their order."""
    outcomes = await _outcomes(backend, stored)
    return [_status(one, outcomes.get((one.definition.queue, one.definition.name)), now) for one in stored]


async def _outcomes(backend: Backend, stored: Sequence[StoredSchedule]) -> dict[tuple[str, str], Outcome]:
    """Return what became of the last ticks, by queue and name."""
    outcomes: dict[tuple[str, str], Outcome] = {}
    enqueued: dict[str, dict[str, str]] = {}
    for one in stored:
        name, queue = one.definition.name, one.definition.queue
        if one.last is not None and one.last.skipped:
            outcomes[queue, name] = "skipped"
        elif one.last is not None and one.last.run is not None:
            # Its message is gone when it is done, unless the store keeps it.
            outcomes[queue, name] = "done"
            enqueued.setdefault(queue, {})[tick_id(name, one.last.run)] = name
    for queue, names in enqueued.items():
        for message in await find_messages(backend, queue, list(names)):
            outcomes[queue, names[message.message.id]] = _OUTCOMES[message.state]
    return outcomes


async def find_messages(backend: Backend, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
    """Return messages by their ids. A queue that does not exist has none."""
    try:
        return await backend.find(queue, ids)
    except QueueNotFound:
        return []


def _status(stored: StoredSchedule, outcome: Outcome | None, now: float) -> ScheduleStatus:
    definition = stored.definition
    last = None if stored.last is None else stored.last.at if stored.last.skipped else stored.last.run
    try:
        zone: tzinfo = zone_of(definition.tz)
        upcoming = None if stored.paused else next(definition.timetable.after(now), None)
    except UsageError:
        zone, upcoming = zone_of("UTC"), None
    return ScheduleStatus(
        name=definition.name,
        queue=definition.queue,
        task=definition.task,
        definition=definition.text,
        cron=definition.cron,
        every=definition.every,
        tz=definition.tz,
        catch_up=definition.catch_up,
        overlap=definition.overlap,
        in_code=definition.in_code,
        set=definition.set_name,
        last=None if last is None else datetime.fromtimestamp(last, zone),
        next=None if upcoming is None else datetime.fromtimestamp(upcoming, zone),
        outcome=outcome,
        paused=stored.paused,
    )
