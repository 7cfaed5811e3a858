"""A message: why it is in its state, its story, and what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from qworker.failure_text import summary
from qworker.failures.groups import task_of
from qworker.history.event import Event
from qworker.message import MessageRef, StoredMessage
from qworker.names import id_forms
from qworker.tools.explain import Explanation, explain
from qworker.ui.access import Access
from qworker.ui.looks import Look
from qworker.ui.pages.rows import EVENT_COLOURS, task_names
from qworker.ui.pages.source import Forbidden, NoSuchPage, Source
from qworker.ui.text import body_of, duration
from qworker.ui.watch import Seen

__all__ = ["body", "find_message", "message"]


async def message(source: Source, request: Request) -> dict[str, Any]:
    """Return what is known about a message.

    Raises:
        NoSuchPage: Neither the store nor its history knows it.
    """
    queue, message_id = request.path_params["queue"], request.path_params["id"]
    access: Access = request.state.access
    seen = await source.watch.see()
    look = await find_message(source, seen, queue, message_id)
    found = look.value
    if found is None:
        return {"seen": seen, "look": look, "queue": queue, "id": message_id, "found": None}
    stored = found.stored
    inner = None if stored is None else stored.message
    return {
        "seen": seen,
        "look": look,
        "queue": queue,
        "id": found.id,
        "found": found,
        "task": _task(found),
        "state": "gone" if found.state is None else found.state.word,
        "facts": [] if stored is None else _facts(stored),
        "story": _story(found.history),
        "body": None if inner is None else body_of(inner, masked=not access.sees_secrets),
        "masked": not access.sees_secrets,
        "headline": None if found.error is None else summary(found.error),
    }


async def find_message(source: Source, seen: Seen, queue: str, message_id: str) -> Look[Explanation]:
    """Return what is known about a message.

    Raises:
        NoSuchPage: Neither the store nor its history knows it.
    """
    tasks = task_names(seen.queue(queue))

    async def read() -> Explanation:
        backend = await source.watch.backend()
        return await explain(backend, queue, message_id, source.tasks, source.clock, perhaps=tasks)

    look = await source.watch.looks.look(("message", queue, message_id), read)
    if look.missing:
        raise NoSuchPage(look.problem)
    if look.value is not None and look.value.state is None and not look.value.history:
        raise NoSuchPage(look.value.reasons[0].text)
    return look


async def body(source: Source, request: Request) -> Response:
    """Return the body of a message as a download.

    Raises:
        Forbidden: Its user sees no secrets.
        NoSuchPage: It is not stored.
        BackendError: The store cannot be asked.
    """
    access: Access = request.state.access
    if not access.sees_secrets:
        raise Forbidden("a viewer cannot download bodies")
    queue, message_id = request.path_params["queue"], request.path_params["id"]
    backend = await source.watch.backend()
    perhaps = tuple(task_names((await source.watch.see()).queue(queue)))
    found = await backend.find(queue, [MessageRef(form, perhaps=perhaps) for form in id_forms(message_id)])
    if not found:
        raise NoSuchPage(f"{queue} has no message with this id")
    # The browser must not show it: it could be a page.
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(message_id, safe='')}.bin"}
    return Response(found[0].message.body, headers=headers, media_type="application/octet-stream")


def _task(found: Explanation) -> str | None:
    if found.stored is not None:
        return task_of(found.stored.message)
    return next((event.task for event in reversed(found.history) if event.task), None)


class _Step(msgspec.Struct, frozen=True):
    """One line of a story, with the kind that has a colour. `count` events of the same kind are one line."""

    at: float
    words: str
    kind: str
    error: str | None = None
    count: int = 1


def _story(events: Sequence[Event]) -> list[_Step]:
    """Return the events as lines. A long task is extended many times, which is one line."""
    steps: list[_Step] = []
    for event in events:
        step = _Step(event.at, _words(event), EVENT_COLOURS.get(event.kind, "calm"), event.error)
        if steps and event.kind == "extended" and steps[-1].words == step.words:
            step = msgspec.structs.replace(step, count=steps[-1].count + 1)
            steps.pop()
        steps.append(step)
    return steps


def _words(event: Event) -> str:
    ran = "" if event.duration_s is None else f", ran {duration(event.duration_s)}"
    by = "" if event.kind == "enqueued" else f" by {event.worker}"
    return f"{event.kind}{by}{ran}"


def _facts(stored: StoredMessage) -> list[tuple[str, Any, str]]:
    """Return what the store keeps about a message: a name, the value, and how it is shown."""
    message = stored.message
    facts = [
        ("enqueued", message.enqueued_at or None, "time"),
        ("due", stored.due_at, "time"),
        ("leased by", stored.holder, "text"),
        ("lease expires", stored.expires_at, "time"),
        ("finished", stored.finished_at, "time"),
        ("tries", message.tries, "text"),
        ("priority", message.priority or None, "text"),
        ("unique key", message.unique_key, "text"),
        ("original id", message.original_id, "text"),
        ("deaths in a row", message.deaths or None, "text"),
        ("arguments", " ".join(message.argv) or None if task_of(message) is None else None, "text"),
    ]
    return [fact for fact in facts if fact[1] is not None]
