"""The schedules of all queues."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from qworker.schedules.store import ScheduleStatus, read_statuses
from qworker.ui.looks import Look
from qworker.ui.pages.rows import problem_of, queue_names
from qworker.ui.pages.source import Source

__all__ = ["schedules"]


async def schedules(source: Source, _request: Request) -> dict[str, Any]:
    """Return the schedules of all queues."""
    seen = await source.watch.see()
    queues = [name for name in queue_names(seen) if not problem_of(seen.queue(name))]

    async def read() -> list[ScheduleStatus]:
        return await read_statuses(await source.watch.backend(), queues, source.clock.time())

    look: Look[list[ScheduleStatus]] = Look(None, [])
    if seen.has_schedules:
        look = await source.watch.looks.look("schedules", read)
    return {"seen": seen, "look": look, "rows": look.value or []}
