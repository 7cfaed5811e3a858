"""The JSON API of the dashboard: the data of every page, with the same filters."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from qworker.failures.message_filter import CODES
from qworker.history.event import KINDS
from qworker.message import STATE_WORDS
from qworker.ui.api import answers
from qworker.ui.api.endpoint import API, Endpoint, Field, openapi
from qworker.ui.api.exports import csv_response, export_messages
from qworker.ui.api.schemas import (
    ActionList,
    EventPage,
    FoundPlaces,
    GroupMessages,
    MessageDetail,
    MessagePage,
    QueueDetail,
    QueuePage,
    SamplePage,
    ScheduleList,
)
from qworker.ui.pages.failures import FoundFailures
from qworker.ui.pages.message import body
from qworker.ui.pages.queue import RANGES
from qworker.ui.pages.source import Source
from qworker.ui.pages.workers import FoundWorkers
from qworker.ui.paths import root_of

__all__ = ["API", "ENDPOINTS", "answer_request", "describe_api", "json_response"]

_LIMIT = Field("limit", "the largest number of rows", "integer")
_AFTER = Field("after", "continue after an earlier page: its `next`")
_MESSAGES = (
    Field("state", "the state", values=tuple(STATE_WORDS.values())),
    Field("task", "only calls of this task"),
    Field("text", "only messages whose arguments, body or error contain this text, in any case"),
    Field("error", "only failed messages whose error contains this text, in any case"),
    Field("code", "only messages that failed for this reason", values=CODES),
    Field("group", "only failed messages of this group"),
    Field("since", "only messages that finished since then: an age such as 2h, or a time"),
    Field("until", "only messages that finished until then"),
)
_ORDER = Field("order", "`newest`: the last message first", values=("newest",))
_RANGE = Field("range", "how far back", values=tuple(RANGES))
_EVENTS = (
    Field("queue", "only events of this queue"),
    Field("id", "only events of the message with this id"),
    Field("task", "only events of calls of this task"),
    Field("event", "only events of this kind. Without it, all but `extended`", values=KINDS),
    Field("worker", "only events of workers whose name contains this text"),
    Field("error", "only events whose error contains this text, in any case"),
    Field("since", "only events since then: an age such as 2h, or a time"),
    Field("until", "only events until then"),
    Field("cursor", "continue an earlier search with the same filter: its `next`"),
)

ENDPOINTS = (
    Endpoint(
        path="/queues",
        summary="The queues by name, with their numbers.",
        answer=answers.queues,
        type=QueuePage,
        fields=(Field("name", "a part of the names"), _LIMIT, _AFTER),
        rows="queues",
    ),
    Endpoint(
        path="/queues/{queue}",
        summary="One queue and its tasks.",
        answer=answers.queue,
        type=QueueDetail,
        rows="tasks",
    ),
    Endpoint(
        path="/queues/{queue}/samples",
        summary="What was sampled of a queue.",
        answer=answers.samples,
        type=SamplePage,
        fields=(_RANGE,),
        rows="samples",
    ),
    Endpoint(
        path="/queues/{queue}/messages",
        summary="Messages of one state. A search has a budget of 2 s or 20,000 messages, and `next` continues it.",
        answer=answers.messages,
        type=MessagePage,
        fields=(*_MESSAGES, _ORDER, _LIMIT, _AFTER),
        rows="messages",
    ),
    Endpoint(
        path="/queues/{queue}/messages/{id}",
        summary="All that is known about a message.",
        answer=answers.message,
        type=MessageDetail,
        rows="history",
    ),
    Endpoint(
        path="/queues/{queue}/messages/{id}/body",
        summary="The body of a message. Viewers are refused.",
        answer=body,
    ),
    Endpoint(
        path="/queues/{queue}/export",
        summary="The messages of one state as JSON lines, in any order: `limit`, or 10,000.",
        answer=export_messages,
        fields=(*_MESSAGES, _LIMIT),
    ),
    Endpoint(
        path="/find",
        summary="The queues that have a message.",
        answer=answers.find,
        type=FoundPlaces,
        fields=(Field("id", "the id"),),
        rows="places",
    ),
    Endpoint(
        path="/failures",
        summary="The groups of failed messages of all queues.",
        answer=answers.failures,
        type=FoundFailures,
        rows="groups",
    ),
    Endpoint(
        path="/failures/{queue}/{key}",
        summary="The newest messages of a group in a queue.",
        answer=answers.group,
        type=GroupMessages,
        rows="messages",
    ),
    Endpoint(
        path="/schedules",
        summary="The schedules.",
        answer=answers.schedules,
        type=ScheduleList,
        rows="schedules",
    ),
    Endpoint(
        path="/workers",
        summary="The workers, and the messages that they hold.",
        answer=answers.workers,
        type=FoundWorkers,
        rows="workers",
    ),
    Endpoint(
        path="/activity",
        summary="Events of the history, the newest first. A search has a budget of 2 s, and `next` continues it.",
        answer=answers.activity,
        type=EventPage,
        fields=(*_EVENTS, _LIMIT),
        rows="events",
    ),
    Endpoint(
        path="/actions",
        summary="What people did with the dashboard, the newest first.",
        answer=answers.actions,
        type=ActionList,
        fields=(Field("queue", "only actions in this queue"),),
        rows="actions",
    ),
)


async def answer_request(source: Source, one: Endpoint, request: Request) -> Response:
    """Answer a request to an endpoint."""
    answer = await one.answer(source, request)
    if isinstance(answer, Response):
        return answer
    if one.rows and request.query_params.get("format") == "csv":
        return csv_response(getattr(answer, one.rows), one.rows)
    return json_response(answer)


async def describe_api(request: Request) -> Response:
    """Return the OpenAPI document."""
    return json_response(openapi(ENDPOINTS, root_of(request.scope)))


def json_response(value: Any, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """Return a value as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
