"""Where a setting comes from: the call or command line first, then `QWORKER_<NAME>`, then `[tool.qworker]` of pyproject.toml."""

from __future__ import annotations

import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, cast

from qworker.errors import UsageError

__all__ = ["backend_url", "file_settings", "setting"]


@cache
def _read(path: str, _stamp: int) -> dict[str, Any]:
    with open(path, "rb") as file:
        try:
            table: object = tomllib.load(file).get("tool", {}).get("qworker", {})
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{path} is not valid TOML: {error}") from error
    if not isinstance(table, dict):
        raise UsageError(f"{path}: [tool.qworker] is a table")
    return cast("dict[str, Any]", table)


def file_settings() -> dict[str, Any]:
    """`[tool.qworker]` of the pyproject.toml in the working directory or the nearest one above it; empty without one.

    Raises:
        UsageError: the file is not TOML.
    """
    here = Path.cwd()
    for folder in (here, *here.parents):
        path = folder / "pyproject.toml"
        if path.is_file():
            return _read(str(path), path.stat().st_mtime_ns)
    return {}


def setting(name: str) -> str | None:
    """A setting from the environment or the file; None where neither has it."""
    from_environment = os.environ.get(f"QWORKER_{name.upper().replace('-', '_')}")
    if from_environment is not None:
        return from_environment
    value = file_settings().get(name.replace("-", "_"), file_settings().get(name))
    return None if value is None else str(value)


def backend_url(given: str | None) -> str:
    """The backend URL to use.

    Raises:
        UsageError: nobody gave one.
    """
    url = given or setting("url")
    if not url:
        raise UsageError('no backend URL: write Tasks("file://./spool"), or set QWORKER_URL, or url in [tool.qworker]')
    return url
