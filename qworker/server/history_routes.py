"""The history under `/-/-history`. No queue can have this name."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from qworker.asgi.interface import get_number
from qworker.backend import Backend
from qworker.errors import UsageError
from qworker.history.batch import EventBatch
from qworker.history.event import Event
from qworker.names import check_existing_queue, id_forms
from qworker.server.memory import IncomingBody, MemoryBudget
from qworker.server.schemas import HistoryPage, HistoryPosition

__all__ = ["history_routes"]

_MOST = 10_000

_batches = msgspec.json.Decoder(list[EventBatch])
_until = msgspec.json.Decoder(HistoryPosition)


class _History:
    """The route handlers. Each calls one method of the backend's history."""

    def __init__(self, backend: Backend, memory: MemoryBudget, body_limit: int) -> None:
        self._backend = backend
        self._memory = memory
        self._body_limit = body_limit

    def _body(self, request: Request) -> IncomingBody:
        return IncomingBody(self._memory, request.scope, request.receive, self._body_limit)

    async def logs(self, _request: Request) -> Response:
        """Return the names of the logs."""
        return _json(await self._backend.history.logs())

    async def append(self, request: Request) -> Response:
        """Append events of a worker on another host."""
        async with self._body(request) as body:
            try:
                batches = _batches.decode(body)
            except msgspec.DecodeError as error:
                raise UsageError(f"the body is not valid: {error}") from error
        for batch in batches:
            check_existing_queue(batch.queue)
        self._backend.history.append(batches)
        return Response(status_code=202)

    async def read(self, request: Request) -> Response:
        """Return events of a log, and the position to continue from."""
        given = dict(request.query_params)
        limit = int(get_number(given, "limit", 1000, least=1, most=_MOST))
        events, after = await self._backend.history.read(_log(request), given.get("after"), limit)
        return _json(HistoryPage(events, after))

    async def delete_before(self, request: Request) -> Response:
        """Allow the store to delete the events before a position."""
        async with self._body(request) as body:
            try:
                until = _until.decode(body).until
            except msgspec.DecodeError as error:
                raise UsageError(f"the body is not valid: {error}") from error
        await self._backend.history.delete_before(_log(request), until)
        return Response(status_code=204)

    async def for_message(self, request: Request) -> Response:
        """Return the events of one message."""
        queue = check_existing_queue(request.path_params["queue"])
        events: list[Event] = []
        for message_id in id_forms(request.path_params["id"]):
            events += await self._backend.history.for_message(queue, message_id)
        return _json(events)


def history_routes(backend: Backend, memory: MemoryBudget, body_limit: int) -> list[Route]:
    """Return the routes of the history."""
    history = _History(backend, memory, body_limit)
    return [
        Route("/-/-history", history.logs, methods=["GET"]),
        Route("/-/-history", history.append, methods=["POST"]),
        Route("/-/-history/{log}", history.read, methods=["GET"]),
        Route("/-/-history/{log}/forget", history.delete_before, methods=["POST"]),
        Route("/-/{queue}/messages/{id}/history", history.for_message, methods=["GET"]),
    ]


def _log(request: Request) -> str:
    log: str = request.path_params["log"]
    return check_existing_queue(log)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
