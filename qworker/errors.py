"""All errors, in one tree.

QworkerError
├── UsageError               a mistake of the caller. The text is one line with the fix (exit status 2)
│   ├── InvalidURL           a backend URL that cannot be understood
│   ├── InvalidName          a queue name, message id or key that is not allowed
│   ├── InvalidArguments     arguments that do not fit a task's signature
│   ├── UnknownTask          a task name that the app does not register
│   ├── DuplicateTask        a task name or raw handler registered twice
│   ├── MissingExtra         an optional dependency that is not installed
│   ├── AppImportError       `module:attribute` cannot be imported
│   ├── MessageTooLarge      a body that is larger than `max_body` of the backend's URL
│   └── NotSupported         the backend's protocol does not support what was requested
├── BackendError             the store cannot carry out an operation
│   ├── BackendUnavailable   the store cannot be reached (exit status 3 at start)
│   ├── QueueNotFound        the queue does not exist
│   │   └── StoreNotFound    the directory of the store does not exist
│   ├── QueueDamaged         the store works, but this queue cannot be used until it is repaired
│   ├── QueueFull            the queue is at its capacity
│   ├── StorageFull          the store has no space, inodes or memory left
│   ├── PublishUncertain     the message may or may not be stored: publish it again with the same id
│   ├── EnqueueFailed        calls that were to be sent later are not stored, or may not be
│   ├── FormatTooNew         the queue was written by a newer release
│   └── PermissionDenied     the store refuses this user, or cannot hold queues
├── LeaseLost                the lease is lost, and its outcome was refused
├── JobError                 a job has no value that can be returned
│   ├── JobFailed            its message failed
│   ├── JobCancelled         its message was cancelled
│   ├── JobGone              neither its message nor its result is stored
│   ├── ResultTooBig         its handler returned a value that is too large to be kept
│   └── ResultNotEncodable   its handler returned a value that JSON cannot hold
└── Decision                 raised by handlers to choose what happens to their message (decision.py)
    ├── Retry                fail_tmp: run again later
    └── Fail                 fail_perm: keep it as failed, with a reason
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "UNUSABLE",
    "AppImportError",
    "BackendError",
    "BackendUnavailable",
    "DuplicateTask",
    "EnqueueFailed",
    "FormatTooNew",
    "InvalidArguments",
    "InvalidName",
    "InvalidURL",
    "JobCancelled",
    "JobError",
    "JobFailed",
    "JobGone",
    "LeaseLost",
    "MessageTooLarge",
    "MissingExtra",
    "NotSupported",
    "PermissionDenied",
    "PublishUncertain",
    "QueueDamaged",
    "QueueFull",
    "QueueNotFound",
    "QworkerError",
    "ResultNotEncodable",
    "ResultTooBig",
    "StorageFull",
    "StoreNotFound",
    "UnknownTask",
    "UsageError",
]


class QworkerError(Exception):
    """The base class of all errors that qworker raises on purpose."""


class UsageError(QworkerError):
    """A mistake of the caller. The text is one line that says what is wrong and what to do."""


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
        # The package index has another project under the name qworker, so the text must not name it.
        super().__init__(
            f"{needed_for} needs the extra {extra!r}: "
            f"in a checkout of qworker run pip install '.[{extra}]', elsewhere pip install 'WHEEL_FILE[{extra}]'"
        )
        self.extra = extra


class AppImportError(UsageError):
    """`module:attribute` cannot be imported."""


class MessageTooLarge(UsageError):
    """A body that is larger than `max_body` of the backend's URL. Nothing of its batch is stored."""


class NotSupported(UsageError):
    """The backend's protocol does not support what was requested."""


class BackendError(QworkerError):
    """The store cannot carry out an operation."""


class BackendUnavailable(BackendError):
    """The store cannot be reached."""


class QueueNotFound(BackendError):
    """The queue does not exist."""

    def __init__(self, queue: str) -> None:
        super().__init__(f"queue {queue!r} does not exist: create it with `qworker create URL {queue}`")
        self.queue = queue


class StoreNotFound(QueueNotFound):
    """The directory of the store does not exist, and so none of its queues exists.

    Args:
        directory: The absolute path of the missing directory.
        queue: The queue that was requested. Empty: no particular queue.
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


class QueueDamaged(BackendError):
    """The store works, but this queue cannot be used until it is repaired. Other queues can be used."""


class QueueFull(BackendError):
    """The queue is at its capacity."""


class StorageFull(BackendError):
    """The store has no space, inodes or memory left. No partial message is visible."""


class PublishUncertain(BackendError):
    """It is unknown whether a message was stored.

    Publish it again with the same id: a message that is stored already is not stored twice.
    """


class EnqueueFailed(BackendError):
    """Calls that were to be sent at the end of a block or after a commit are not stored, or it is unknown.

    All calls were tried. Enqueue `unsent` again: the calls have their ids, so one that is stored is not stored twice.

    Attributes:
        stored: The jobs of the calls that are stored.
        unsent: The calls (`Call`) that may not be stored, for `Tasks.enqueue_many`.
        errors: The error of each call of `unsent`.
    """

    def __init__(self, text: str, stored: Sequence[Any], unsent: Sequence[Any], errors: Sequence[Exception]) -> None:
        super().__init__(text)
        self.stored = stored
        self.unsent = unsent
        self.errors = errors


class FormatTooNew(BackendError):
    """The queue was written by a newer release."""


class PermissionDenied(BackendError):
    """The store refuses this user, or cannot hold queues. A later attempt fails too."""


# A queue cannot be used until an operator has acted, and other queues can be.
UNUSABLE = (QueueDamaged, FormatTooNew, PermissionDenied)


class AlreadyEnqueued(QworkerError):
    """Another message that waits or runs has the unique key, so nothing was stored or made ready.

    Args:
        text: The text of the error.
        id: The id of that message.

    Attributes:
        id: The id of that message.
    """

    def __init__(self, text: str, id: str = "") -> None:  # noqa: A002 - the word of all other classes
        super().__init__(text)
        self.id = id


class LeaseLost(QworkerError):
    """The lease is lost. The message can run on another worker, and the store refuses this holder's outcome."""


class JobError(QworkerError):
    """A job has no value that can be returned. It has ended, or it is no longer stored."""


class JobFailed(JobError):
    """The message of a job failed.

    Args:
        error_type: The name of the class of the error. Empty if it is not known.
        text: The error that is kept with the message, with its traceback.
        code: Why it failed: `error`, `timeout`, `poison`, `arguments` or `expired`.
        summary: The error in one line. Empty: its type.
    """

    def __init__(self, error_type: str, text: str, code: str, summary: str = "") -> None:
        super().__init__(f"the job failed ({code}): {summary or error_type or text}")
        self.error_type = error_type
        self.text = text
        self.code = code


class JobCancelled(JobError):
    """The message of a job was cancelled."""


class JobGone(JobError):
    """Neither the message of a job nor its result is stored."""


class ResultTooBig(JobError):
    """The job is done, but its handler returned a value that is too large to be kept."""


class ResultNotEncodable(JobError):
    """The job is done, but its handler returned a value that JSON cannot hold."""
