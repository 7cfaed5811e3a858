"""The filter that commands, dashboards and apps share."""

from __future__ import annotations

from typing import get_args

import msgspec

from qworker.errors import UsageError
from qworker.failure_text import FailureCode, code_of
from qworker.failures.groups import group_of, task_of
from qworker.message import State, StoredMessage

__all__ = ["CODES", "MessageFilter"]

CODES: tuple[str, ...] = get_args(FailureCode)


class MessageFilter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A choice of stored messages by what they are. A message matches if it has every property that is given.

    `error`, `codes` and `groups` match failed messages only. `since` and `until` match done and failed ones only.

    Attributes:
        tasks: The names of tasks, of which it calls one. Empty: any task, and raw messages.
        error: A text that its error contains, in any case.
        codes: Why it failed: one of `error`, `timeout`, `poison`, `arguments`, `expired` and `cancelled`.
        groups: The keys of groups, of which it is in one (see `FailureGroup.key`).
        since: Unix seconds: it finished then or later.
        until: Unix seconds: it finished then or earlier.

    Raises:
        UsageError: A code is not known, or the text is empty.
    """

    tasks: tuple[str, ...] = ()
    error: str | None = None
    codes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    since: float | None = None
    until: float | None = None

    def __post_init__(self) -> None:
        """Check the codes and the text."""
        for code in self.codes:
            if code not in CODES:
                raise UsageError(f"code must be one of {', '.join(CODES)} (got {code!r})")
        if self.error == "":
            raise UsageError("error must not be empty: leave it out to match every error")

    @property
    def is_empty(self) -> bool:
        """Whether every message matches."""
        return self == _EMPTY

    @property
    def is_of_failed(self) -> bool:
        """Whether only failed messages can match."""
        return self.error is not None or bool(self.codes) or bool(self.groups)

    @property
    def is_of_finished(self) -> bool:
        """Whether only done and failed messages can match."""
        return self.is_of_failed or self.since is not None or self.until is not None

    def matches(self, stored: StoredMessage) -> bool:
        """Return whether a message matches."""
        if self.is_of_failed and not (stored.state is State.FAILED and self._has_error(stored.error or "")):
            return False
        if self.is_of_finished and not self._is_in_time(stored.finished_at):
            return False
        # The body is decoded last, because that costs the most.
        return (not self.tasks or task_of(stored.message) in self.tasks) and (
            not self.groups or group_of(stored).key in self.groups
        )

    def _has_error(self, error: str) -> bool:
        return (not self.codes or (code_of(error) or "error") in self.codes) and (
            self.error is None or self.error.casefold() in error.casefold()
        )

    def _is_in_time(self, at: float | None) -> bool:
        if at is None:
            return self.since is None and self.until is None
        return (self.since is None or at >= self.since) and (self.until is None or at <= self.until)


_EMPTY = MessageFilter()
