"""Asking a health port, for exec probes and people."""

from __future__ import annotations

import http.client
import os
from urllib.parse import urlsplit

from qworker.errors import UsageError
from qworker.health.address import loopback_for, parse_address
from qworker.health.endpoint import TOKEN

__all__ = ["fetch_page"]

_MOST_BYTES = 16 << 20
_PROBES = {"/livez", "/readyz"}


def fetch_page(where: str, path: str, timeout: float) -> tuple[int, str]:
    """Ask for a page.

    Args:
        where: HOST:PORT, or an http URL; its path, if it has one, wins over `path`.
        path: `/livez`, `/readyz`, `/stats` or `/metrics`.
        timeout: Seconds to connect, and between two parts of the answer.

    Returns:
        The HTTP status, or 0 when nobody answered; and what was said, or why nobody did.

    Raises:
        UsageError: `where` is no address.
    """
    if "://" in where:
        url = urlsplit(where)
        if url.scheme != "http" or not url.netloc or "@" in url.netloc:
            raise UsageError(f"{where!r} is not a valid health address: write HOST:PORT or http://HOST:PORT/livez")
        where, path = url.netloc, url.path.rstrip("/") or path
    host, port = parse_address(where)
    # The token goes only where it is asked for.
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
