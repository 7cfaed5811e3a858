"""What the table of the API consists of, and the OpenAPI document that is made of it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from qworker import __version__
from qworker.ui.api.schemas import Error
from qworker.ui.pages.source import Source

__all__ = ["API", "Endpoint", "Field", "openapi"]

# The path of the API below that of the dashboard.
API = "/api/v1"
_REF = "#/components/schemas/{name}"


class Field(msgspec.Struct, frozen=True):
    """A field of the query.

    Attributes:
        name: Its name.
        text: What it does, as a sentence without its period.
        kind: Its JSON type.
        values: The values that it can have. Empty: any.
    """

    name: str
    text: str
    kind: str = "string"
    values: Sequence[str] = ()


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of answer.

    Attributes:
        path: Its path below `API`, as Starlette writes it.
        summary: What it answers.
        answer: Returns the answer: a value of the type, or a whole response.
        type: The type of the answer. None: `answer` returns responses.
        fields: The fields of its query.
        rows: The part of the answer that is a table, and can be had as CSV. Empty: none is.
    """

    path: str
    summary: str
    answer: Callable[[Source, Request], Awaitable[Any]]
    type: Any = None
    fields: Sequence[Field] = ()
    rows: str = ""


_FORMAT = Field("format", "`csv`: the rows as a table, for a spreadsheet", values=("json", "csv"))


def openapi(endpoints: Sequence[Endpoint], root: str) -> dict[str, Any]:
    """Return the OpenAPI document.

    Args:
        endpoints: The endpoints.
        root: The path at which the dashboard is served.
    """
    types = [Error, *(one.type for one in endpoints if one.type is not None)]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = dict(zip(types, schemas, strict=True))
    return {
        "openapi": "3.1.0",
        "info": {"title": "qworker dashboard", "version": __version__},
        "servers": [{"url": f"{root}{API}"}],
        "paths": {one.path: {"get": _operation(one, by_type)} for one in endpoints},
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _operation(one: Endpoint, schemas: dict[Any, Any]) -> dict[str, Any]:
    fields = (*one.fields, _FORMAT) if one.rows else one.fields
    answer: dict[str, Any] = {"description": one.summary}
    if one.type is not None:
        answer["content"] = {"application/json": {"schema": schemas[one.type]}}
    failed = {"description": "why it has failed", "content": {"application/json": {"schema": schemas[Error]}}}
    names = re.findall(r"{(\w+)}", one.path)
    return {
        "summary": one.summary,
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names),
            *(_parameter(field) for field in fields),
        ],
        "responses": {"200": answer, "default": failed},
    }


def _parameter(field: Field) -> dict[str, Any]:
    schema = {"type": field.kind, "enum": list(field.values)} if field.values else {"type": field.kind}
    return {"name": field.name, "in": "query", "description": field.text, "schema": schema}
