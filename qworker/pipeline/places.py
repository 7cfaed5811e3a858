"""Places as every process of a job understands them: Spark's workers have working directories of their own."""

from __future__ import annotations

import os
from pathlib import Path

from qworker.url import BackendURL, working_directory

__all__ = ["absolute_path", "absolute_url"]


def absolute_url(url: str) -> str:
    """A backend's URL; that of a directory with its whole path.

    Raises:
        InvalidURL: it cannot be understood.
    """
    parsed = BackendURL.parse(url)
    return parsed.anchored(Path(working_directory())) if parsed.is_relative else url


def absolute_path(path: str) -> str:
    """A path for Spark: of this machine's file system, or of a shared one that is mounted here, where it names no other."""
    return path if "://" in path else f"file://{os.path.normpath(os.path.join(working_directory(), path))}"
