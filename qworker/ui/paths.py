"""The paths of pages, below the path at which the dashboard is served."""

from __future__ import annotations

from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette._utils import get_route_path
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

__all__ = ["page_of", "path_of", "redirect", "root_of"]


# The links of a page are those of the one before.
_quoted = lru_cache(4096)(partial(quote, safe=""))


def root_of(scope: Any) -> str:
    """Return the path at which the dashboard is served, without a slash at its end."""
    root: str = scope.get("root_path", "")
    return quote(root.rstrip("/"))


def path_of(scope: Any, *parts: str, **query: str | int | None) -> str:
    """Return the path of a page. What is empty in its query is left out."""
    given = {name: value for name, value in query.items() if value not in {None, "", 0}}
    path = f"{root_of(scope)}/{'/'.join(map(_quoted, parts))}"
    return f"{path}?{urlencode(given)}" if given else path


def page_of(request: Request) -> str:
    """Return the path and the query of a page below that of the dashboard, without a notice."""
    query = [pair for pair in parse_qsl(request.url.query) if pair[0] != "notice"]
    path = quote(get_route_path(request.scope))
    return f"{path}?{urlencode(query)}" if query else path


def redirect(request: Request, page: str, query: str = "") -> Response:
    """Return the answer that leads to another page, whose path is below that of the dashboard."""
    return RedirectResponse(f"{root_of(request.scope)}{page}{query and f'?{query}'}", HTTPStatus.SEE_OTHER)
