"""What options of tasks need of a store, by its URL. It is refused when a task is registered, not at a call."""

from __future__ import annotations

from functools import lru_cache

from qworker.backend.offers import deviations_at
from qworker.definition.task_options import NeedyOption
from qworker.errors import InvalidURL, MissingExtra, NotSupported
from qworker.url import BackendURL

__all__ = ["refuse"]

# By option: the deviation of the stores that cannot have it, what they do not support, and how to do without.
_NEEDS: dict[NeedyOption, tuple[str, str, str]] = {
    "result=": ("cells", "results", "leave out result="),
    "unique=": ("unique_key", "unique keys", "leave out unique="),
    "unique=Unique(again=...)": ("unique_replace", "that a waiting call is replaced", 'use again="keep"'),
    'unique=Unique(scope="app")': ("unique_app", "unique keys across queues", 'use scope="queue"'),
    "max_tries=None": ("deaths", "unlimited tries", "give max_tries a number"),
}


def refuse(url: str, task: str, option: NeedyOption) -> None:
    """Refuse an option on a store that does not support it.

    Args:
        url: The URL of the backend.
        task: The task's name.
        option: The option.

    Raises:
        NotSupported: The store does not support it.
    """
    problem = _problem(url, option)
    if problem is not None:
        raise NotSupported(f"task {task!r} has {option}, but {problem}: use file: or redis:, or {_NEEDS[option][2]}")


@lru_cache(maxsize=8)
def _problem(url: str, option: NeedyOption) -> str | None:
    try:
        parsed = BackendURL.parse(url)
        deviations = deviations_at(parsed)
    except (InvalidURL, MissingExtra):
        # To open the backend raises it.
        return None
    deviation, what, _ = _NEEDS[option]
    reason = deviations.get(deviation)
    return None if reason is None else f"{parsed.scheme}: does not support {what} ({reason})"
