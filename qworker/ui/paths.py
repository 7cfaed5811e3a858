"""The paths of pages, below the path at which the dashboard is served."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

__all__ = ["path_of", "root_of"]


def root_of(scope: Any) -> str:
    """Return the path at which the dashboard is served, without a slash at its end."""
    root: str = scope.get("root_path", "")
    return quote(root.rstrip("/"))


def path_of(scope: Any, *parts: str, **query: str | int | None) -> str:
    """Return the path of a page. What is empty in its query is left out."""
    given = {name: value for name, value in query.items() if value not in {None, "", 0}}
    path = f"{root_of(scope)}/{'/'.join(quote(part, safe='') for part in parts)}"
    return f"{path}?{urlencode(given)}" if given else path
