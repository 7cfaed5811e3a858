"""Enqueueing an item under a name that it already has: from another queue, or from another host."""

from __future__ import annotations

import os
import secrets

from qworker.errors import InvalidName
from qworker.kit.files import link_file, write_all
from qworker.kit.opening import create_file
from qworker.names import printable
from qworker_fsq.environment import Constants
from qworker_fsq.layout import QueueDir, set_owner
from qworker_fsq.lease import ClaimedItem
from qworker_fsq.names import MAX_NAME, InvalidItemName, parse

__all__ = ["check_item", "link_item", "requeue_item"]


def check_item(name: str, constants: Constants) -> str:
    """Return `name` if it is the name of an item, and so stays in its directory.

    Raises:
        InvalidName: It is not.
    """
    if "/" in name or "\0" in name or name[:1] in {"", "."} or len(os.fsencode(name)) > MAX_NAME:
        raise InvalidName(f"{printable(name)[:80]!r} is not the name of an item")
    try:
        parse(name, constants)
    except InvalidItemName as error:
        raise InvalidName(f"{printable(name)[:80]!r} is not the name of an item: {error}") from error
    return name


def requeue_item(files: QueueDir, name: str, body: bytes) -> bool:
    """Store an item under its name, durably. Return False if the queue has it already.

    Raises:
        OSError: It cannot be stored, and nothing of it is left.
    """
    constants = files.constants
    temporary = f".{secrets.token_hex(12)}"
    fd = create_file(temporary, files.tmp, constants.item_mode)
    try:
        try:
            set_owner(fd, constants.item_user, constants.item_group)
            write_all(fd, body)
            os.fsync(fd)
        finally:
            os.close(fd)
        added = _link(temporary, name, files.tmp, files.queue)
    finally:
        os.unlink(temporary, dir_fd=files.tmp)
    # The item that another process has stored may not be on the disk yet either, and this call reports that it is.
    os.fsync(files.queue)
    return added


def link_item(claimed: ClaimedItem, target: QueueDir) -> bool:
    """Store an item in another queue by a link to the same file. Return False if that queue has it already.

    Raises:
        OSError: It cannot be linked.
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
