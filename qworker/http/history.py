"""The history below `/-/-history`: a name that no queue can have."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from qworker.backend import Backend
from qworker.errors import UsageError
from qworker.history.batch import EventBatch
from qworker.http.reply import number, read_body
from qworker.http.wire import Page, Until
from qworker.names import check_id, check_queue

__all__ = ["history_routes"]

_MOST = 10_000

_batches = msgspec.json.Decoder(list[EventBatch])
_until = msgspec.json.Decoder(Until)


class _History:
    """The handlers; each is one call of the backend."""

    def __init__(self, backend: Backend, body_limit: int) -> None:
        self._backend = backend
        self._body_limit = body_limit

    async def logs(self, _request: Request) -> Response:
        """The parts."""
        return _json(await self._backend.history.logs())

    async def append(self, request: Request) -> Response:
        """Keep what a worker elsewhere tells."""
        body = await read_body(request.scope, request.receive, self._body_limit)
        try:
            batches = _batches.decode(body)
        except msgspec.DecodeError as error:
            raise UsageError(f"the body cannot be used: {error}") from error
        for batch in batches:
            check_queue(batch.queue)
        self._backend.history.append(batches)
        return Response(status_code=202)

    async def read(self, request: Request) -> Response:
        """Events of a part, and the position to go on from."""
        given = dict(request.query_params)
        limit = int(number(given, "limit", 1000, least=1, most=_MOST))
        events, after = await self._backend.history.read(_part(request), given.get("after"), limit)
        return _json(Page(events, after))

    async def delete_before(self, request: Request) -> Response:
        """Let go of what lies before a position."""
        body = await read_body(request.scope, request.receive, self._body_limit)
        try:
            until = _until.decode(body).until
        except msgspec.DecodeError as error:
            raise UsageError(f"the body cannot be used: {error}") from error
        await self._backend.history.delete_before(_part(request), until)
        return Response(status_code=204)

    async def for_message(self, request: Request) -> Response:
        """What happened to one message."""
        queue, message_id = check_queue(request.path_params["queue"]), check_id(request.path_params["id"])
        return _json(await self._backend.history.for_message(queue, message_id))


def history_routes(backend: Backend, body_limit: int) -> list[Route]:
    """The routes."""
    history = _History(backend, body_limit)
    return [
        Route("/-/-history", history.logs, methods=["GET"]),
        Route("/-/-history", history.append, methods=["POST"]),
        Route("/-/-history/{part}", history.read, methods=["GET"]),
        Route("/-/-history/{part}/forget", history.delete_before, methods=["POST"]),
        Route("/-/{queue}/messages/{id}/history", history.for_message, methods=["GET"]),
    ]


def _part(request: Request) -> str:
    part: str = request.path_params["part"]
    return check_queue(part)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
