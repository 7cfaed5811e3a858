"""Requests to a health port, for exec probes and for users."""

from __future__ import annotations

import http.client
import os
from urllib.parse import urlsplit

from qworker.asgi.access import TOKEN
from qworker.errors import UsageError
from qworker.health.address import loopback_for, parse_address

__all__ = ["fetch_page"]

_MOST_BYTES = 16 << 20
_PROBES = {"/livez", "/readyz"}


def fetch_page(where: str, path: str, timeout: float) -> tuple[int, str]:
    """Request a page.

    Args:
        where: HOST:PORT, or an http URL. The path of the URL has precedence over `path`.
        path: `/livez`, `/readyz`, `/stats` or `/metrics`.
        timeout: Seconds to wait for the connection, and for each part of the response.

    Returns:
        The HTTP status and the body. Without a response: 0 and the reason.

    Raises:
        UsageError: `where` is not a valid address.
    """
    if "://" in where:
        url = urlsplit(where)
        if url.scheme != "http" or not url.netloc or "@" in url.netloc:
            raise UsageError(f"{where!r} is not a valid health address: write HOST:PORT or http://HOST:PORT/livez")
        where, path = url.netloc, url.path.rstrip("/") or path
    host, port = parse_address(where)
    # The token is sent only to the pages that need it.
    headers = {} if path in _PROBES else _authorization()
    connection = http.client.HTTPConnection(loopback_for(host), port, timeout=timeout)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read(_MOST_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, f"{host}:{port} does not answer: {error}"
    finally:
        connection.close()


def _authorization() -> dict[str, str]:
    token = os.environ.get(TOKEN)
    return {"Authorization": f"Bearer {token}"} if token else {}
