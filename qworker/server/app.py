"""`create_app`: an ASGI application with mq's six endpoints on any backend, and the additions under `/-/`.

The six endpoints are plain functions of scope, receive and send, because every message takes this path. The additions
are a Starlette application.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

from qworker.asgi.access import Access
from qworker.asgi.interface import (
    ASGIApp,
    BodyTooLarge,
    Disconnected,
    Receive,
    Scope,
    Send,
    get_header,
    get_number,
    get_query,
    respond,
    segments,
)
from qworker.backend import Backend
from qworker.errors import InvalidName, QueueNotFound, QworkerError
from qworker.message import Draft, Selection, SettleAction, State
from qworker.names import check_id, id_forms, is_existing_queue_name, is_queue_name
from qworker.server.batcher import Batcher
from qworker.server.client_leases import ClientLeases, parse_token
from qworker.server.error_responses import to_error_response
from qworker.server.idempotency import Idempotency
from qworker.server.memory import DEFAULT_BODY_LIMIT, DEFAULT_MEMORY, IncomingBody, MemoryBudget, respond_in_parts
from qworker.server.reaper import ServerReaper
from qworker.server.schemas import LeaseGrant, get_visibility

__all__ = ["LONGEST_VISIBILITY", "LONGEST_WAIT", "UI_PATH", "MqApp", "create_app"]

# Seconds.
LONGEST_WAIT = 60.0
LONGEST_VISIBILITY = 7 * 86400.0
# Where the dashboard is served.
UI_PATH = "/-/ui"

_CONTENT = [(b"content-type", b"application/octet-stream"), (b"x-content-type-options", b"nosniff")]


class MqApp:
    """The ASGI application of the server. See `create_app`."""

    def __init__(
        self,
        backend: Backend,
        *,
        token: str | None,
        memory: MemoryBudget,
        visibility: float,
        additions: bool,
        reaps: bool,
        fetch_workers: int | None,
    ) -> None:
        self.backend = backend
        self.memory = memory
        self.leases = ClientLeases(backend, memory)
        self.visibility = visibility
        self._access = Access(token)
        self._posts = Batcher(self._post_batch)
        get_batch = self._get_batch if fetch_workers is None else self._get_batch_in_turn
        self._gets = Batcher(get_batch, memory.batch(256))
        self._fetching = [asyncio.Lock() for _ in range(fetch_workers or 0)]
        self._removals = Batcher(self._remove_batch)
        self._idempotency = Idempotency(backend)
        self._additions: ASGIApp | None = None
        self._ui: ASGIApp | None = None
        self._reaps = reaps
        self._reaper: asyncio.Task[None] | None = None
        if additions:
            from qworker.server.native_routes import make_native_routes

            self._additions = make_native_routes(backend, self.leases, memory, lease_time=visibility)

    def mount_ui(self, ui: ASGIApp) -> None:
        """Serve a dashboard below `UI_PATH`. The caller closes it."""
        self._ui = ui

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run the lifespan."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            await self._answer(scope, receive, send)
        except (BodyTooLarge, Disconnected, QworkerError) as error:
            await respond(send, *to_error_response(error))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._ui is not None and f"{scope['path']}/".startswith(f"{UI_PATH}/"):
            # It has a login of its own, because browsers do not send tokens.
            await self._ui({**scope, "root_path": UI_PATH}, receive, send)
            return
        refusal = self._access.refusal(scope)
        if refusal is not None:
            await respond(send, *refusal)
            return
        parts = segments(scope)
        if parts is None or not parts:
            await respond(send, 404)
        elif parts[0] == "-" and self._additions is not None:
            await self._additions(scope, receive, send)
        elif is_existing_queue_name(parts[0]):
            try:
                await self._mq(parts, scope, receive, send)
            except InvalidName:
                if is_queue_name(parts[0]):
                    raise
                # Only another program could have created this queue.
                await respond(send, 404)
        else:
            await respond(send, 404)

    # -- the six endpoints -------------------------------------------------------------------------------------------

    async def _mq(self, parts: list[str], scope: Scope, receive: Receive, send: Send) -> None:
        method: str = scope["method"]
        if len(parts) == 2 and parts[1] == "messages":
            if method == "POST":
                await self._post(parts[0], scope, receive, send)
                return
            if method == "GET":
                await self._get(parts[0], scope, receive, send)
                return
        elif len(parts) == 3 and parts[1] == "messages" and method == "DELETE":
            await self._delete_message(parts[0], parts[2], scope, send)
            return
        elif len(parts) == 1 and method in {"GET", "PUT", "DELETE"}:
            await self._queue(parts[0], method, send)
            return
        await respond(send, 404)

    async def _queue(self, queue: str, method: str, send: Send) -> None:
        if method == "PUT":
            await self.backend.create(queue)
            await respond(send, 201)
        elif method == "DELETE":
            await self.backend.delete(queue)
            self._idempotency.forget(queue)
            await respond(send, 200)
        else:
            await respond(send, 200 if await self._exists(queue) else 404)

    async def _exists(self, queue: str) -> bool:
        # The names of all queues could be many.
        try:
            await self.backend.parts(queue, State.READY, 1)
        except QueueNotFound:
            return False
        return True

    async def _post(self, queue: str, scope: Scope, receive: Receive, send: Send) -> None:
        key = get_header(scope, b"idempotency-key")
        async with IncomingBody(self.memory, scope, receive, self.memory.body_limit) as body:
            if key is None:
                message_id = await self._posts.add(queue, Draft(body=body))
            else:
                message_id = await self._idempotency.publish(queue, key, body)
        await respond(send, 201, [(b"x-message-id", message_id.encode())])

    async def _post_batch(self, queue: str, drafts: Sequence[Draft]) -> Sequence[str]:
        return await self.backend.publish(queue, drafts)

    async def _get(self, queue: str, scope: Scope, receive: Receive, send: Send) -> None:
        given = get_query(scope)
        wait = get_number(given, "wait", 0.0, least=0.0, most=LONGEST_WAIT)
        visibility = get_visibility(given, self.visibility, least=0.1, most=LONGEST_VISIBILITY)
        if wait:
            polled = await self.leases.take_unless_disconnected(receive, queue, 1, visibility, wait)
            grant = polled[0] if polled else None
        else:
            grant = await self._gets.add(queue, visibility)
        if grant is None:
            await respond(send, 204)
            return
        self.leases.release_if_unread(scope, [grant])
        message = grant.message
        headers = [
            (b"x-message-id", message.id.encode()),
            *_CONTENT,
            (b"x-lease-token", b"%d" % grant.token),
            (b"x-lease-expires", b"%.3f" % grant.expires_at),
            (b"x-message-tries", b"%d" % message.tries),
        ]
        self.memory.charge(len(message.body))
        try:
            await respond_in_parts(send, headers, message.body)
        finally:
            self.memory.release(len(message.body))

    async def _get_batch(self, queue: str, visibilities: Sequence[float]) -> Sequence[LeaseGrant | None]:
        results: list[LeaseGrant | None] = [None] * len(visibilities)
        # The sizes are not known before the lease.
        reserved = await self.memory.reserve(len(visibilities) * self.memory.body_limit)
        try:
            # Usually all requests have the same visibility timeout.
            for visibility in dict.fromkeys(visibilities):
                places = [place for place, wanted in enumerate(visibilities) if wanted == visibility]
                grants = await self.leases.take(queue, len(places), visibility)
                for place, grant in zip(places, grants, strict=False):
                    results[place] = grant
        finally:
            self.memory.release(reserved)
        return results

    async def _get_batch_in_turn(self, queue: str, visibilities: Sequence[float]) -> Sequence[LeaseGrant | None]:
        """Fetch when the worker of the queue is free. mq's server assigns queues to workers in this way."""
        async with self._fetching[zlib.crc32(queue.encode()) % len(self._fetching)]:
            return await self._get_batch(queue, visibilities)

    async def _delete_message(self, queue: str, message_id: str, scope: Scope, send: Send) -> None:
        token = parse_token(get_header(scope, b"x-lease-token"))
        if token is not None:
            done = await self.leases.settle(queue, check_id(message_id), token, SettleAction.ACK)
            await respond(send, 202 if done else 409)
            return
        try:
            for form in id_forms(message_id):
                await self._removals.add(queue, form)
        except (InvalidName, QueueNotFound):
            # The message does not exist, which is the requested result.
            pass
        await respond(send, 202)

    async def _remove_batch(self, queue: str, ids: Sequence[str]) -> Sequence[None]:
        await self.backend.remove(queue, Selection(ids=ids))
        for message_id in ids:
            self.leases.forget(queue, message_id)
        return [None] * len(ids)

    # -- the process -------------------------------------------------------------------------------------------------

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def start(self) -> None:
        """Open the backend, and start the reaper."""
        await self.backend.open()
        if self._reaps and self._reaper is None:
            self._reaper = asyncio.create_task(ServerReaper(self.backend, self.leases).run())

    async def stop(self) -> None:
        """Finish running calls. Clients keep their leases."""
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.wait([self._reaper])
            self._reaper = None
        for batches in (self._posts, self._gets, self._removals):
            await batches.aclose()
        await self.leases.aclose()

    def end_polls(self) -> None:
        """Answer the requests that wait for a message, because the server ends."""
        self.leases.polls.end()


