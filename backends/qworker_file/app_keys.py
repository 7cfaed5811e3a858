"""Unique keys that count in all queues: the symlink `<root>/.keys/key-<digest>` names a message by its queue and id.

As in one queue, a key counts only while that message waits or is leased there. Only a process with the lock of `.keys/`
lets a message have such a key. It may have the lock of a queue's names/ before, and never takes one after it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Generator
from contextlib import contextmanager

from qworker.errors import InvalidName
from qworker.kit.files import has_entry, name_slices, try_unlink
from qworker.kit.opening import open_directory
from qworker.message import KeyHolder
from qworker.names import check_existing_queue
from qworker_file.id_place import read_status
from qworker_file.layout import QueueDir, open_part
from qworker_file.names import key_link_name

__all__ = [
    "OpenOther",
    "clean_up_app_keys",
    "free_app_key",
    "give_app_key",
    "holder_of_app_key",
    "lock_app_keys",
    "open_app_keys",
]

_KEYS = ".keys"

# Opens another queue of the store by its name; None if it does not exist.
OpenOther = Callable[[str], "QueueDir | None"]


@contextmanager
def lock_app_keys(files: QueueDir) -> Generator[int | None]:
    """Lock the keys of a queue's store in the block, and give their directory. None: another process has the lock.

    Raises:
        OSError: The directory cannot be opened or created.
    """
    fd = open_part(files.root(), _KEYS, files.directory_mode)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        try:
            yield fd
        finally:
            # Also if a child was forked in the meantime.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def holder_of_app_key(keys: int, mark: str) -> KeyHolder | None:
    """Return the message in the symlink of a key, which may not have the key any more."""
    return _read(keys, key_link_name(mark))


def _read(keys: int, name: str) -> KeyHolder | None:
    try:
        queue, _, message_id = os.readlink(name, dir_fd=keys).partition("/")
    except OSError as error:
        # Another program's file can have its name.
        if error.errno in {errno.ENOENT, errno.EINVAL}:
            return None
        raise
    try:
        return KeyHolder(message_id, check_existing_queue(queue))
    except InvalidName:
        # Another program's link can lead out of the store.
        return None


def give_app_key(files: QueueDir, keys: int, message_id: str, mark: str) -> None:
    """Let a message of a queue have a key. The caller has the lock.

    Raises:
        OSError: It cannot be stored.
    """
    temporary = f".{secrets.token_hex(8)}"
    os.symlink(f"{files.name}/{message_id}", temporary, dir_fd=keys)
    try:
        os.rename(temporary, key_link_name(mark), src_dir_fd=keys, dst_dir_fd=keys)
    except OSError:
        # A lost reply: the rename has happened although an error was reported.
        if has_entry(temporary, keys):
            try_unlink(temporary, keys)
            raise


def free_app_key(files: QueueDir, message_id: str, mark: str) -> None:
    """Remove the symlink of a key whose message is gone, unless another process has the lock."""
    if not has_entry(_KEYS, files.root()):
        return
    with lock_app_keys(files) as keys:
        if keys is not None and _is_of(holder_of_app_key(keys, mark), files.name, message_id):
            try_unlink(key_link_name(mark), keys)


def _is_of(holder: KeyHolder | None, queue: str, message_id: str) -> bool:
    return holder is not None and (holder.queue, str(holder)) == (queue, message_id)


async def clean_up_app_keys(files: QueueDir) -> None:
    """Remove the symlinks of keys whose messages were in this queue and are gone, or in a queue that is gone.

    The lock is not held for the listing, which takes long if there are many keys.
    """
    if not has_entry(_KEYS, files.root()):
        return
    listed = open_app_keys(files)
    try:
        async for names in name_slices(listed):
            for name in names:
                if not _is_left(files, listed, name):
                    continue
                with lock_app_keys(files) as keys:
                    if keys is None:
                        return
                    if _is_left(files, keys, name):
                        try_unlink(name, keys)
    finally:
        os.close(listed)


def _is_left(files: QueueDir, keys: int, name: str) -> bool:
    holder = _read(keys, name)
    if holder is None:
        return False
    if name[0] == ".":
        # Its publisher died, if no other process has the lock.
        return True
    if holder.queue != files.name:
        return not has_entry(holder.queue, files.root())
    status = read_status(files, str(holder))
    return status is None or status.st_nlink == 1


def open_app_keys(files: QueueDir) -> int:
    """Open the directory of the keys. The caller closes it.

    Raises:
        OSError: It cannot be opened.
    """
    return open_directory(_KEYS, files.root())
