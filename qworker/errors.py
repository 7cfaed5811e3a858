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
└── Decision                 raised by handlers to choose what happens to their message (decision.py)
    ├── Retry                fail_tmp: run again later
    └── Fail                 fail_perm: keep it as failed, with a reason
"""

from __future__ import annotations

__all__ = [
    "AppImportError",
    "BackendError",
    "BackendUnavailable",
    "DuplicateTask",
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
    "StorageFull",
    "StoreNotFound",
    "UnknownTask",
    "UsageError",
]


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
