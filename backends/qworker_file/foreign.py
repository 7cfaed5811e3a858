"""Files that no qworker wrote: other programs' items, strangers' files of any name and kind, names too long for a suffix."""

from __future__ import annotations

import errno
import os
from enum import Enum, auto

from qworker.kit.directory.reasons import write_reason
from qworker.kit.files import CREATE, read_file, write_all
from qworker.names import new_id, printable
from qworker_file.layout import QueueDir
from qworker_file.names import MAX_OWN, Item, alias_of, alias_target, item_name, parse_item, reason_name

__all__ = ["Claim", "arguments", "own_name", "put_aside"]


class Claim(Enum):
    """Why a file was not leased."""

    # Somebody else has it.
    GONE = auto()
    # Somebody is working on it or writing it: try later.
    BUSY = auto()
    # It can never be a message, and is in fail/ by now.
    ASIDE = auto()


def own_name(files: QueueDir, name: str, parsed: Item | None) -> tuple[str, Item]:
    """A unique fsq name for a file whose own is none, or leaves no room for the suffix of a lease.

    The old name becomes the only argument, or is kept in names/ where it is too long for that.

    Raises:
        OSError: it cannot be kept.
    """
    stem, tries = _stem_of(name, parsed)
    short = item_name(stem, tries, (name,))
    if parsed is None and len(os.fsencode(short)) <= MAX_OWN:
        item = short
    else:
        item, key = alias_of(name, stem, tries)
        _keep_name(files, key, name)
    own = parse_item(item)
    assert own is not None, item
    return item, own


def _stem_of(name: str, parsed: Item | None) -> tuple[str, int]:
    if parsed is not None and name[0] == "_":
        stem = "_".join(name[1:].split("_", 4)[:4])
        if len(os.fsencode(stem)) < MAX_OWN - 80:
            return stem, parsed.tries
    return new_id(), 0 if parsed is None else parsed.tries


def _keep_name(files: QueueDir, key: str, name: str) -> None:
    """Write a name down, on the disk, before anything is called by its key."""
    try:
        fd = os.open(key, CREATE, files.item_mode, dir_fd=files.names)
    except FileExistsError:
        fd = os.open(key, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=files.names)
    try:
        # The same bytes whoever writes them, and however often.
        write_all(fd, os.fsencode(name))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.fsync(files.names)


def arguments(files: QueueDir, item: Item) -> tuple[str, ...]:
    """The arguments that a message was enqueued with, or a stranger's old name."""
    key = alias_target(item.arguments)
    if key is None:
        return item.arguments
    kept = read_file(key, files.names)
    if kept is None:
        # Somebody cleared names/: the message is still one.
        return item.arguments
    name = os.fsdecode(kept)
    original = parse_item(name)
    return (name,) if original is None else original.arguments


def put_aside(files: QueueDir, source: int, name: str, why: str) -> Claim:
    """Move to fail/, with its reason, what can never be a message.

    Raises:
        OSError: it cannot be moved.
    """
    item, _ = own_name(files, name, None)
    os.close(write_reason(files.fail, reason_name(item), f"{printable(name)}: {why}\n", mode=files.item_mode))
    try:
        os.rename(name, item, src_dir_fd=source, dst_dir_fd=files.fail)
    except OSError as error:
        os.unlink(reason_name(item), dir_fd=files.fail)
        if error.errno == errno.ENOENT:
            return Claim.GONE
        raise
    return Claim.ASIDE
