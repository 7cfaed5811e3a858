"""Settings from the environment and from pyproject.toml.

The call or the command line has precedence over `QWORKER_<NAME>`, and the variable over `[tool.qworker]` in the file.
"""

from __future__ import annotations

import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, cast

from qworker.errors import UsageError
from qworker.url import BackendURL

__all__ = ["backend_url", "file_settings", "setting", "settings_path"]

_FILE = "pyproject.toml"


def settings_path() -> str | None:
    """Return the path of the nearest pyproject.toml, in the working directory or above it.

    None: there is no such file, or the working directory was deleted.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:
        return None
    return next((path for folder in (here, *here.parents) if os.path.isfile(path := str(folder / _FILE))), None)


def file_settings() -> dict[str, Any]:
    """Return `[tool.qworker]` from the file at `settings_path`, or an empty dictionary.

    A relative directory in `url` becomes absolute.

    Raises:
        UsageError: The file cannot be read, or is not valid TOML.
    """
    path = settings_path()
    if path is None:
        return {}
    try:
        return _read(path, os.stat(path).st_mtime_ns)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


@cache
def _read(path: str, _stamp: int) -> dict[str, Any]:
    with open(path, "rb") as file:
        try:
            settings = tomllib.load(file)
        except ValueError as error:
            raise UsageError(f"{path} is not valid TOML: {error}") from error
    for name in ("tool", "qworker"):
        table: object = settings.get(name, {})
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {name!r} must be a table (got {table!r})")
        settings = cast("dict[str, Any]", table)
    if "url" not in settings:
        return settings
    url: object = settings["url"]
    if not isinstance(url, str):
        raise UsageError(f"{path}: url must be text (got {url!r})")
    return {**settings, "url": BackendURL.parse(url).anchored(Path(path).parent)}


def setting(name: str) -> str | None:
    """Return a setting from the environment or the file, or None if neither has it."""
    from_environment = os.environ.get(f"QWORKER_{name.upper().replace('-', '_')}")
    if from_environment is not None:
        return from_environment
    value = file_settings().get(name.replace("-", "_"), file_settings().get(name))
    return None if value is None else str(value)


def backend_url(given: str | None) -> str:
    """Return the backend URL to use.

    Raises:
        UsageError: No URL is set.
    """
    url = given or setting("url")
    if not url:
        raise UsageError(
            'no backend URL is set: pass one to Tasks("file://./spool"), set tasks.url before the first call, set'
            " QWORKER_URL, or set url in [tool.qworker]"
        )
    return url
