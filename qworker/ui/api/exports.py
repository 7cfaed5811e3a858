"""Exports: lists as CSV, and the messages of a queue as JSON lines."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from qworker.asgi.interface import get_number
from qworker.failures.bulk import browse_matching
from qworker.ui.access import Access
from qworker.ui.pages.lists import ListQuery
from qworker.ui.pages.source import Source, known_queue
from qworker.ui.text import text_json_of

__all__ = ["csv_response", "export_messages"]

# The messages of one export: by default, and at most.
_USUAL, _MOST = 10_000, 1_000_000
# What a spreadsheet takes as the beginning of a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_response(rows: Sequence[Any], name: str) -> Response:
    """Return a table as a download. The fields of a value in a field have its name before theirs.

    Args:
        rows: Structs or mappings with text as keys.
        name: The name of the file, without its ending.
    """
    flat = [_flat(cast("Mapping[str, Any]", msgspec.to_builtins(row))) for row in rows]
    columns = list(dict.fromkeys(column for row in flat for column in row))
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow([_cell(column) for column in columns])
    table.writerows([_cell(row.get(column)) for column in columns] for row in flat)
    headers = {"content-disposition": f'attachment; filename="{name}.csv"'}
    return Response(text.getvalue(), headers=headers, media_type="text/csv; charset=utf-8")


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict) and value:
            found |= _flat(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _cell(value: object) -> str:
    """Return a value as text that a spreadsheet does not run."""
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA) else value
    if value is None:
        return ""
    return msgspec.json.encode(value).decode()


async def export_messages(source: Source, request: Request) -> Response:
    """Return the messages of one state as JSON lines, in any order. With a filter, only those that match."""
    asked, access = request.query_params, request.state.access
    wanted = ListQuery.of(asked)
    limit = int(get_number(dict(asked), "limit", _USUAL, least=1, most=_MOST))
    one = known_queue(await source.watch.see(), request.path_params["queue"])
    lines = _lines(source, one.queue, wanted, access, limit)
    headers = {"content-disposition": f'attachment; filename="{wanted.state.word}.jsonl"'}
    return StreamingResponse(lines, headers=headers, media_type="application/x-ndjson")


async def _lines(source: Source, queue: str, wanted: ListQuery, access: Access, limit: int) -> AsyncGenerator[bytes]:
    masked, left = not access.sees_secrets, limit
    async with source.scans.next(access.name):
        backend = await source.watch.backend()
        async with aclosing(browse_matching(backend, queue, wanted.state, wanted.matching)) as pages:
            async for page in pages:
                found = [stored for stored in page if wanted.matches(stored, masked=masked)][:left]
                if found:
                    yield b"".join(msgspec.json.encode(text_json_of(stored, masked=masked)) + b"\n" for stored in found)
                left -= len(found)
                if not left:
                    return
