"""Filters of failed messages: as the parameters of a URL, and in words."""

from __future__ import annotations

from datetime import UTC, datetime
from urllib.parse import urlencode

from starlette.datastructures import QueryParams

from qworker.duration import parse_moment
from qworker.errors import UsageError
from qworker.failures.message_filter import MessageFilter

__all__ = ["query_of", "read_filter", "words_of"]


def read_filter(given: QueryParams) -> MessageFilter:
    """Return the filter of the parameters `task`, `error`, `code`, `group`, `since` and `until`.

    Raises:
        UsageError: One is not valid.
    """
    return MessageFilter(
        tasks=_texts(given, "task"),
        error=given.get("error") or None,
        codes=_texts(given, "code"),
        groups=_texts(given, "group"),
        since=_moment(given.get("since")),
        until=_moment(given.get("until")),
    )


def query_of(matching: MessageFilter) -> str:
    """Return the parameters of a filter, from which `read_filter` makes the same one. It always has `until`."""
    pairs: list[tuple[str, str]] = []
    for name, texts in (("task", matching.tasks), ("code", matching.codes), ("group", matching.groups)):
        pairs += [(name, text) for text in texts]
    if matching.error is not None:
        pairs.append(("error", matching.error))
    if matching.since is not None:
        pairs.append(("since", repr(matching.since)))
    pairs.append(("until", "" if matching.until is None else repr(matching.until)))
    return urlencode(pairs)


def words_of(matching: MessageFilter) -> list[str]:
    """Return what a filter chooses, a property for each text. The times are UTC."""
    words: list[str] = []
    for name, texts in (("task", matching.tasks), ("code", matching.codes), ("group", matching.groups)):
        if texts:
            words.append(f"{name} {' or '.join(texts)}")
    if matching.error is not None:
        words.append(f"the error contains “{matching.error}”")
    if matching.since is not None:
        words.append(f"failed at {_time(matching.since)} or later")
    if matching.until is not None:
        words.append(f"failed at {_time(matching.until)} or earlier")
    return words


def _texts(given: QueryParams, name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for text in given.getlist(name) if text))


def _moment(text: str | None) -> float | None:
    if not text:
        return None
    number = _number(text)
    return parse_moment(text) if number is None else number


def _number(text: str) -> float | None:
    """Return Unix seconds. None: it is an age or a date."""
    if "." not in text:
        return None
    try:
        return float(text)
    except ValueError:
        return None


def _time(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        raise UsageError(f"{seconds} is not a time") from None
