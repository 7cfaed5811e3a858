"""Changes that are confirmed on a page first: of many messages, and those that delete.

The page has a ticket, and its form sends nothing else. The ticket says what was confirmed, so nothing that the user did
not see is changed. The work of a ticket has a page of its own, with its progress.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import quote

import msgspec
from starlette._utils import get_route_path
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from qworker.backend import Backend
from qworker.errors import QueueNotFound, UsageError
from qworker.failures.bulk import count_matching, list_matching, requeue_matching, until_now
from qworker.failures.message_filter import MessageFilter
from qworker.message import Query, State, StoredMessage
from qworker.names import check_existing_queue
from qworker.ui.access import Access
from qworker.ui.actions import jobs_of, message_of, require_message
from qworker.ui.filters import query_of, read_filter, words_of
from qworker.ui.guard import Guard, wants_json
from qworker.ui.looks import Look
from qworker.ui.pages.source import Forbidden, NoSuchPage, Source, Unreachable
from qworker.ui.paths import redirect
from qworker.ui.rendering import Renderer
from qworker.ui.tickets import Signer, Ticket, TicketAction
from qworker.ui.works import Work, Works

__all__ = ["Confirmed"]

# From so many messages on, the user types the name of the queue.
_LEAST_TYPED = 1_000
# Messages that a confirmation page names.
_EXAMPLES = 3
_PURGED = {"ready": State.READY, "delayed": State.DELAYED, "done": State.DONE}


class _Found(msgspec.Struct, frozen=True):
    """What an action would change.

    Attributes:
        count: Number of messages.
        left_out: See `Requeued`.
        examples: The newest of the messages that match.
    """

    count: int
    left_out: Mapping[str, int] = {}
    examples: list[StoredMessage] = []


class Confirmed:
    """The routes of these changes.

    Args:
        source: What pages are made from.
        guard: Checks each request.
        signer: Signs tickets.
        renderer: Renders the pages.
    """

    def __init__(self, source: Source, guard: Guard, signer: Signer, renderer: Renderer) -> None:
        self._watch = source.watch
        self._clock = source.clock
        self._guard = guard
        self._signer = signer
        self._renderer = renderer
        self._jobs = partial(jobs_of, source)
        self._works = Works(self._watch, self._jobs)
        get = ["GET"]
        self.routes: list[Route] = [
            guard.route("/q/{queue}/requeue", self._requeue, "requeue many", methods=get),
            guard.route("/q/{queue}/remove", self._remove, "remove many", methods=get),
            guard.route("/q/{queue}/purge", self._purge, "purge", methods=get),
            guard.route("/m/{queue}/{id}/remove", self._remove_one, "remove", methods=get),
            guard.route("/actions", self._start, has_token=False),
            guard.route("/actions/{nonce}", self._progress, methods=get),
            guard.route("/actions/{nonce}/stop", self._stop),
        ]

    async def aclose(self) -> None:
        """End the works after their batches. Idempotent."""
        await self._works.aclose()

    # -- the pages -----------------------------------------------------------------------------------------------------

    async def _requeue(self, request: Request) -> Response:
        return await self._confirm_many(request, "requeue many")

    async def _remove(self, request: Request) -> Response:
        return await self._confirm_many(request, "remove many")

    async def _confirm_many(self, request: Request, action: TicketAction) -> Response:
        """Show what a filter chooses. What fails after the first look is not part of it, so the URL has its moment."""
        queue = check_existing_queue(request.path_params["queue"])
        matching = read_filter(request.query_params)
        backend = await self._watch.backend()
        if "until" not in request.query_params:
            try:
                matching = await until_now(backend, queue, matching)
            except QueueNotFound as error:
                raise NoSuchPage(str(error)) from error
            return redirect(request, quote(get_route_path(request.scope)), query_of(matching))
        look = await self._count(backend, queue, action, matching)
        if look.missing:
            raise NoSuchPage(look.problem)
        found = look.value
        if found is None and look.problem is not None:
            raise Unreachable(look.problem)
        ticket = None
        if found is not None:
            ticket = self._ticket(request, backend, action, queue, found.count, matching=matching)
        return self._confirmation(request, action, queue, ticket, found, words_of(matching))

    async def _count(self, backend: Backend, queue: str, action: TicketAction, matching: MessageFilter) -> Look[_Found]:
        async def read() -> _Found:
            query = Query(State.FAILED, limit=_EXAMPLES, newest=True)
            examples = await list_matching(backend, queue, query, matching)
            if action == "remove many":
                return _Found(await count_matching(backend, queue, matching), {}, examples)
            would = await requeue_matching(backend, self._jobs(), queue, matching, dry_run=True)
            return _Found(would.count, would.left_out, examples)

        # After an action the count is another one.
        return await self._watch.looks.look((action, queue, matching, self._works.started), read)

    async def _purge(self, request: Request) -> Response:
        queue, word = request.path_params["queue"], request.query_params.get("state", "")
        if word not in _PURGED:
            raise UsageError(f"state must be one of {', '.join(_PURGED)}")
        seen = (await self._watch.see()).queue(queue)
        if seen is None:
            raise NoSuchPage(f"there is no queue {queue}")
        backend = await self._watch.backend()
        count = 0 if seen.counted is None else seen.counted.count.stats.count(_PURGED[word])
        ticket = self._ticket(request, backend, "purge", queue, count, state=_PURGED[word])
        return self._confirmation(request, "purge", queue, ticket, _Found(count), [f"every message that is {word}"])

    async def _remove_one(self, request: Request) -> Response:
        queue, message_id = message_of(request)
        backend = await self._watch.backend()
        stored = await require_message(backend, queue, message_id)
        ticket = self._ticket(request, backend, "remove", queue, 1, id=stored.message.id)
        words = [f"the message is {stored.state.word}"]
        return self._confirmation(request, "remove", queue, ticket, _Found(1, examples=[stored]), words)

    def _ticket(
        self, request: Request, backend: Backend, action: TicketAction, queue: str, count: int, **what: Any
    ) -> Ticket:
        return Ticket(
            user=request.state.access.name,
            action=action,
            store=backend.describe(),
            queue=queue,
            at=self._clock.time(),
            count=count,
            **what,
        )

    def _confirmation(
        self,
        request: Request,
        action: TicketAction,
        queue: str,
        ticket: Ticket | None,
        found: _Found | None,
        words: Sequence[str],
    ) -> Response:
        facts = {"action": action, "queue": queue, "typed": ticket is not None and _is_typed(ticket)}
        signed = "" if ticket is None else self._signer.sign_ticket(ticket)
        if not wants_json(request):
            content = {**facts, "found": found, "words": words, "ticket": signed}
            return self._renderer.page(request, "confirm.html", content, is_live=found is None)
        if found is None:
            return JSONResponse({**facts, "counting": True}, HTTPStatus.ACCEPTED)
        ids = [one.message.id for one in found.examples]
        counts = {"count": found.count, "left_out": dict(found.left_out), "examples": ids}
        return JSONResponse({**facts, **counts, "filter": words, "ticket": signed})

    # -- the work of a ticket ------------------------------------------------------------------------------------------

    async def _start(self, request: Request) -> Response:
        """Carry out a ticket, go on with it, or show what it has done."""
        form, access = request.state.form, cast("Access", request.state.access)
        ticket = self._signer.read_ticket(form.get("ticket", ""))
        if ticket is None:
            raise Forbidden("this confirmation is older than 10 minutes, or not valid: start again")
        if ticket.user != access.name:
            raise Forbidden("another user has confirmed this: start again")
        backend = await self._watch.backend()
        if ticket.store != backend.describe():
            raise Forbidden("this was confirmed for another store: start again")
        self._guard.check(access, backend, ticket.action)
        if _is_typed(ticket) and form.get("typed", "").strip() != ticket.queue:
            raise UsageError(f"nothing is changed: to confirm, type the name of the queue, {ticket.queue}")
        work = self._works.start(ticket, access)
        if wants_json(request):
            return _json_of(work, HTTPStatus.ACCEPTED)
        return redirect(request, f"/actions/{ticket.nonce}")

    async def _progress(self, request: Request) -> Response:
        work = self._work(request)
        if wants_json(request):
            return _json_of(work)
        is_own = work.ticket.user == request.state.access.name
        signed = self._signer.sign_ticket(work.ticket) if is_own and work.state in {"stopped", "failed"} else ""
        words, typed = words_of(work.ticket.matching), _is_typed(work.ticket)
        content = {"work": work, "words": words, "ticket": signed, "typed": typed}
        return self._renderer.page(request, "action.html", content, is_live=work.is_running)

    async def _stop(self, request: Request) -> Response:
        work = self._work(request)
        self._guard.check(request.state.access, await self._watch.backend(), work.ticket.action)
        self._works.stop(work.ticket.nonce)
        return _json_of(work) if wants_json(request) else redirect(request, f"/actions/{work.ticket.nonce}")

    def _work(self, request: Request) -> Work:
        work = self._works.find(request.path_params["nonce"])
        if work is None:
            raise NoSuchPage("this process does not know this action: if it was interrupted, confirm it again")
        return work


def _is_typed(ticket: Ticket) -> bool:
    return ticket.action == "purge" or ticket.count >= _LEAST_TYPED


def _json_of(work: Work, status: HTTPStatus = HTTPStatus.OK) -> Response:
    ticket = work.ticket
    facts = {"id": ticket.nonce, "action": ticket.action, "queue": ticket.queue, "count": ticket.count}
    progress = {"changed": work.changed, "skipped": work.skipped, "left_out": work.left_out, "left": work.left}
    return JSONResponse({**facts, "state": work.state, **progress, "problem": work.problem}, status)
