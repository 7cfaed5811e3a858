"""The retention of finished messages: `keep_done=none|all|AGE|N-messages`, and `keep_failed=` with the same values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from qworker.duration import format_duration, parse_duration
from qworker.errors import InvalidURL, UsageError
from qworker.url import BackendURL

__all__ = ["KEEP_ALL", "KEEP_NONE", "KEEP_OPTIONS", "RetentionPolicy", "keep_done", "keep_failed"]

T = TypeVar("T")

# The options of a URL about finished messages, for `BackendURL.only`.
KEEP_OPTIONS = frozenset({"keep_done", "keep_failed"})

_COUNT = re.compile(r"([1-9][0-9]{0,11})-messages")


class RetentionPolicy(msgspec.Struct, frozen=True):
    """Which finished messages of one state are kept.

    Attributes:
        keep: Whether a message is kept when it finishes.
        age: Seconds after which a kept message is removed; None: never.
        count: How many of the newest messages are kept; None: any number.
    """

    keep: bool = True
    age: float | None = None
    count: int | None = None

    @property
    def limits(self) -> bool:
        """True if kept messages are removed later. A store checks for these from time to time, when it reaps."""
        return self.age is not None or self.count is not None

    def __str__(self) -> str:
        if not self.keep:
            return "none"
        if self.count is not None:
            return f"{self.count}-messages"
        return "all" if self.age is None else format_duration(self.age)

    def describe(self) -> str:
        """Return it as text for people."""
        if not self.keep:
            return "not kept"
        if self.count is not None:
            return f"the newest {self.count} are kept" if self.count > 1 else "the newest one is kept"
        return "kept" if self.age is None else f"kept for {format_duration(self.age)}"

    def choose_old(self, finished: Sequence[tuple[float, T]], now: float) -> list[T]:
        """Choose the messages whose retention has ended.

        Args:
            finished: When each message finished, in Unix seconds, and the message; the oldest first.
            now: Unix seconds.
        """
        if self.age is not None:
            return [one for at, one in finished if at <= now - self.age]
        kept = len(finished) if self.count is None else self.count
        return [one for _, one in finished[: max(0, len(finished) - kept)]]


KEEP_ALL = RetentionPolicy()
KEEP_NONE = RetentionPolicy(keep=False)


def keep_done(url: BackendURL, default: RetentionPolicy = KEEP_NONE) -> RetentionPolicy:
    """Read the option `keep_done`. With `none` acked messages are removed when they are acked.

    Raises:
        InvalidURL: It is not one of the four forms.
    """
    return _read(url, "keep_done", default)


def keep_failed(url: BackendURL) -> RetentionPolicy:
    """Read the option `keep_failed`, whose default is `all`.

    With `none` failed messages are removed when the store reaps.

    Raises:
        InvalidURL: It is not one of the four forms.
    """
    found = _read(url, "keep_failed", KEEP_ALL)
    return found if found.keep else RetentionPolicy(keep=False, age=0.0)


def _read(url: BackendURL, name: str, default: RetentionPolicy) -> RetentionPolicy:
    text = url.options.get(name)
    if text is None:
        return default
    if text in {"none", "all"}:
        return KEEP_ALL if text == "all" else KEEP_NONE
    count = _COUNT.fullmatch(text)
    if count is not None:
        return RetentionPolicy(count=int(count[1]))
    try:
        # A bare number is refused: other releases read it as a switch, or as a number of messages.
        age = 0.0 if text[-1:].isdigit() else parse_duration(text)
    except UsageError:
        age = 0.0
    if not age:
        raise InvalidURL(
            f"{url.masked}: {name}={text} is not valid: use none, all, an age such as 7d,"
            " or a number of messages such as 1000-messages"
        )
    return RetentionPolicy(age=age)
