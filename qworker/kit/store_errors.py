"""The table from the kernel's errors to those of qworker, and the sets of error numbers that directory stores use."""

from __future__ import annotations

import errno

from qworker.errors import BackendError, BackendUnavailable, PermissionDenied, StorageFull
from qworker.kit.linux import is_proc_error

__all__ = [
    "DAMAGED",
    "DENIED",
    "FINAL",
    "FULL",
    "NOT_A_FILE",
    "NOT_EMPTY",
    "NOT_SUPPORTED",
    "STORE_WIDE",
    "UNREADABLE",
    "Unsupported",
    "is_final_for_message",
    "store_error",
    "store_errors",
]

# There is no room on the disk, or none for this user.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# This user has no permission.
DENIED = frozenset({errno.EACCES, errno.EPERM})
# `open` without following links meets something that is not a regular file: a link, a pipe, a socket or a device.
NOT_A_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV})
# The content of a file, or its inode, is damaged.
DAMAGED = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG})
# One message cannot be read, but the store works: it is not a regular file, it is another user's file, or it is
# damaged.
UNREADABLE = NOT_A_FILE | DAMAGED | {errno.EACCES}
# Every other file would fail in the same way: the disk is full or gone, or this process has no more resources.
STORE_WIDE = FULL | {errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EINTR}
# A directory that was to be removed or replaced contains files.
NOT_EMPTY = frozenset({errno.ENOTEMPTY, errno.EEXIST})
# The errors with which a file system reports that it does not support an operation.
NOT_SUPPORTED = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK})

# The meaning of the kernel's errors: what is wrong, if the kernel's own text does not say it well, and what to do. All
# other errors may disappear at the next try.
_MEANING: dict[int, tuple[type[BackendError], str, str]] = {
    **dict.fromkeys(FULL, (StorageFull, "", "free some space, or purge finished messages")),
    errno.EFBIG: (StorageFull, "", "a file of this size is not allowed by the file system, or by `ulimit -f`"),
    **dict.fromkeys(
        DENIED,
        (PermissionDenied, "", "run as the directory's owner, or let its group write to it"),
    ),
    errno.EROFS: (
        PermissionDenied,
        "the file system is mounted read-only",
        "remount it, or choose another directory",
    ),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST),
        (BackendUnavailable, "there is a file where a directory should be", "check the URL"),
    ),
    errno.ELOOP: (BackendUnavailable, "", "check the URL, and links in its path"),
    errno.ENAMETOOLONG: (BackendUnavailable, "", "check the URL"),
    **dict.fromkeys(
        (errno.EMFILE, errno.ENFILE),
        (BackendUnavailable, "", "raise the limit of open files (`ulimit -n`), or publish fewer messages at once"),
    ),
}

# Nothing is stored, and another try fails in the same way until an operator has acted. After all other errors the
# outcome of a write is unknown.
FINAL = frozenset(number for number, (kind, _, _) in _MEANING.items() if kind is not BackendUnavailable)

# One message's name, or what is written for it alone, is too long for the store.
_TOO_LONG = frozenset({errno.ENAMETOOLONG, errno.EFBIG})


def is_final_for_message(error: BaseException) -> bool:
    """Return whether an error of a settlement concerns this message alone, and another try ends the same.

    All others concern the store, which takes the same settlement when their cause is gone: an operator frees space or
    remounts the file system. So EROFS and ENOSPC are final for a publisher, which gets the error, but not for a
    settlement.
    """
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in _TOO_LONG


class Unsupported(OSError):
    """The file system cannot do what a queue needs.

    Args:
        what: The missing feature, in the plural.
    """

    def __init__(self, what: str) -> None:
        super().__init__(errno.EOPNOTSUPP, f"this file system has no {what}")


def store_error(error: OSError, doing: str) -> BackendError:
    """Return the qworker error for an `OSError` of the store. Attach the cause with `raise ... from error`.

    Returns:
        `StorageFull`: no space, inodes or quota are left. `PermissionDenied`: this user, or no user, can use the
        directory. `BackendUnavailable`: everything else, because it may disappear at the next try.
    """
    if is_proc_error(error):
        return BackendUnavailable(f"{error.filename} cannot be read: mount /proc")
    if isinstance(error, Unsupported):
        what = f"{error.strerror}: put the queues on another one (`qworker doctor URL` checks it)"
        return PermissionDenied(f"cannot {doing}: {what}")
    kind, what, advice = _MEANING.get(error.errno or 0, (BackendUnavailable, "", ""))
    reason = f"cannot {doing}: {what or error.strerror or error}"
    return kind(f"{reason}: {advice}" if advice else reason)


class store_errors:  # noqa: N801 - reads as a statement: `with store_errors("list the queue"):`
    """Raise every `OSError` of the block as a `BackendError`. `doing` completes "cannot ..."."""

    # Not a generator: every call of a directory backend passes here, several times per message to an idle worker.
    __slots__ = ("_doing",)

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise store_error(error, self._doing) from error
