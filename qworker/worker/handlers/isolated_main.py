"""The process of suspects: it runs handlers of every kind, one at a time, inside the app's lifespan.

A suspect is a message whose last attempt killed its process. If it does so again, only this process dies.
"""

from __future__ import annotations

import asyncio
import contextvars
import socket
from contextlib import nullcontext
from typing import Any, NamedTuple

from qworker import logs
from qworker.app import Tasks
from qworker.attempt.providers import WorkerProviders
from qworker.context import Context
from qworker.decision import Fail, Retry
from qworker.errors import UsageError
from qworker.failure_text import error_type, failure_text
from qworker.jobs.handler_wait import HANDLER_WAITS
from qworker.kit.linux import die_sooner_without_memory
from qworker.task import Handler
from qworker.worker.handlers.child_main import (
    ChildSetup,
    ChildWaits,
    Handlers,
    LeaseCheck,
    Running,
    RunReply,
    RunRequest,
    arguments,
    decided,
    log_provider,
    raised,
    receive_setup,
    returned,
)
from qworker.worker.handlers.parent_link import ParentLink

__all__ = ["main"]


def main(descriptor: int) -> None:
    """Serve one parent. Return when it is gone."""
    with socket.socket(fileno=descriptor) as parent:
        setup = receive_setup(parent)
        if setup is not None:
            die_sooner_without_memory()
            asyncio.run(_serve(parent, setup))


async def _serve(parent: socket.socket, setup: ChildSetup) -> None:
    handlers = Handlers(setup)
    link = ParentLink(parent, RunRequest)
    request = await asyncio.to_thread(link.next_request)
    while request is not None:
        answered = False
        try:
            app = _load(handlers, setup)
            async with nullcontext() if app.lifespan is None else app.lifespan(app) as state:
                providers = WorkerProviders(log_provider)
                try:
                    while request is not None:
                        reply = await _run(_Suspects(app, state, providers), request, link)
                        answered = True
                        link.send(reply)
                        request = await asyncio.to_thread(link.next_request)
                        answered = request is None
                finally:
                    await providers.aclose()
        except (Exception, SystemExit) as error:  # the import and the lifespan are code of the app
            if answered or request is None:
                raise
            link.send(_not_begun(error))
            request = await asyncio.to_thread(link.next_request)


def _load(handlers: Handlers, setup: ChildSetup) -> Tasks:
    app: Tasks = handlers.app()
    if setup.logging is not None:
        logs.show_standard_logging(*setup.logging)
    return app


class _Suspects(NamedTuple):
    """What the handlers of suspects share."""

    app: Tasks
    # The value that the app's lifespan yielded.
    state: Any
    providers: WorkerProviders


async def _run(suspects: _Suspects, request: RunRequest, link: ParentLink[RunRequest]) -> RunReply:
    # A task of its own: a handler that cancels its task cancels nothing else, and its context variables end with it.
    task = asyncio.create_task(_outcome(suspects, request, link), context=contextvars.copy_context())
    await asyncio.wait([task])
    try:
        return task.result()
    except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its message's outcome
        return raised(error)


async def _outcome(suspects: _Suspects, request: RunRequest, link: ParentLink[RunRequest]) -> RunReply:
    app = suspects.app
    logs.RUNNING.set(Running(request))
    lease = LeaseCheck(link)
    HANDLER_WAITS.set(ChildWaits(lease))
    try:
        handler = app.raw_handlers.get(request.message.queue) if request.raw else app.registered_tasks.get(request.name)
        if handler is None:
            text = f"the app has no handler {request.name!r} when it is imported again: register it on import"
            return _not_begun(UsageError(text))
        context, args, kwargs = arguments(handler.signature, request, lease, suspects.state)
        link.send(RunReply(how="begun"))
        return returned(await _call(handler, context, args, kwargs, suspects.providers), request)
    except (Retry, Fail) as error:
        return decided(error)
    finally:
        lease.end()


async def _call(
    handler: Handler, context: Context, args: list[Any], kwargs: dict[str, Any], providers: WorkerProviders
) -> Any:
    runner = handler.runner
    if runner is not None:
        if handler.kind == "async":
            return await runner.run(context, args, kwargs, providers)
        return await asyncio.to_thread(runner.run_sync, context, args, kwargs, providers)
    if handler.takes_context:
        args.insert(0, context)
    if handler.kind == "async":
        return await handler.function(*args, **kwargs)
    return await asyncio.to_thread(handler.function, *args, **kwargs)


def _not_begun(error: BaseException) -> RunReply:
    return RunReply(how="not_begun", reason=failure_text(error), error_type=error_type(error))
