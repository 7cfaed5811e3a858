"""One tick: look at the records, enqueue what is due, and store the last tick.

A worker can die between any two steps. Before the publish, another worker publishes. After it, the others publish the
same id, which is stored or held. The last tick never goes back, because it is the rank of its cell.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from qworker.backend import Backend
from qworker.backend.offers import glance_at
from qworker.cell import Cell, CellOp
from qworker.errors import QueueNotFound
from qworker.schedules.catch_up import ON_TIME, due_ticks
from qworker.schedules.records import (
    DEFINITION,
    PAUSE,
    TICK,
    Definition,
    LastTick,
    cell_name,
    last_tick_of,
    read_definition,
    tick_cell,
)
from qworker.schedules.timetable import late_of

__all__ = ["Look", "Ticked", "look_at", "tick"]


@dataclass(frozen=True, slots=True)
class Look:
    """The records of a schedule at one moment.

    Attributes:
        definition: The definition. None: it is absent, or this release cannot read it.
        absent: Whether it is absent.
        paused: Whether the schedule or its queue is paused.
        tick: The cell of the last tick.
    """

    definition: Definition | None
    absent: bool
    paused: bool
    tick: Cell | None


@dataclass(frozen=True, slots=True)
class Ticked:
    """The result of a tick.

    Attributes:
        enqueued: The ticks that are enqueued now, by this worker or another one.
        passed: All ticks that have passed since the last one.
        last: The last tick.
        first: Whether this worker was the first that stored the last tick.
    """

    enqueued: list[int]
    passed: list[int]
    last: float
    first: bool = False


async def look_at(backend: Backend, queue: str, name: str) -> Look:
    """Read the records of a schedule."""
    replies = await backend.cells(queue, [CellOp("get", cell_name(kind, name)) for kind in (DEFINITION, TICK, PAUSE)])
    paused = replies[2].done or await _is_queue_paused(backend, queue)
    return Look(read_definition(replies[0].cell), not replies[0].done, paused, replies[1].cell)


async def _is_queue_paused(backend: Backend, queue: str) -> bool:
    try:
        return (await glance_at(backend, queue)).is_paused
    except QueueNotFound:
        return False


async def tick(
    backend: Backend, definition: Definition, look: Look, *, since: float, awake: float, resumed: float, now: float
) -> Ticked:
    """Enqueue the ticks that are due, and store the last tick.

    Args:
        backend: The store.
        definition: The definition.
        look: Its records, just read.
        since: The store's time from which a schedule counts that has never ticked.
        awake: The store's time since when this worker ticks. Earlier ticks were missed.
        resumed: The store's time at which a pause of the schedule has ended. Earlier ticks were missed.
        now: The store's time.

    Raises:
        UsageError: The expression or the time zone of the definition is not known here.
    """
    timetable = definition.timetable
    last = last_tick_of(look.tick, now)
    seen = "" if look.tick is None else look.tick.version
    if last is None:
        # Damaged: the ids keep what has been enqueued since then from being enqueued again.
        begin = since if look.tick is None else now - late_of(timetable, now)
        last = LastTick(int(begin), times=definition.times)
        seen = await _restart(backend, definition, look.tick, last)
    elif last.times != definition.times:
        last = LastTick(max(int(now), last.at), last.run, times=definition.times)
        (reply,) = await backend.cells(definition.queue, [CellOp("put", tick_cell(definition.name, last))])
        seen = "" if reply.cell is None else reply.cell.version
    if last.at >= now - ON_TIME:
        # A worker that has just started while others tick: what they have not reached yet was not missed.
        awake = min(awake, last.at)
    due, passed = due_ticks(timetable, definition.catch_up, last.at, max(awake, resumed), now)
    if not passed:
        return Ticked([], [], last.at)
    run = await _enqueue(backend, definition, due, now)
    skipped = bool(due) and run is None
    first = await _put_last(backend, definition, LastTick(passed[-1], run, skipped, definition.times), seen)
    return Ticked([] if run is None else due, passed, passed[-1], first)


async def _restart(backend: Backend, definition: Definition, damaged: Cell | None, last: LastTick) -> str:
    """Store a last tick where there is none. Return the version of its cell."""
    ops = [] if damaged is None else [CellOp("delete", cell_name(TICK, definition.name), damaged.version)]
    replies = await backend.cells(definition.queue, [*ops, CellOp("put", tick_cell(definition.name, last), "")])
    stored = replies[-1].cell
    return "" if stored is None else stored.version


async def _enqueue(backend: Backend, definition: Definition, due: list[int], now: float) -> int | None:
    """Enqueue ticks. Return the last one that is enqueued, or None."""
    if not due:
        return None
    if definition.overlap == "allow":
        await backend.publish(definition.queue, [definition.draft(each, now) for each in due])
        return due[-1]
    run: int | None = None
    for each in due:
        # A unique key until done: the tick is skipped while an earlier one waits or runs.
        draft = msgspec.structs.replace(definition.draft(each, now), unique_key=f"cron:{definition.name}")
        if await backend.publish(definition.queue, [draft]) == [draft.id]:
            run = each
    return run


async def _put_last(backend: Backend, definition: Definition, last: LastTick, seen: str) -> bool:
    """Store the last tick, unless another worker has stored a later one. Return whether this worker was the first.

    Of two workers with the same tick, one may have enqueued it and the other not. The one that has counts.
    """
    only = seen
    skips = last.run is None
    if skips:
        (reply,) = await backend.cells(definition.queue, [CellOp("get", cell_name(TICK, definition.name))])
        if reply.cell is not None and reply.cell.rank >= last.at:
            return False
        stored = last_tick_of(reply.cell, last.at)
        last = msgspec.structs.replace(last, run=None if stored is None else stored.run)
        only = "" if reply.cell is None else reply.cell.version
    # A refusal means that another worker has stored this tick or a later one, or runs this step again.
    (reply,) = await backend.cells(definition.queue, [CellOp("put", tick_cell(definition.name, last), only)])
    if not reply.done and not skips:
        await backend.cells(definition.queue, [CellOp("put", tick_cell(definition.name, last))])
    return reply.done
