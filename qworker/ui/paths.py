"""Paths of the dashboard, wherever it is mounted."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from urllib.parse import parse_qsl, quote, urlencode

from starlette._utils import get_route_path
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from qworker.asgi.interface import Scope

__all__ = ["join_path", "page_of", "redirect", "root_of"]


def root_of(scope: Scope) -> str:
    """Return the path below which the dashboard is mounted."""
    root: str = scope.get("root_path", "")
    return quote(root.rstrip("/"))


def join_path(parts: Sequence[str]) -> str:
    """Return the path of a page, whose parts can be any texts."""
    return "/" + "/".join(quote(part, safe="") for part in parts)


def page_of(request: Request) -> str:
    """Return the path and the query of a page, without a notice."""
    query = [pair for pair in parse_qsl(request.url.query) if pair[0] != "notice"]
    path = quote(get_route_path(request.scope))
    return f"{path}?{urlencode(query)}" if query else path


def redirect(request: Request, path: str, query: str = "") -> Response:
    """Return the answer that leads to another page of the dashboard."""
    return RedirectResponse(f"{root_of(request.scope)}{path}{query and f'?{query}'}", HTTPStatus.SEE_OTHER)
