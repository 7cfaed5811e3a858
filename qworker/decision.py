"""What a handler raises to choose what happens to its message."""

from __future__ import annotations

from datetime import timedelta

from qworker.errors import QworkerError, UsageError
from qworker.failure_text import summary_of, with_cause
from qworker.retry import MOST_DELAY
from qworker.validation import check_seconds, number_of, shown

__all__ = ["Decision", "Fail", "Retry", "outcome_of"]


class Decision(QworkerError):
    """Raised by a handler to choose what happens to its message.

    Attributes:
        reason: what is kept of it.
    """

    # On the class too: a subclass need not call this `__init__`.
    reason: str = ""

    def __init__(self, reason: str | BaseException) -> None:
        super().__init__(_reason_text(reason, type(self).__name__))
        self.reason = self.args[0]
        if isinstance(reason, BaseException):
            # Its traceback is kept, as with `raise ... from`.
            self.__cause__ = reason


class Retry(Decision):
    """Run the message again later (fail_tmp).

    Args:
        reason: what to keep as the message's last error: text, or an exception, of which the type and the first line are kept.
        delay: seconds until it may run again, or a timedelta, at most ten years; below 0 is 0. None takes the task's backoff.

    Raises:
        UsageError: the reason or the delay cannot be kept.
    """

    reason = "the handler asked for a retry"
    delay: float | None = None

    def __init__(self, reason: str | BaseException = reason, *, delay: float | timedelta | None = None) -> None:
        super().__init__(reason)
        self.delay = None if delay is None else _delay_seconds(delay)


class Fail(Decision):
    """Keep the message as failed, with a reason, and never run it again (fail_perm).

    Args:
        reason: text, or an exception, of which the type and the first line are kept.

    Raises:
        UsageError: the reason is neither.
    """

    reason = "the handler failed the message permanently"

    def __init__(self, reason: str | BaseException = reason) -> None:
        super().__init__(reason)


def outcome_of(error: Decision) -> tuple[str, float | None]:
    """The reason and the delay of what a handler chose; after the reason, the traceback of its cause.

    Raises:
        UsageError: a subclass, or whoever changed it, gave it what cannot be kept.
        BaseException: a subclass raises it.
    """
    owner = type(error).__name__
    delay = error.delay if isinstance(error, Retry) else None
    seconds = None if delay is None else _delay_seconds(delay)
    reason = _reason_text(error.reason, owner)
    cause = error.__cause__
    if cause is None and not error.__suppress_context__:
        cause = error.__context__
    return with_cause(reason, cause), seconds


def _reason_text(reason: object, owner: str) -> str:
    if isinstance(reason, str):
        return reason
    if isinstance(reason, BaseException):
        return summary_of(reason)
    raise UsageError(f"{owner}: the reason must be text or an exception (got {shown(reason)})")


def _delay_seconds(delay: object) -> float:
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else number_of(delay)
    # A time that has passed, as `until - now` gives it.
    return 0.0 if seconds < 0 else check_seconds("delay", delay, most=MOST_DELAY)
