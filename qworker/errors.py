"""One tree of errors.

QworkerError
├── UsageError               the caller's mistake; one line and the mend (exit status 2)
│   ├── BadURL               a backend URL that cannot be understood
│   ├── BadName              a queue name, message id or key that is not allowed
│   ├── BadArguments         arguments that do not fit a task's signature
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
│   ├── PublishFailed        outcome unknown: perhaps stored; publish again with the same id
│   ├── FormatTooNew         the queue was written by a newer release
│   └── StorePermission      the store refuses this user
├── LeaseLost                the lease is no longer held; its outcome was refused
└── Outcome                  raised by handlers to choose what happens to their message
    ├── Retry                fail_tmp: run again later
    └── Fail                 fail_perm: keep it in `fail` with a reason
"""

from __future__ import annotations

__all__ = [
    "AppImportError",
    "BackendError",
    "BackendUnavailable",
    "BadArguments",
    "BadName",
    "BadURL",
    "DuplicateTask",
    "Fail",
    "FormatTooNew",
    "LeaseLost",
    "MissingExtra",
    "NotSupported",
    "Outcome",
    "PublishFailed",
    "QueueFull",
    "QueueNotFound",
    "QworkerError",
    "Retry",
    "StorageFull",
    "StoreNotFound",
    "StorePermission",
    "UnknownTask",
    "UsageError",
]


class QworkerError(Exception):
    """The root of everything qworker raises on purpose."""


class UsageError(QworkerError):
    """The caller's mistake: the text is one line that says what is wrong and the mend."""


class BadURL(UsageError):
    """A backend URL that cannot be understood."""


class BadName(UsageError):
    """A queue name, message id or key that is not allowed."""


class BadArguments(UsageError):
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
        super().__init__(f"there is no queue {queue!r}: create it with `qworker install URL {queue}`")
        self.queue = queue


class StoreNotFound(QueueNotFound):
    """No such directory, and so no queue in it.

    Args:
        directory: the absolute path at which the store would be.
        queue: the queue that was asked for; empty: none in particular.
    """

    def __init__(self, directory: str, queue: str = "") -> None:
        what = (
            f"there is no queue {queue!r}, and no directory {directory}"
            if queue
            else f"there is no directory {directory}"
        )
        BackendError.__init__(self, f"{what}: check the URL, or create it with `qworker install`, `enqueue` or `run`")
        self.directory = directory
        self.queue = queue


class QueueFull(BackendError):
    """The queue is at its capacity."""


class StorageFull(BackendError):
    """No space, no inodes, or no memory left in the store; nothing partial is visible."""


class PublishFailed(BackendError):
    """The outcome of a publish is unknown: perhaps stored. Publishing again with the same id stores it once."""


class FormatTooNew(BackendError):
    """The queue was written by a newer release."""


class StorePermission(BackendError):
    """The store refuses this user."""


class LeaseLost(QworkerError):
    """The lease is no longer held: the message may run elsewhere, and this holder's outcome is refused."""


class Outcome(QworkerError):
    """Raised by a handler to choose what happens to its message."""


class Retry(Outcome):
    """Run the message again later (fail_tmp).

    Args:
        reason: what to keep as the message's last error.
        delay: seconds until it may run again; None takes the task's backoff.
    """

    def __init__(self, reason: str = "the handler asked for a retry", *, delay: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.delay = delay


class Fail(Outcome):
    """Keep the message in `fail`, with a reason, and never run it again (fail_perm)."""

    def __init__(self, reason: str = "the handler failed the message for good") -> None:
        super().__init__(reason)
        self.reason = reason
