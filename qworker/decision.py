"""The exceptions with which a handler chooses what happens to its message."""

from __future__ import annotations

from typing import NamedTuple

from qworker.duration import Seconds
from qworker.errors import QworkerError, UsageError
from qworker.failure_text import summary_of, with_cause
from qworker.retry import MOST_DELAY
from qworker.validation import check_flag, check_seconds, seconds_of, shown

__all__ = ["Chosen", "Decision", "Fail", "Retry", "outcome_of"]


class Decision(QworkerError):
    """The base class of the exceptions with which a handler chooses what happens to its message.

    Attributes:
        reason: The text that is kept with the message.
    """

    # The class has a default too, because a subclass does not have to call this `__init__`.
    reason: str = ""

    def __init__(self, reason: str | BaseException) -> None:
        super().__init__(_reason_text(reason, type(self).__name__))
        self.reason = self.args[0]
        if isinstance(reason, BaseException):
            # As with `raise ... from`, its traceback is kept.
            self.__cause__ = reason


class Retry(Decision):
    """Run the message again later.

    Args:
        reason: The message's last error: text, or an exception, of which the type and the first line are kept.
        delay: Seconds until the message can run again, or a timedelta, at most ten years. A negative delay counts as 0.
            None: the task's retry policy decides.
        counts: Whether this attempt counts as a try (fail_tmp). False: the message is released, its tries stay, and no
            error is kept with it.

    Raises:
        UsageError: An argument is not valid.
    """

    reason = "the handler asked for a retry"
    delay: float | None = None
    counts: bool = True

    def __init__(
        self, reason: str | BaseException = reason, *, delay: Seconds | None = None, counts: bool = True
    ) -> None:
        super().__init__(reason)
        self.delay = None if delay is None else _delay_seconds(delay)
        self.counts = check_flag("counts", counts)


class Fail(Decision):
    """Keep the message as failed, with a reason, and never run it again (fail_perm).

    Args:
        reason: Text, or an exception, of which the type and the first line are kept.

    Raises:
        UsageError: The reason is neither text nor an exception.
    """

    reason = "the handler failed the message permanently"

    def __init__(self, reason: str | BaseException = reason) -> None:
        super().__init__(reason)


class Chosen(NamedTuple):
    """What a handler has chosen.

    Attributes:
        reason: The reason, with the traceback of its cause.
        delay: Seconds until the message can run again. None: the retry policy decides.
        counts: Whether the attempt counts as a try.
    """

    reason: str
    delay: float | None = None
    counts: bool = True


def outcome_of(error: Decision) -> Chosen:
    """Return what a handler has chosen.

    Raises:
        UsageError: An argument is not valid, for example because a subclass set it.
        BaseException: A property of a subclass raises it.
    """
    owner = type(error).__name__
    seconds, counts = None, True
    if isinstance(error, Retry):
        delay = error.delay
        seconds = None if delay is None else _delay_seconds(delay)
        counts = check_flag("counts", error.counts)
    reason = _reason_text(error.reason, owner)
    cause = error.__cause__
    if cause is None and not error.__suppress_context__:
        cause = error.__context__
    return Chosen(with_cause(reason, cause), seconds, counts)


def _reason_text(reason: object, owner: str) -> str:
    if isinstance(reason, str):
        return reason
    if isinstance(reason, BaseException):
        return summary_of(reason)
    raise UsageError(f"{owner}: the reason must be text or an exception (got {shown(reason)})")


def _delay_seconds(delay: object) -> float:
    seconds = seconds_of(delay)
    # A handler that computes `until - now` gives a negative delay if the time has passed.
    return 0.0 if seconds < 0 else check_seconds("delay", delay, most=MOST_DELAY)
