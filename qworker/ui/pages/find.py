"""The search for an id in all queues."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from qworker.ui.pages.rows import queue_names, task_names
from qworker.ui.pages.source import Source, value_of
from qworker.ui.paths import path_of
from qworker.ui.reads import Place, find_everywhere
from qworker.ui.watch import Seen

__all__ = ["find", "find_places"]


async def find(source: Source, request: Request) -> dict[str, Any] | Response:
    """Return the queues that have a message. If that is one, its page follows."""
    message_id = request.query_params.get("id", "").strip()
    seen = await source.watch.see()
    if not message_id:
        return {"seen": seen, "id": message_id, "places": [], "unknown": [], "queues": []}
    queues = queue_names(seen)
    places, unknown = await find_places(source, seen, message_id)
    if len(places) == 1 and not unknown:
        (place,) = places
        path = path_of(request.scope, "m", place.queue, place.stored.message.id)
        return RedirectResponse(path, HTTPStatus.SEE_OTHER)
    return {"seen": seen, "id": message_id, "places": places, "unknown": unknown, "queues": queues}


async def find_places(source: Source, seen: Seen, message_id: str) -> tuple[list[Place], list[str]]:
    """Return the queues that have a message, and those that did not answer in time or cannot be used.

    Raises:
        Unreachable: The search takes long.
    """

    async def search() -> tuple[list[Place], list[str]]:
        tasks = {queue: task_names(seen.queue(queue)) for queue in queue_names(seen)}
        return await find_everywhere(await source.watch.backend(), tasks, message_id)

    return value_of(await source.watch.looks.look(("find", message_id), search))
