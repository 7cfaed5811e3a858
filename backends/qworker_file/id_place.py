"""Where a message with a given id is: found by its link in names/, its inode, and a record of its place.

The number of links proves nothing: a backup made of hard links raises it. The symlink `names/at-<hash>` names the
place of the last move, and is written before that move. It is a hint: what it names counts only if the file there has
the inode of the link. If it is not there, as after a death or a move by an older release, the directories are listed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from collections.abc import Collection, Iterable, Mapping

import msgspec

from qworker.kit.files import find_inode, has_entry, try_unlink
from qworker.kit.opening import open_directory
from qworker.kit.store_errors import FULL, NOT_SUPPORTED
from qworker_file.layout import QueueDir
from qworker_file.names import (
    given_id,
    index_name,
    may_lack_link,
    next_name,
    parse_delay,
    parse_lease,
    place_name,
    swap_name,
)

__all__ = [
    "Located",
    "Place",
    "is_unchanged",
    "item_at",
    "locate",
    "make_link",
    "read_status",
    "record_move",
    "record_place",
    "recorded_place",
    "replace_link",
]

# The directories of messages, first those that are small: tmp/ has files that are not visible yet.
_DIRECTORIES = ("lease", "tmp", "queue", "delay", "fail", "done")
# Directory entries read between two turns of the loop.
_SLICE = 1000
# Seconds. Longer than a tick of the kernel's clock, which is the resolution of change times.
_TICK = 0.02


class Place(msgspec.Struct, frozen=True):
    """A place of a file.

    Attributes:
        directory: The name of its directory in the queue.
        name: Its name there.
    """

    directory: str
    name: str

    def descriptor(self, files: QueueDir) -> int:
        """Return the open directory."""
        found: int = getattr(files, self.directory)
        return found


class Located(msgspec.Struct):
    """The places of messages, by their ids.

    Attributes:
        places: Where they are.
        gone: The messages that are not stored. The status of the link that is left, or None without a link.
    """

    places: dict[str, Place]
    gone: dict[str, os.stat_result | None]


def read_status(files: QueueDir, message_id: str) -> os.stat_result | None:
    """Return the status of the link of an id, or None without one."""
    index = index_name(message_id)
    status = _status_of(files, index)
    if status is not None and find_inode(swap_name(index), files.names) == status.st_ino:
        # Another file has its place by now, and its link does not have this name yet.
        return _status_of(files, next_name(index)) or _status_of(files, index)
    return status


def _status_of(files: QueueDir, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=files.names, follow_symlinks=False)
    except FileNotFoundError:
        return None


# -- the record ------------------------------------------------------------------------------------------------------


def record_place(files: QueueDir, message_id: str, *places: Place) -> None:
    """Record where a message is after its next move, and where it is before it.

    Raises:
        OSError: It cannot be recorded.
    """
    text = "/".join([f"{place.directory}/{place.name}" for place in places])
    replace_link(files, text, place_name(message_id))


def replace_link(files: QueueDir, text: str, target: str) -> None:
    """Make a symlink in names/, which replaces an older one atomically.

    Raises:
        OSError: It cannot be made.
    """
    if make_link(files, text, target):
        return
    temporary = f"{target}.{secrets.token_hex(4)}"
    _symlink(text, temporary, files.tmp)
    try:
        os.rename(temporary, target, src_dir_fd=files.tmp, dst_dir_fd=files.names)
    except OSError:
        # A lost reply: the rename has happened although an error was reported.
        if not has_entry(temporary, files.tmp):
            return
        try_unlink(temporary, files.tmp)
        raise


def make_link(files: QueueDir, text: str, target: str) -> bool:
    """Make a symlink in names/ and return whether it was made. False: another file has its name.

    Raises:
        OSError: It cannot be made.
    """
    try:
        _symlink(text, target, files.names)
    except FileExistsError:
        return False
    return True


def _symlink(text: str, name: str, directory: int) -> None:
    try:
        os.symlink(text, name, dir_fd=directory)
    except FileExistsError:
        raise
    except OSError:
        # A lost reply: the link exists although an error was reported.
        if not has_entry(name, directory) or os.readlink(name, dir_fd=directory) != text:
            raise


def record_move(files: QueueDir, item: str, *places: Place) -> None:
    """Do the same before a move of an item that may have a link. A full disk does not prevent the move.

    Raises:
        OSError: It cannot be recorded.
    """
    message_id = given_id(item)
    if message_id is None or may_lack_link(message_id):
        return
    try:
        record_place(files, message_id, *places)
    except OSError as error:
        # Without the record the message is found by listing.
        if error.errno not in FULL and error.errno not in NOT_SUPPORTED:
            raise


def recorded_place(files: QueueDir, message_id: str, inode: int) -> Place | None:
    """Return the place of a message if it is where the record says."""
    try:
        parts = os.readlink(place_name(message_id), dir_fd=files.names).split("/")
    except OSError as error:
        # It has no record, or another program's file has its name.
        if error.errno in {errno.ENOENT, errno.EINVAL}:
            return None
        raise
    for directory, name in zip(parts[::2], parts[1::2], strict=False):
        place = Place(directory, name)
        if directory in _DIRECTORIES and name and find_inode(name, place.descriptor(files)) == inode:
            return place
    return None


# -- looking ---------------------------------------------------------------------------------------------------------


async def locate(files: QueueDir, ids: Collection[str]) -> Located:
    """Find messages with given ids. It lists only for a message that is not at its recorded place.

    Raises:
        OSError: A directory cannot be read.
    """
    located = Located({}, {})
    unsure = _read_index(files, ids, located)
    while unsure:
        await _search(files, unsure, located)
        unsure = {key: status for key, status in unsure.items() if key not in located.places}
        if not unsure:
            break
        # A listing misses a file that is renamed meanwhile. A rename sets the file's change time: if that is the same
        # before and after a listing, and older than a tick, the listing has missed nothing.
        await asyncio.sleep(_TICK)
        await _search(files, unsure, located)
        for key, before in unsure.items():
            if key not in located.places and is_unchanged(before, read_status(files, key)):
                located.gone[key] = before
        unsure = _read_index(files, unsure.keys() - located.places.keys() - located.gone.keys(), located)
    return located


def is_unchanged(before: os.stat_result | None, now: os.stat_result | None) -> bool:
    """Return whether a file was not renamed, linked, unlinked or written between two looks."""
    return before is not None and now is not None and _identity(before) == _identity(now)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_ctime_ns, status.st_nlink


def _read_index(files: QueueDir, ids: Iterable[str], located: Located) -> dict[str, os.stat_result]:
    """Find messages by their links and records, and return those that may be elsewhere."""
    unsure: dict[str, os.stat_result] = {}
    for message_id in ids:
        status = read_status(files, message_id)
        if status is None or status.st_nlink == 1:
            # Without another link there is no message. Its worker died before it could remove the link.
            located.gone[message_id] = status
            continue
        place = recorded_place(files, message_id, status.st_ino)
        if place is None:
            unsure[message_id] = status
        else:
            located.places[message_id] = place
    return unsure


async def _search(files: QueueDir, wanted: Mapping[str, os.stat_result], located: Located) -> None:
    """List the directories for the files of some links. The record of a message that is found is corrected."""
    left = {status.st_ino: message_id for message_id, status in wanted.items()}
    for directory in _DIRECTORIES:
        if not left:
            return
        for name in await _names_of(files, directory, left):
            place = Place(directory, name)
            message_id = left.pop(find_inode(name, place.descriptor(files)) or -1, None)
            if message_id is None:
                continue
            located.places[message_id] = place
            if directory not in {"lease", "tmp"}:
                record_move(files, item_at(place) or "", place)


async def _names_of(files: QueueDir, directory: str, wanted: Mapping[int, str]) -> list[str]:
    """Return the names in a directory that may be files of some inodes."""
    ids = frozenset(wanted.values())
    found: list[str] = []
    fd = open_directory(".", getattr(files, directory))
    try:
        with os.scandir(fd) as entries:
            for number, entry in enumerate(entries):
                # Some file systems list other inodes than they report for a file.
                if entry.inode() in wanted or given_id(item_at(Place(directory, entry.name)) or "") in ids:
                    found.append(entry.name)
                if number % _SLICE == _SLICE - 1:
                    await asyncio.sleep(0)
    finally:
        os.close(fd)
    return found


def item_at(place: Place) -> str | None:
    """Return the item in a name, without what the state adds to it."""
    if place.directory == "lease":
        leased = parse_lease(place.name)
        return None if leased is None else leased[0]
    if place.directory == "delay":
        delayed = parse_delay(place.name)
        return None if delayed is None else delayed[1]
    return place.name
