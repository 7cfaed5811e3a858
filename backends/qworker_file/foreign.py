"""Files that other programs wrote: items of fsq, files of any name and kind, names too long for a suffix."""

from __future__ import annotations

import errno
import os
from enum import Enum, auto

from qworker.kit.directory.reasons import write_reason
from qworker.kit.files import read_file
from qworker.kit.own_files import write_own
from qworker.kit.planted import rename_file
from qworker.kit.store_errors import UNREADABLE
from qworker.names import new_id, printable
from qworker_file.layout import QueueDir
from qworker_file.names import DELIMITERS, MAX_OWN, Item, alias_target, item_name, make_alias, parse_item, reason_name

__all__ = ["ClaimResult", "give_own_name", "move_to_failed", "read_arguments"]


class ClaimResult(Enum):
    """Why a file was not leased."""

    # Another worker has it.
    GONE = auto()
    # A program works on it or writes to it: try later.
    BUSY = auto()
    # It cannot be a message, and is now in fail/.
    FAILED = auto()
    # It cannot be opened, read or moved: try later.
    BLOCKED = auto()
    # Its body is larger than `max_body`: it stays where it is, and is tried again later.
    TOO_LARGE = auto()


def give_own_name(files: QueueDir, name: str, parsed: Item | None) -> tuple[str, Item]:
    """Return a unique fsq name for a file whose own name is not an fsq name, or is too long for the suffix of a lease.

    The old name becomes the only argument, or is stored in names/ if it is too long for that.

    Raises:
        OSError: It cannot be stored.
    """
    stem, tries = _choose_stem(name, parsed)
    short = item_name(stem, tries, (name,))
    if parsed is None and len(os.fsencode(short)) <= MAX_OWN:
        item = short
    else:
        item, key = make_alias(name, stem, tries, 0 if parsed is None else parsed.priority)
        _keep_name(files, key, name)
    own = parse_item(item)
    assert own is not None, item
    return item, own


def _choose_stem(name: str, parsed: Item | None) -> tuple[str, int]:
    if parsed is not None and name[0] in DELIMITERS:
        stem = "_".join(name[1:].split(name[0], 4)[:4])
        if len(os.fsencode(stem)) < MAX_OWN - 80:
            return stem, parsed.tries
    return new_id(), 0 if parsed is None else parsed.tries


def _keep_name(files: QueueDir, key: str, name: str) -> None:
    """Store a name on the disk, before its key is used as the name of a file."""
    # Every process writes the same bytes, however often.
    fd = write_own(key, files.names, os.fsencode(name), files.item_mode)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    os.fsync(files.names)


def read_arguments(files: QueueDir, item: Item) -> tuple[str, ...]:
    """Return the arguments with which a message was enqueued, or the old name of another program's file."""
    key = alias_target(item.arguments)
    if key is None:
        return item.arguments
    try:
        kept = read_file(key, files.names)
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        kept = None
    if kept is None:
        # names/ was cleared, or another program took the name. The file is still a message.
        return item.arguments
    name = os.fsdecode(kept)
    original = parse_item(name)
    return (name,) if original is None else original.arguments


def move_to_failed(files: QueueDir, source: int, name: str, reason: str) -> ClaimResult:
    """Move a file that cannot be a message to fail/, with its reason.

    Raises:
        OSError: It cannot be moved.
    """
    item, _ = give_own_name(files, name, None)
    os.close(write_reason(files.fail, reason_name(item), f"{printable(name)}: {reason}\n", mode=files.item_mode))
    try:
        rename_file(name, item, source, files.fail)
    except OSError as error:
        os.unlink(reason_name(item), dir_fd=files.fail)
        if error.errno == errno.ENOENT:
            return ClaimResult.GONE
        raise
    return ClaimResult.FAILED
