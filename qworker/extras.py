"""The extras that install optional modules."""

from __future__ import annotations

from qworker.errors import MissingExtra, UsageError

__all__ = ["EXTRAS", "not_installed"]

# The extra of each optional module, by the first part of the module's name.
EXTRAS = {
    "redis": "redis",
    "hiredis": "redis",
    "cronsim": "cron",
    "uvloop": "fast",
    "starlette": "http",
    "h11": "http",
    "opentelemetry": "metrics",
    "textual": "tui",
    "rich": "tui",
    "pyspark": "spark",
    "pyarrow": "spark",
    "pandas": "spark",
    "jinja2": "spark",
    "markupsafe": "spark",
    "itsdangerous": "ui",
    "pytest": "testing",
    "pytest_asyncio": "testing",
}


def not_installed(error: ModuleNotFoundError, needed_for: str) -> UsageError:
    """Return the error for a module that is not installed. Its text says what to install.

    Args:
        error: The error that the import raised.
        needed_for: The feature that needs the module, such as `qworker serve`.
    """
    extra = EXTRAS.get((error.name or "").partition(".")[0])
    if extra is not None:
        return MissingExtra(extra, needed_for)
    return UsageError(f"{needed_for} needs the module {error.name!r}, which is not installed")
