"""The OpenAPI document, built from the tables below and the types of requests and responses."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from qworker import __version__
from qworker.history.batch import EventBatch
from qworker.history.event import Event
from qworker.message import Draft, QueueStats, Selection, State, StoredMessage
from qworker.server.schemas import (
    ACTIONS,
    ExtendRequest,
    ExtendResponse,
    HistoryPage,
    HistoryPosition,
    IdsRequest,
    LeaseGrant,
    SettleRequest,
    WaitRequest,
)

__all__ = ["document"]

_REF = "#/components/schemas/{name}"
_CONTENT = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    schemas = msgspec.json.schema_components(
        [
            Draft,
            Event,
            EventBatch,
            ExtendResponse,
            ExtendRequest,
            LeaseGrant,
            IdsRequest,
            SettleRequest,
            HistoryPage,
            QueueStats,
            Selection,
            StoredMessage,
            HistoryPosition,
            WaitRequest,
        ],
        ref_template=_REF,
    )[1]
    schemas["State"]["enum"] = sorted(state.word for state in State)
    return {
        "openapi": "3.1.0",
        "info": {"title": "qworker", "version": __version__, "description": "mq's endpoints, and additions under /-/."},
        "paths": {**_mq(), **_store(), **_messages(), **_queues()},
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _mq() -> dict[str, Any]:
    post = _operation(
        "publish a message",
        {201: "stored durably", 400: "the body cannot be read", 413: "too large", 503: "may not be stored: try again"},
        parameters=[_header("Idempotency-Key", "string")],
        body=_CONTENT,
    )
    get = _operation(
        "fetch a message",
        {
            200: "the body, with X-Message-Id, X-Lease-Token, X-Lease-Expires and X-Message-Tries",
            204: "no message is ready",
        },
        parameters=[_query("wait"), _query("visibility_timeout")],
    )
    get["responses"]["200"]["content"] = _CONTENT
    delete = _operation(
        "delete a message",
        {202: "deleted, or it did not exist", 409: "the lease of X-Lease-Token is lost"},
        parameters=[_header("X-Lease-Token", "integer")],
    )
    queue = {
        "get": _operation("check that a queue exists", {200: "it exists", 404: "it does not exist"}),
        "put": _operation("create a queue", {201: "it exists"}),
        "delete": _operation("delete a queue and its messages", {200: "deleted"}),
    }
    return {
        "/{queue}": {"parameters": [_path("queue")], **queue},
        "/{queue}/messages": {"parameters": [_path("queue")], "post": post, "get": get},
        "/{queue}/messages/{id}": {"parameters": [_path("queue"), _path("id")], "delete": delete},
    }


def _store() -> dict[str, Any]:
    return {
        "/-/about": {"get": _json("show the version and the backend's properties", {"type": "object"})},
        "/-/queues": {"get": _json("list the queues", _array("string"))},
        "/-/stats": {"get": _json("count the messages of all queues", _list("QueueStats"))},
        "/-/settle": {
            "post": _json(
                "settle leases, and return the positions of the refused ones in the request",
                _array("integer"),
                takes=_list("SettleRequest"),
            )
        },
        "/-/extend": {"post": _json("extend leases", _ref("ExtendResponse"), takes=_ref("ExtendRequest"))},
        "/-/wait": {
            "post": _operation(
                "wait for a message", {204: "a queue may have a message"}, body=_body(_ref("WaitRequest"))
            )
        },
        "/-/-history": {
            "get": _json("list the logs of the history", _array("string")),
            "post": _operation("record events", {202: "recorded"}, body=_body(_list("EventBatch"))),
        },
        "/-/-history/{log}": {
            "parameters": [_path("log")],
            "get": _json("read a log, starting at `after`", _ref("HistoryPage")),
        },
        "/-/-history/{log}/forget": {
            "parameters": [_path("log")],
            "post": _operation(
                "allow the deletion of events before a position", {204: "done"}, body=_body(_ref("HistoryPosition"))
            ),
        },
    }


def _messages() -> dict[str, Any]:
    token = _header("X-Lease-Token", "integer", required=True)
    message = [_path("queue"), _path("id")]
    lost = {409: "the lease is lost"}
    return {
        "/-/{queue}/messages/{id}/history": {
            "parameters": message,
            "get": _json("list the events of a message", _list("Event")),
        },
        "/-/{queue}/messages/{id}": {
            "parameters": message,
            "get": _json("find a message", _ref("StoredMessage")),
            "patch": _operation(
                "extend a lease", {200: "X-Lease-Expires", **lost}, parameters=[token, _query("visibility_timeout")]
            ),
        },
        "/-/{queue}/messages/{id}/{action}": {
            "parameters": [*message, _path("action", list(ACTIONS))],
            "post": _operation("settle a lease", {202: "settled", **lost}, parameters=[token]),
        },
    }


def _queues() -> dict[str, Any]:
    number = {"type": "integer"}
    operations: dict[str, dict[str, Any]] = {
        "publish": {"post": _json("publish drafts with bodies in base64", _array("string"), takes=_list("Draft"))},
        "lease": {"post": _json("lease messages, with bodies in base64", _list("LeaseGrant"))},
        "find": {"post": _json("find messages by their ids", _list("StoredMessage"), takes=_ref("IdsRequest"))},
        "requeue": {
            "post": _json("make failed messages ready again, by ids or all of them", number, takes=_ref("Selection"))
        },
        "remove": {"post": _json("delete messages, by ids or all in a state", number, takes=_ref("Selection"))},
        "reap": {"post": _json("make expired and due messages ready", number)},
        "stats": {"get": _json("count the messages of a queue", _ref("QueueStats"))},
        "browse": {"get": _json("list messages. The header X-More: more can follow", _list("StoredMessage"))},
        **{name: {"post": _operation(f"{name} a queue", {204: "done"})} for name in ("pause", "resume")},
    }
    paths = {f"/-/{{queue}}/{name}": {"parameters": [_path("queue")], **one} for name, one in operations.items()}
    paths["/-/{queue}/browse"]["parameters"] += [
        _parameter("state", {"type": "string", "enum": [state.word for state in State]}, "ready if it is not given"),
        _parameter("limit", number, "1 to 1000; 100 if it is not given"),
        _parameter("after", {"type": "string"}, "the position of a message: list those that follow it"),
        _parameter("newest", {"type": "integer", "enum": [0, 1]}, "1 reverses the order"),
    ]
    return paths


def _operation(
    summary: str,
    answers: dict[int, str],
    *,
    parameters: list[dict[str, Any]] | None = None,
    body: dict[str, Any] | None = None,
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {str(status): {"description": text} for status, text in answers.items()},
    }
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {"content": body, "required": True}
    return operation


def _json(summary: str, schema: dict[str, Any], *, takes: dict[str, Any] | None = None) -> dict[str, Any]:
    operation = _operation(summary, {200: summary}, body=None if takes is None else _body(takes))
    operation["responses"]["200"]["content"] = _body(schema)
    return operation


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": _REF.format(name=name)}


def _list(name: str) -> dict[str, Any]:
    return {"type": "array", "items": _ref(name)}


def _array(kind: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": kind}}


def _path(name: str, choices: list[str] | None = None) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if choices is not None:
        schema["enum"] = choices
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _query(name: str) -> dict[str, Any]:
    return _parameter(name, {"type": "number"}, "seconds")


def _parameter(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _header(name: str, kind: str, *, required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": required, "schema": {"type": kind}}
