"""The lock under which a message changes its state.

Each transition of a message is one rename, made under the message's lock and conditional on the lease's token. The lock
is a flock on the message's file. It is held for the few system calls of one transition, never while a handler works. It
makes the check of the token and the rename one step among qworker processes. mq's own programs know no locks and no
tokens. The file's change time shows what they have done since the lease, because every rename sets it.

A crash between the lease state and the rename of one transition leaves a message that no process has leased.
`StoreReaper` returns it.
"""

from __future__ import annotations

import fcntl
import os
import stat

from qworker.kit.opening import open_entry
from qworker.kit.store_errors import NOT_A_FILE

__all__ = ["LOCK_TIMEOUT", "MessageLocked", "NotARegularFile", "lock_message"]

# Seconds that a transition of another process may take before the store counts as unavailable.
LOCK_TIMEOUT = 5.0


class MessageLocked(Exception):
    """Another process is moving this message."""


class NotARegularFile(Exception):
    """A file with the name of a message is not a regular file."""


def lock_message(name: str, directory: int) -> int:
    """Return a locked descriptor of a message's file, which ends the lock when it is closed. -1: the file is gone.

    Raises:
        MessageLocked: Another process is moving the message.
        NotARegularFile: It is a link, a socket or something else.
    """
    try:
        fd = open_entry(name, os.O_RDONLY, directory)
    except FileNotFoundError:
        return -1
    except OSError as error:
        if error.errno in NOT_A_FILE:
            raise NotARegularFile(name) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotARegularFile(name)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise MessageLocked from None
    except BaseException:
        os.close(fd)
        raise
    return fd
