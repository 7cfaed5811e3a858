"""One tree of errors.

QworkerError
├── UsageError               the caller's mistake; one line and the fix (exit status 2)
│   ├── InvalidURL           a backend URL that cannot be understood
│   ├── InvalidName          a queue name, message id or key that is not allowed
│   ├── InvalidArguments     arguments that do not fit a task's signature
│   ├── UnknownTask          a task name that the app does not register
│   ├── DuplicateTask        a task name or raw handler registered twice
│   ├── MissingExtra         an optional dependency that is not installed
│   ├── AppImportError       `module:attribute` cannot be imported
│   └── NotSupported         the backend's protocol has no place for what was asked
├── BackendError             the store said no
│   ├── BackendUnavailable   the store cannot be reached (exit status 3 at start)
│   ├── QueueNotFound        no such queue
│   │   └── StoreNotFound    no such directory, and so no queue in it
│   ├── QueueFull            the queue is at its capacity
│   ├── StorageFull          no space, no inodes, or no memory left in the store
│   ├── PublishUncertain     outcome unknown: perhaps stored; publish again with the same id
│   ├── FormatTooNew         the queue was written by a newer release
│   └── PermissionDenied     the store refuses this user, or is not fit for queues
├── LeaseLost                the lease is no longer held; its outcome was refused
└── Decision                 raised by handlers to choose what happens to their message
    ├── Retry                fail_tmp: run again later
    └── Fail                 fail_perm: keep it as failed, with a reason
"""

from __future__ import annotations

from datetime import timedelta

__all__ = [
    "AppImportError",
    "BackendError",
    "BackendUnavailable",
    "Decision",
    "DuplicateTask",
    "Fail",
    "FormatTooNew",
    "InvalidArguments",
    "InvalidName",
    "InvalidURL",
    "LeaseLost",
    "MissingExtra",
    "NotSupported",
    "PermissionDenied",
    "PublishUncertain",
    "QueueFull",
    "QueueNotFound",
    "QworkerError",
    "Retry",
    "StorageFull",
    "StoreNotFound",
    "UnknownTask",
    "UsageError",
]

# Seconds, ten years: a later time is not stored. The names and numbers of every backend have room for it.
MOST_DELAY = 10 * 365 * 86400.0


class QworkerError(Exception):
    """The root of everything qworker raises on purpose."""


class UsageError(QworkerError):
    """The caller's mistake: the text is one line that says what is wrong and the fix."""


class InvalidURL(UsageError):
    """A backend URL that cannot be understood."""


class InvalidName(UsageError):
    """A queue name, message id or key that is not allowed."""


class InvalidArguments(UsageError):
    """Arguments that do not fit a task's signature or annotations."""


class UnknownTask(UsageError):
    """A task name that the app does not register."""


class DuplicateTask(UsageError):
    """A task name, or a queue's raw handler, registered twice."""


class MissingExtra(UsageError):
    """An optional dependency that is not installed."""

    def __init__(self, extra: str, needed_for: str) -> None:
        # The package index has another project under the name qworker: no advice may lead there.
        super().__init__(
            f"{needed_for} needs the extra {extra!r}: "
            f"in a checkout of qworker run pip install '.[{extra}]', elsewhere pip install 'WHEEL_FILE[{extra}]'"
        )
        self.extra = extra


class AppImportError(UsageError):
    """`module:attribute` cannot be imported."""


class NotSupported(UsageError):
    """The backend's protocol has no place for what was asked."""


class BackendError(QworkerError):
    """The store said no."""


class BackendUnavailable(BackendError):
    """The store cannot be reached."""


class QueueNotFound(BackendError):
    """No such queue."""

    def __init__(self, queue: str) -> None:
        super().__init__(f"queue {queue!r} does not exist: create it with `qworker create URL {queue}`")
        self.queue = queue


class StoreNotFound(QueueNotFound):
    """No such directory, and so no queue in it.

    Args:
        directory: the absolute path at which the store would be.
        queue: the queue that was asked for; empty: none in particular.
    """

    def __init__(self, directory: str, queue: str = "") -> None:
        what = (
            f"queue {queue!r} does not exist, and neither does the directory {directory}"
            if queue
            else f"the directory {directory} does not exist"
        )
        BackendError.__init__(self, f"{what}: check the URL, or create it with `qworker create`, `enqueue` or `run`")
        self.directory = directory
        self.queue = queue


class QueueFull(BackendError):
    """The queue is at its capacity."""


class StorageFull(BackendError):
    """No space, no inodes, or no memory left in the store; nothing partial is visible."""


class PublishUncertain(BackendError):
    """The outcome of a publish is unknown: perhaps stored. Publish again with the same id: no second message beside a stored one."""


class FormatTooNew(BackendError):
    """The queue was written by a newer release."""


class PermissionDenied(BackendError):
    """The store refuses this user, or is not fit for queues: waiting does not help."""


class LeaseLost(QworkerError):
    """The lease is no longer held: the message may run elsewhere, and this holder's outcome is refused."""


class Decision(QworkerError):
    """Raised by a handler to choose what happens to its message.

    Attributes:
        reason: what is kept of it.
    """

    # On the class too: a subclass need not call this `__init__`.
    reason: str = ""

    def __init__(self, reason: str | BaseException) -> None:
        super().__init__(reason_text(reason, type(self).__name__))
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
        self.delay = None if delay is None else delay_seconds(delay)


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


def reason_text(reason: object, owner: str) -> str:
    """The text of a reason.

    Raises:
        UsageError: it is neither text nor an exception.
    """
    if isinstance(reason, str):
        return reason
    # Imported late: this module is the root of all.
    from qworker.failure_text import summary_of
    from qworker.validation import shown

    if isinstance(reason, BaseException):
        return summary_of(reason)
    raise UsageError(f"{owner}: the reason must be text or an exception (got {shown(reason)})")


def delay_seconds(delay: object) -> float:
    """A delay in seconds, from 0 to MOST_DELAY.

    Raises:
        UsageError: it is not a number of seconds or a timedelta, or is too long.
    """
    from qworker.validation import check_seconds, number_of

    seconds = delay.total_seconds() if isinstance(delay, timedelta) else number_of(delay)
    # A time that has passed, as `until - now` gives it.
    return 0.0 if seconds < 0 else check_seconds("delay", delay, most=MOST_DELAY)
