"""Which extra brings a module that is not installed."""

from __future__ import annotations

from qworker.errors import MissingExtra, UsageError

__all__ = ["EXTRAS", "not_installed"]

# By the first part of a module's name. Only what is imported late: the rest is always there.
EXTRAS = {
    "redis": "redis",
    "hiredis": "redis",
    "uvloop": "fast",
    "starlette": "http",
    "uvicorn": "http",
    "httptools": "http",
    "h11": "http",
    "jinja2": "http",
    "prometheus_client": "metrics",
    "opentelemetry": "metrics",
    "textual": "tui",
    "rich": "tui",
    "pyspark": "spark",
    "pyarrow": "spark",
    "pandas": "spark",
}


def not_installed(error: ModuleNotFoundError, needed_for: str) -> UsageError:
    """What to raise for a module that is not installed: one line that says what to install.

    Args:
        error: what the import raised.
        needed_for: what cannot be used without it, such as `qworker serve`.
    """
    extra = EXTRAS.get((error.name or "").partition(".")[0])
    if extra is not None:
        return MissingExtra(extra, needed_for)
    return UsageError(f"{needed_for} needs the module {error.name!r}, which is not installed")
