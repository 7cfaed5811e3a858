"""Absolute paths and URLs, because Spark's workers have other working directories."""

from __future__ import annotations

import os
from pathlib import Path

from qworker.url import BackendURL, working_directory

__all__ = ["absolute_path", "absolute_url"]


def absolute_url(url: str) -> str:
    """Make the directory of a backend's URL absolute.

    Raises:
        InvalidURL: The URL is not valid.
    """
    parsed = BackendURL.parse(url)
    return parsed.anchored(Path(working_directory())) if parsed.is_relative else url


def absolute_path(path: str) -> str:
    """Make a path absolute for Spark. Without a scheme it is a path on this machine."""
    return path if "://" in path else f"file://{os.path.normpath(os.path.join(working_directory(), path))}"