def create_app(
    backend: Backend,
    *,
    token: str | None = None,
    body_limit: int = DEFAULT_BODY_LIMIT,
    visibility_timeout: float = 30.0,
    memory: int = DEFAULT_MEMORY,
    additions: bool = True,
    reaps: bool = True,
    fetch_workers: int | None = None,
) -> MqApp:
    """Return an ASGI application with mq's endpoints on a backend.

    It opens the backend when it starts. The caller closes the backend.

    Args:
        backend: A backend from `open_backend(url, remote_leases=True)` that is not open yet.
        token: The token that clients must send as `Authorization: Bearer`. None: no token is needed, and only requests
            with this machine as their host are answered.
        body_limit: Maximum size of a message in bytes. The backend's `max_body` also counts.
        visibility_timeout: Lease length of a fetched message in seconds, unless its request has another one.
        memory: Bytes of memory for the bodies of all requests and responses that run. Further requests wait.
        additions: Whether to serve the additions under `/-/`.
        reaps: Whether the server reaps expired leases and due messages. False: a worker on the same store does.
        fetch_workers: Number of fetches without a wait that run at the same time. Each queue belongs to one of them,
            by the CRC-32 of its name, as in mq. None: one for each queue.
    """
    if backend.max_body is not None:
        body_limit = min(body_limit, backend.max_body)
    return MqApp(
        backend,
        token=token,
        memory=MemoryBudget(memory, body_limit),
        visibility=visibility_timeout,
        additions=additions,
        reaps=reaps,
        fetch_workers=fetch_workers,
    )
