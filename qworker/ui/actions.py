"""Changes of one thing: a queue, a message or a schedule.

Each is a POST, and leads back to the page that it came from. A program asks for JSON instead. What changes many
messages, or deletes one, is confirmed first: see `confirm`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from qworker.app import Tasks
from qworker.backend import Backend
from qworker.backend.offers import OffersDue
from qworker.errors import AlreadyEnqueued, QueueNotFound, QworkerError, UsageError
from qworker.failures.edit import Arguments, arguments_of, enqueue_edited, read_arguments
from qworker.failures.groups import finished_message, task_of
from qworker.jobs.cancel import cancel_jobs, finish_all_cancels
from qworker.jobs.source import JobSource
from qworker.message import Selection, State, StoredMessage
from qworker.names import check_existing_queue, id_forms
from qworker.schedules.control import run_now
from qworker.schedules.store import StoredSchedule, find_schedule, set_paused
from qworker.ui.access import Access
from qworker.ui.audit import Action, ActionRecord, record
from qworker.ui.guard import Guard, wants_json
from qworker.ui.pages.source import NoSuchPage, Source
from qworker.ui.paths import path_of, redirect
from qworker.ui.rendering import Renderer
from qworker.ui.tickets import Notice, Signer

__all__ = ["Actions", "jobs_of", "message_of", "require_message"]


class Actions:
    """The routes of these changes.

    Args:
        source: What pages are made from.
        guard: Checks each request.
        signer: Signs notices.
        renderer: Renders pages.
        has_page: Returns whether a path is that of a page.
    """

    def __init__(
        self, source: Source, guard: Guard, signer: Signer, renderer: Renderer, has_page: Callable[[str], bool]
    ) -> None:
        self._source = source
        self._watch = source.watch
        self._clock = source.clock
        self._signer = signer
        self._renderer = renderer
        self._has_page = has_page
        self.routes: list[Route] = [
            guard.route("/q/{queue}/pause", self._pause, "pause"),
            guard.route("/q/{queue}/resume", self._resume, "resume"),
            guard.route("/m/{queue}/{id}/requeue", self._requeue, "requeue"),
            guard.route("/m/{queue}/{id}/run", self._run, "run now"),
            guard.route("/m/{queue}/{id}/cancel", self._cancel, "cancel"),
            guard.route("/m/{queue}/{id}/edit", self._edit, "edit", methods=["GET", "POST"]),
            guard.route("/schedules/{name:path}/pause", self._pause_schedule, "pause schedule"),
            guard.route("/schedules/{name:path}/resume", self._resume_schedule, "resume schedule"),
            guard.route("/schedules/{name:path}/run", self._run_schedule, "run schedule"),
        ]

    # -- queues --------------------------------------------------------------------------------------------------------

    async def _pause(self, request: Request) -> Response:
        return await self._set_queue_paused(request, "pause", paused=True)

    async def _resume(self, request: Request) -> Response:
        return await self._set_queue_paused(request, "resume", paused=False)

    async def _set_queue_paused(self, request: Request, action: Action, *, paused: bool) -> Response:
        queue = request.path_params["queue"]

        async def change(backend: Backend) -> Notice:
            await (backend.pause(queue) if paused else backend.resume(queue))
            done = "paused: nothing is leased from it until it is resumed" if paused else "resumed"
            return Notice(f"{queue} is {done}.")

        return await self._do(request, action, queue, "", change)

    # -- one message ---------------------------------------------------------------------------------------------------

    async def _requeue(self, request: Request) -> Response:
        queue, message_id = message_of(request)

        async def requeue(backend: Backend) -> Notice:
            await finish_all_cancels(backend, jobs_of(self._source), queue)
            stored = await _find_message(backend, queue, message_id)
            if stored is not None and stored.state is State.FAILED:
                if await backend.requeue(queue, Selection(unchanged=[finished_message(stored)])):
                    return Notice("The message is ready again.", link=("m", queue, message_id))
                stored = await _find_message(backend, queue, message_id)
            return Notice(f"Nothing is changed: {_state_of(stored)}.", good=False)

        return await self._do(request, "requeue", queue, message_id, requeue)

    async def _run(self, request: Request) -> Response:
        queue, message_id = message_of(request)

        async def run(backend: Backend) -> Notice:
            stored = await _find_message(backend, queue, message_id)
            assert isinstance(backend, OffersDue)
            if stored is not None and await backend.make_due(queue, stored.message.id):
                return Notice("The message is due now.", link=("m", queue, message_id))
            return Notice(f"Nothing is changed: {_state_of(stored)}.", good=False)

        return await self._do(request, "run now", queue, message_id, run)

    async def _cancel(self, request: Request) -> Response:
        queue, message_id = message_of(request)

        async def cancel(backend: Backend) -> Notice:
            stored = await _find_message(backend, queue, message_id)
            if stored is None:
                return Notice("Nothing is changed: there is no such message.", good=False)
            by = request.state.access.name
            was = await cancel_jobs(backend, jobs_of(self._source), queue, [stored.message.id], by)
            if was[stored.message.id] == "finished":
                return Notice("Nothing is changed: the message has finished.", good=False)
            return Notice(f"The message is cancelled. It was {was[stored.message.id]}.", link=("m", queue, message_id))

        return await self._do(request, "cancel", queue, message_id, cancel)

    async def _edit(self, request: Request) -> Response:
        """Show the arguments of a failed call, or enqueue it with those of the form."""
        queue, message_id = message_of(request)
        backend = await self._watch.backend()
        stored = await require_message(backend, queue, message_id)
        self._check_task(stored)
        given = arguments_of(stored)
        if request.method != "POST":
            return self._edit_page(request, stored, given.text(), None)
        text = request.state.form.get("arguments", "")
        try:
            edited = read_arguments(text)
            return await self._do(request, "edit", queue, message_id, self._editing(queue, stored, edited))
        except UsageError as error:
            if wants_json(request):
                raise
            return self._edit_page(request, stored, text, str(error))

    def _check_task(self, stored: StoredMessage) -> None:
        task = task_of(stored.message)
        if self._source.tasks is None or task not in self._source.tasks.registered_tasks:
            raise UsageError(f"the app of this dashboard has no task {task}, so it cannot check the arguments")

    def _editing(self, queue: str, stored: StoredMessage, edited: Arguments) -> Callable[[Backend], Awaitable[Notice]]:
        async def enqueue(backend: Backend) -> Notice:
            made = await enqueue_edited(backend, jobs_of(self._source), queue, stored, edited)
            done = "It is enqueued with these arguments" if made.is_new else "It had been enqueued with these arguments"
            rest = "" if made.removed else " The failed message had been requeued meanwhile, so it runs too."
            return Notice(f"{done}: {made.id}.{rest}", link=("m", queue, made.id))

        return enqueue

    def _edit_page(self, request: Request, stored: StoredMessage, text: str, problem: str | None) -> Response:
        content = {"queue": stored.message.queue, "id": stored.message.id, "text": text, "problem": problem}
        status = HTTPStatus.OK if problem is None else HTTPStatus.UNPROCESSABLE_ENTITY
        return self._renderer.page(request, "edit.html", content, status=status)

    # -- schedules -----------------------------------------------------------------------------------------------------

    async def _pause_schedule(self, request: Request) -> Response:
        return await self._set_paused(request, "pause schedule", paused=True)

    async def _resume_schedule(self, request: Request) -> Response:
        return await self._set_paused(request, "resume schedule", paused=False)

    async def _set_paused(self, request: Request, action: Action, *, paused: bool) -> Response:
        stored = await self._schedule(request)
        name, queue = stored.definition.name, stored.definition.queue

        async def change(backend: Backend) -> Notice:
            await set_paused(backend, queue, name, paused=paused)
            return Notice(f"{name} is {'paused: it does not tick until it is resumed' if paused else 'resumed'}.")

        return await self._do(request, action, queue, name, change)

    async def _run_schedule(self, request: Request) -> Response:
        stored = await self._schedule(request)

        async def run(backend: Backend) -> Notice:
            message_id = await run_now(backend, stored.definition, self._clock.time())
            return Notice(
                f"{stored.definition.name} is enqueued: {message_id}", link=("m", stored.definition.queue, message_id)
            )

        return await self._do(request, "run schedule", stored.definition.queue, stored.definition.name, run)

    async def _schedule(self, request: Request) -> StoredSchedule:
        backend, name = await self._watch.backend(), request.path_params["name"]
        stored = await find_schedule(backend, await backend.queues(), name, self._clock.time())
        if stored is None:
            raise NoSuchPage(f"there is no schedule {name}")
        return stored

    # -- answers -------------------------------------------------------------------------------------------------------

    async def _do(
        self,
        request: Request,
        action: Action,
        queue: str,
        what: str,
        change: Callable[[Backend], Awaitable[Notice]],
    ) -> Response:
        """Change one thing, record it, and answer."""
        backend = await self._watch.backend()
        check_existing_queue(queue)
        try:
            notice = await change(backend)
        except QueueNotFound as error:
            raise NoSuchPage(str(error)) from error
        except AlreadyEnqueued as error:
            notice = Notice(f"Nothing is changed: {error}", good=False)
        except (QworkerError, OSError) as error:
            await self._record(request, backend, action, queue, what, str(error))
            raise
        self._watch.looks.expire()
        await self._record(request, backend, action, queue, what, "done" if notice.good else "nothing")
        return self._answer(request, notice)

    async def _record(
        self, request: Request, backend: Backend, action: Action, queue: str, what: str, result: str
    ) -> None:
        access: Access = request.state.access
        at = self._clock.time()
        await record(
            backend,
            ActionRecord(
                at=at, user=access.name, role=access.role, action=action, queue=queue, what=what, result=result
            ),
        )

    def _answer(self, request: Request, notice: Notice) -> Response:
        """Lead back to the page with the form, which shows the result."""
        if wants_json(request):
            link = path_of(request.scope, *notice.link) if notice.link else None
            return JSONResponse({"changed": notice.good, "text": notice.text, "link": link})
        wanted = request.state.form.get("next", "")
        path, _, query = (wanted if self._has_page(wanted) else "/").partition("?")
        given = urlencode({"notice": self._signer.sign_notice(notice)})
        return redirect(request, path, f"{query}&{given}" if query else given)


def jobs_of(source: Source) -> JobSource:
    """Return what is known of the jobs of a store: by its app, or by its URL alone."""
    return JobSource(source.tasks or Tasks(source.watch.url), None)


def message_of(request: Request) -> tuple[str, str]:
    """Return the queue and the id in the path of a request."""
    return check_existing_queue(request.path_params["queue"]), request.path_params["id"]


async def _find_message(backend: Backend, queue: str, message_id: str) -> StoredMessage | None:
    """Return a message. None: it is not stored.

    Raises:
        NoSuchPage: The queue does not exist.
    """
    try:
        return next(iter(await backend.find(queue, id_forms(message_id))), None)
    except QueueNotFound as error:
        raise NoSuchPage(str(error)) from error


async def require_message(backend: Backend, queue: str, message_id: str) -> StoredMessage:
    """Return a message.

    Raises:
        NoSuchPage: It is not stored, or the queue does not exist.
    """
    stored = await _find_message(backend, queue, message_id)
    if stored is None:
        raise NoSuchPage(f"{queue} has no message with this id")
    return stored


def _state_of(stored: StoredMessage | None) -> str:
    return "there is no such message" if stored is None else f"the message is {stored.state.word}"
