"""The routes under `/-/`: the operations without an mq endpoint, as JSON. `mq+http:` is their client.

The OpenAPI document describes them. The name of a queue cannot begin with `-`, so plain mq clients never reach them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from qworker import __version__
from qworker.asgi.interface import BodyTooLarge, Disconnected, get_number
from qworker.backend import Backend
from qworker.backend.each_queue import count_queues
from qworker.errors import InvalidName, QworkerError, UsageError
from qworker.kit.parts import PAGE_BYTES
from qworker.kit.task_groups import run_until
from qworker.message import Draft, Query, Selection, Settlement, State, StoredMessage
from qworker.names import check_existing_queue, check_id, forms_of_all
from qworker.server.client_leases import ClientLeases, parse_token
from qworker.server.error_responses import to_error_response
from qworker.server.history_routes import history_routes
from qworker.server.memory import IncomingBody, MemoryBudget
from qworker.server.schemas import (
    ACTIONS,
    ExtendRequest,
    ExtendResponse,
    IdsRequest,
    LeaseGrant,
    LeaseRef,
    SettleRequest,
    WaitRequest,
    check_delay,
    check_draft,
    check_selection,
    get_visibility,
    validate_lease,
)

__all__ = ["NativeRoutes", "make_native_routes"]

T = TypeVar("T")

# The reason that clients get for a queue that cannot be used.
_PROBLEM = "the server cannot use this queue: see its log"
# The size limit of a batch, in bodies of the maximum size.
_BATCH = 16
# A JSON body and what is decoded from it are in memory at once.
_COPIES = 2
_MOST = 1000


_Handler = Callable[[Request], Awaitable[Response]]


class NativeRoutes:
    """The route handlers. Each is one call of the backend.

    Args:
        backend: The backend.
        leases: The leases of the server's clients.
        memory: The memory of bodies.
        lease_time: Lease length in seconds, if the request has none.
    """

    def __init__(self, backend: Backend, leases: ClientLeases, memory: MemoryBudget, *, lease_time: float) -> None:
        self._backend = backend
        self._memory = memory
        self._leases = leases
        self._lease_time = lease_time

    def routes(self) -> list[Route]:
        """Return all routes, those with fixed paths first."""
        table: list[tuple[str, str, _Handler]] = [
            ("GET", "/-/openapi.json", self.openapi),
            ("GET", "/-/about", self.about),
            ("GET", "/-/queues", self.queues),
            ("GET", "/-/stats", self.all_stats),
            ("POST", "/-/settle", self.settle_many),
            ("POST", "/-/extend", self.extend_many),
            ("POST", "/-/wait", self.wait),
            ("PATCH", "/-/{queue}/messages/{id}", self.extend),
            ("GET", "/-/{queue}/messages/{id}", self.find),
            ("POST", "/-/{queue}/messages/{id}/{action}", self.settle),
            ("POST", "/-/{queue}/publish", self.publish),
            ("POST", "/-/{queue}/lease", self.lease),
            ("GET", "/-/{queue}/stats", self.stats),
            ("GET", "/-/{queue}/browse", self.browse),
            ("POST", "/-/{queue}/find", self.find_many),
            ("POST", "/-/{queue}/requeue", self.requeue),
            ("POST", "/-/{queue}/remove", self.remove),
            ("POST", "/-/{queue}/reap", self.reap),
            ("POST", "/-/{queue}/pause", self.pause),
            ("POST", "/-/{queue}/resume", self.resume),
        ]
        routes = [Route(path, handler, methods=[method]) for method, path, handler in table]
        return [*history_routes(self._backend, self._memory, self._memory.body_limit * _BATCH), *routes]

    # -- about the server --------------------------------------------------------------------------------------------

    async def openapi(self, _request: Request) -> Response:
        """Return the OpenAPI document."""
        from qworker.server.openapi import document

        return _json(document())

    async def about(self, _request: Request) -> Response:
        """Return the version of the server and the properties of its backend."""
        return _json(
            {
                "server": "qworker",
                "version": __version__,
                "durability": self._backend.durability,
                "shared": self._backend.shared,
                "history": self._backend.history.enabled,
                "deviations": dict(self._backend.deviations),
            }
        )

    async def queues(self, _request: Request) -> Response:
        """Return the names of the queues."""
        return _json(await self._backend.queues())

    async def all_stats(self, _request: Request) -> Response:
        """Return the counts of every queue."""
        counted = await count_queues(self._backend, await self._backend.queues())
        # A reason can contain paths and addresses of the store. The log of the server has it.
        return _json([replace(one, problem=one.problem and _PROBLEM) for one in counted])

    # -- single leases -----------------------------------------------------------------------------------------------

    async def extend(self, request: Request) -> Response:
        """Extend one lease."""
        place = _parse_lease(request)
        visibility = self._visibility(request)
        lease = await self._leases.extend(place.queue, place.id, place.token, visibility)
        if lease is None:
            return Response(status_code=409)
        return Response(status_code=200, headers={"x-lease-expires": f"{lease.expires_at:.3f}"})

    async def settle(self, request: Request) -> Response:
        """Settle one lease. The last part of the path is the action."""
        word = request.path_params["action"]
        if word not in ACTIONS:
            raise HTTPException(404)
        place = _parse_lease(request)
        given = await self._read(request, dict[str, Any])
        outcome = _convert({"lease": msgspec.to_builtins(place), "action": word, **given}, SettleRequest)
        check_delay(outcome.delay)
        done = await self._leases.settle(
            place.queue, place.id, place.token, ACTIONS[word], delay=outcome.delay, error=outcome.error
        )
        return Response(status_code=202 if done else 409)

    # -- batches -----------------------------------------------------------------------------------------------------

    async def publish(self, request: Request) -> Response:
        """Publish drafts, whose bodies are in base64."""
        queue = _queue(request)
        drafts = await self._read(request, list[Draft])
        for draft in drafts:
            check_draft(draft, self._memory.body_limit)
        size = sum([len(draft.body) for draft in drafts])
        self._memory.charge(size)
        try:
            # The id of a message that has the key can be a subclass, which JSON does not know.
            return _json([str(one) for one in await self._backend.publish(queue, drafts)], 201)
        finally:
            self._memory.release(size)

    async def lease(self, request: Request) -> Response:
        """Lease up to `limit` messages. Wait up to `wait` seconds for the first one."""
        queue = _queue(request)
        given = dict(request.query_params)
        limit = int(get_number(given, "limit", 1, least=1, most=_MOST))
        wait = get_number(given, "wait", 0.0, least=0.0, most=60.0)
        visibility = self._visibility(request)
        if wait:
            grants = await self._leases.take_unless_disconnected(request.receive, queue, limit, visibility, wait)
            return self._grant(request, grants)
        reserved = await self._memory.reserve(self._memory.batch(limit) * self._memory.body_limit)
        try:
            return self._grant(request, await self._leases.take(queue, limit, visibility))
        finally:
            self._memory.release(reserved)

    def _grant(self, request: Request, grants: list[LeaseGrant]) -> Response:
        self._leases.release_if_unread(request.scope, grants)
        return _json(grants)

    async def extend_many(self, request: Request) -> Response:
        """Extend leases."""
        wish = await self._read(request, ExtendRequest)
        if not 0 < wish.visibility_timeout <= 7 * 86400.0:
            raise UsageError("visibility_timeout must be a number of seconds, at most a week")
        leases = [await self._leases.find(h.queue, h.id, h.token) for h in map(validate_lease, wish.leases)]
        known = [lease for lease in leases if lease is not None]
        lost = {id(lease) for lease in await self._leases.extend_all(known, wish.visibility_timeout)}
        gone = [number for number, lease in enumerate(leases) if lease is None or id(lease) in lost]
        return _json(
            ExtendResponse(
                lost=gone,
                expires_at=[
                    0.0 if number in set(gone) or lease is None else lease.expires_at
                    for number, lease in enumerate(leases)
                ],
            )
        )

    async def settle_many(self, request: Request) -> Response:
        """Settle leases, and return the positions of the refused ones in the request."""
        outcomes = await self._read(request, list[SettleRequest])
        refused: list[int] = []
        settlements: list[Settlement] = []
        places: list[int] = []
        for outcome in outcomes:
            check_delay(outcome.delay)
            validate_lease(outcome.lease)
        for place, outcome in enumerate(outcomes):
            held = outcome.lease
            lease = await self._leases.find(held.queue, held.id, held.token)
            if lease is None:
                refused.append(place)
                continue
            places.append(place)
            settlements.append(
                Settlement(
                    lease=lease,
                    action=ACTIONS[outcome.action],
                    delay=outcome.delay,
                    error=outcome.error,
                    died=outcome.died,
                    survived=outcome.survived,
                )
            )
        back = {id(settlement) for settlement in await self._backend.settle(settlements)}
        for place, settlement in zip(places, settlements, strict=True):
            self._leases.forget(settlement.lease.message.queue, settlement.lease.message.id)
            if id(settlement) in back:
                refused.append(place)
        return _json(sorted(refused))

    async def wait(self, request: Request) -> Response:
        """Wait until one of the queues may have a message to lease."""
        wish = await self._read(request, WaitRequest)
        for queue in wish.queues:
            check_existing_queue(queue)
        waiting = self._backend.wait(wish.queues, max(0.0, min(wish.timeout, 60.0)))
        await run_until(partial(self._leases.polls.wait_for_end, request.receive), waiting)
        return Response(status_code=204)

    # -- administering -----------------------------------------------------------------------------------------------

    async def find(self, request: Request) -> Response:
        """Return one message."""
        found = await self._backend.find(_queue(request), forms_of_all([request.path_params["id"]]))
        return _json(found[0].to_json()) if found else Response(status_code=404)

    async def find_many(self, request: Request) -> Response:
        """Return messages by their ids."""
        ids = (await self._read(request, IdsRequest)).ids
        if len(ids) > _MOST:
            raise UsageError(f"a request must have at most {_MOST} ids (got {len(ids)})")
        return _json([stored.to_json() for stored in await self._backend.find(_queue(request), forms_of_all(ids))])

    async def stats(self, request: Request) -> Response:
        """Return the counts of a queue."""
        return _json(await self._backend.stats(_queue(request)))

    async def browse(self, request: Request) -> Response:
        """Return up to `limit` messages, fewer if they are large. The header X-More says that more can follow."""
        given = dict(request.query_params)
        state = State.of_word(given.get("state", "ready"))
        limit = int(get_number(given, "limit", 100, least=1, most=_MOST))
        newest = bool(get_number(given, "newest", 0, least=0, most=1))
        query = Query(state, after=given.get("after"), limit=limit, newest=newest)
        found: list[StoredMessage] = []
        size = 0
        async for page in self._backend.browse(_queue(request), query):
            found += page
            size += sum(len(stored.message.body) for stored in page)
            if size >= PAGE_BYTES:
                break
        response = _json([stored.to_json() for stored in found])
        if size >= PAGE_BYTES or len(found) == limit:
            response.headers["x-more"] = "1"
        return response

    async def requeue(self, request: Request) -> Response:
        """Make failed messages ready again."""
        return _json(await self._backend.requeue(_queue(request), await self._selection(request)))

    async def remove(self, request: Request) -> Response:
        """Delete messages."""
        return _json(await self._backend.remove(_queue(request), await self._selection(request)))

    async def _selection(self, request: Request) -> Selection:
        data = await self._read(request, dict[str, Any])
        try:
            selection = Selection.from_json(data)
        except msgspec.ValidationError as error:
            raise UsageError(f"the body is not valid: {error}") from error
        check_selection(selection)
        if selection.ids is None:
            return selection
        return Selection(ids=forms_of_all(selection.ids))

    async def reap(self, request: Request) -> Response:
        """Reap a queue, and return the number of messages that became ready."""
        return _json((await self._backend.reap(_queue(request))).returned)

    async def pause(self, request: Request) -> Response:
        """Pause a queue."""
        await self._backend.pause(_queue(request))
        return Response(status_code=204)

    async def resume(self, request: Request) -> Response:
        """Resume a queue."""
        await self._backend.resume(_queue(request))
        return Response(status_code=204)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _visibility(self, request: Request) -> float:
        return get_visibility(dict(request.query_params), self._lease_time, least=0.001, most=7 * 86400.0)

    async def _read(self, request: Request, kind: type[T]) -> T:
        limit = self._memory.body_limit * _BATCH
        async with IncomingBody(self._memory, request.scope, request.receive, limit, _COPIES) as body:
            try:
                return msgspec.json.decode(body or b"{}", type=kind)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise UsageError(f"the body is not valid: {error}") from error


def make_native_routes(backend: Backend, leases: ClientLeases, memory: MemoryBudget, *, lease_time: float) -> Starlette:
    """Return the application under `/-/`."""
    return Starlette(
        routes=NativeRoutes(backend, leases, memory, lease_time=lease_time).routes(),
        exception_handlers={
            HTTPException: _to_json,
            QworkerError: _refused,
            BodyTooLarge: _refused,
            Disconnected: _refused,
        },
    )


async def _refused(_request: Request, error: Exception) -> Response:
    status, headers, body = to_error_response(error)
    response = Response(body, status_code=status)
    response.raw_headers.extend(headers)
    return response


async def _to_json(_request: Request, error: Exception) -> Response:
    # An unknown path or method is 404, as in mq.
    status = error.status_code if isinstance(error, HTTPException) else 500
    return Response(status_code=404 if status == 405 else status)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _queue(request: Request) -> str:
    try:
        return check_existing_queue(request.path_params["queue"])
    except InvalidName:
        raise HTTPException(404) from None


def _parse_lease(request: Request) -> LeaseRef:
    text = request.headers.get("x-lease-token")
    token = parse_token(None if text is None else text.encode())
    if token is None:
        raise UsageError("the X-Lease-Token header is missing: send the token that you received with the message")
    return LeaseRef(_queue(request), check_id(request.path_params["id"]), token)


def _convert(value: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"the body is not valid: {error}") from error
