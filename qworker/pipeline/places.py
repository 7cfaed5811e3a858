"""Places as every process of a job understands them: Spark's workers have working directories of their own."""

from __future__ import annotations

import os
from urllib.parse import quote

from qworker.url import BackendURL

__all__ = ["absolute_path", "absolute_url"]


def absolute_url(url: str) -> str:
    """A backend's URL; that of a directory with its whole path.

    Raises:
        BadURL: it cannot be understood.
    """
    parsed = BackendURL.parse(url)
    relative = parsed.authority in {".", ".."} or (not parsed.authority and parsed.path and parsed.path[0] != "/")
    if not relative:
        return url
    query = url.partition("?")[1] + url.partition("?")[2]
    return f"{parsed.scheme}://{quote(str(parsed.directory))}{query}"


def absolute_path(path: str) -> str:
    """A path for Spark: of this machine's file system, or of a shared one that is mounted here, where it names no other."""
    return path if "://" in path else f"file://{os.path.abspath(path)}"
