"""The files that pages load. Their names in URLs have a digest, so that browsers keep them without a limit."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from qworker.charts import page_style
from qworker.ui.paths import path_of

__all__ = ["ASSET_PATH", "asset_path", "serve_asset"]

ASSET_PATH = "/static/{digest}/{name}"
_TYPES = {
    "ui.css": "text/css; charset=utf-8",
    "ui.js": "text/javascript; charset=utf-8",
    "idiomorph.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


def asset_path(scope: Any, name: str) -> str:
    """Return the path of a file."""
    return path_of(scope, "static", _digest(name), name)


async def serve_asset(request: Request) -> Response:
    """Answer a request for a file."""
    name = request.path_params["name"]
    if name not in _TYPES or request.path_params["digest"] != _digest(name):
        return Response("Not Found", HTTPStatus.NOT_FOUND)
    headers = {"cache-control": "public, max-age=31536000, immutable", "vary": "accept-encoding"}
    # Pages are never compressed: the length of one that has a token and foreign text would tell about the token.
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(_asset(name), headers=headers, media_type=_TYPES[name])
    return Response(_compressed(name), headers=headers | {"content-encoding": "gzip"}, media_type=_TYPES[name])


@cache
def _asset(name: str) -> bytes:
    own = files("qworker.ui").joinpath("static", name).read_bytes()
    return page_style().encode() + own if name == "ui.css" else own


@cache
def _compressed(name: str) -> bytes:
    return gzip.compress(_asset(name), mtime=0)


@cache
def _digest(name: str) -> str:
    return hashlib.blake2b(_asset(name), digest_size=8).hexdigest()
