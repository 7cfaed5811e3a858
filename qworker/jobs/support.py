"""Whether a store has a place for results, by its URL. It is refused when a task is registered, not at a call."""

from __future__ import annotations

from functools import lru_cache

from qworker.backend.registry import backend_class
from qworker.errors import InvalidURL, MissingExtra, NotSupported
from qworker.url import BackendURL

__all__ = ["refuse_results"]


def refuse_results(url: str, task: str) -> None:
    """Refuse a task that keeps results on a store that has no place for them.

    Args:
        url: The URL of the backend.
        task: The task's name.

    Raises:
        NotSupported: The store has no place for results.
    """
    problem = _problem(url)
    if problem is not None:
        raise NotSupported(f"task {task!r} has result=, but {problem}: use file: or redis:, or leave out result=")


@lru_cache(maxsize=8)
def _problem(url: str) -> str | None:
    try:
        scheme = BackendURL.parse(url).scheme
        deviations = backend_class(scheme).deviations
    except (InvalidURL, MissingExtra):
        # To open the backend raises it.
        return None
    reason = deviations.get("cells")
    return None if reason is None else f"{scheme}: does not support results ({reason})"
