"""Enqueueing an item under a name that it has already: from another queue, or from another host."""

from __future__ import annotations

import os
import secrets

from qworker.errors import InvalidName, QueueNotFound
from qworker.kit.files import CREATE, DIRECTORY, link_file, write_all
from qworker.names import check_queue, printable
from qworker_fsq.environment import Constants
from qworker_fsq.layout import QueueDir, open_queue, own
from qworker_fsq.lease import Claimed
from qworker_fsq.names import MAX_NAME, Malformed, parse

__all__ = ["check_item", "link_item", "open_root", "opened", "reenqueue"]


def open_root(directory: str) -> int:
    """The root's descriptor.

    Raises:
        OSError: it cannot be opened.
    """
    return os.open(directory, DIRECTORY)


def opened(root: int, queue: str, constants: Constants, host: str | None = None) -> QueueDir:
    """An open queue.

    Raises:
        InvalidName: it cannot be one.
        QueueNotFound: there is none.
    """
    found = open_queue(root, check_queue(queue), constants, host)
    if found is None:
        raise QueueNotFound(queue if host is None else f"{queue}/{constants.hosts}/{host}")
    return found


def check_item(name: str, constants: Constants) -> str:
    """Return `name` if it is an item's, and so stays in its directory.

    Raises:
        InvalidName: it is none.
    """
    if "/" in name or "\0" in name or name[:1] in {"", "."} or len(os.fsencode(name)) > MAX_NAME:
        raise InvalidName(f"{printable(name)[:80]!r} is not the name of an item")
    try:
        parse(name, constants)
    except Malformed as error:
        raise InvalidName(f"{printable(name)[:80]!r} is not the name of an item: {error}") from error
    return name


def reenqueue(files: QueueDir, name: str, body: bytes) -> bool:
    """Store an item under its name, durably; False where the queue has it already.

    Raises:
        OSError: it cannot be stored; nothing of it is left.
    """
    constants = files.constants
    temporary = f".{secrets.token_hex(12)}"
    fd = os.open(temporary, CREATE, constants.item_mode, dir_fd=files.tmp)
    try:
        try:
            own(fd, constants.item_user, constants.item_group)
            write_all(fd, body)
            os.fsync(fd)
        finally:
            os.close(fd)
        added = _link(temporary, name, files.tmp, files.queue)
    finally:
        os.unlink(temporary, dir_fd=files.tmp)
    # Also what somebody else has stored may not be on the disk yet, and we are about to say that it is.
    os.fsync(files.queue)
    return added


def link_item(claimed: Claimed, target: QueueDir) -> bool:
    """Store an item in another queue by a link to the same file; False where that has it already.

    Raises:
        OSError: it cannot be linked.
    """
    added = _link(claimed.name, claimed.name, claimed.files.queue, target.queue)
    os.fsync(target.queue)
    return added


def _link(name: str, target: str, source: int, destination: int) -> bool:
    try:
        link_file(name, target, source, destination)
    except FileExistsError:
        return False
    return True
