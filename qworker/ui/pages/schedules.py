"""The schedules of all queues."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from qworker.schedules.store import ScheduleStatus, read_statuses
from qworker.ui.looks import Look
from qworker.ui.pages.rows import problem_of, queue_names
from qworker.ui.pages.source import Source
from qworker.ui.watch import Seen

__all__ = ["find_schedules", "schedules"]


async def schedules(source: Source, _request: Request) -> dict[str, Any]:
    """Return the schedules of all queues."""
    seen = await source.watch.see()
    look = await find_schedules(source, seen)
    return {"seen": seen, "look": look, "rows": look.value or []}


async def find_schedules(source: Source, seen: Seen) -> Look[list[ScheduleStatus]]:
    """Return the schedules of all queues. A store without schedules has none."""
    if not seen.has_schedules:
        return Look(source.clock.time(), [])
    queues = [name for name in queue_names(seen) if not problem_of(seen.queue(name))]

    async def read() -> list[ScheduleStatus]:
        return await read_statuses(await source.watch.backend(), queues, source.clock.time())

    return await source.watch.looks.look("schedules", read)
