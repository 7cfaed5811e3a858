"""Remove old segments of a directory's logs, the oldest beyond a size, and the complete logs of dead processes."""

from __future__ import annotations

import asyncio
import os
import secrets

import msgspec

from qworker.history.log_writer import is_dead
from qworker.kit.files import remove_tree, try_unlink
from qworker.kit.opening import open_directory
from qworker.kit.segments.format import segment_name
from qworker.kit.segments.log import Log

__all__ = ["prune", "remove_log"]

# The start of the name of a directory that is being removed.
_GONE = ".gone-"
# Seconds after which a directory that never became a log is removed.
_STRAY = 3600.0


class _Segment(msgspec.Struct, frozen=True):
    """The file of one segment.

    Attributes:
        at: Unix seconds of its last write.
        log: The name of its log.
        id: Its id.
        size: Bytes on the disk.
        in_use: True if a living process may write it.
    """

    at: float
    log: str
    id: int
    size: int
    in_use: bool


async def prune(root: int, age: float, size: int, now: float) -> int:
    """Remove segments that are older than `age` seconds, and the oldest beyond `size` bytes. Return their number.

    Other processes may do the same at the same time.

    Raises:
        OSError: Something cannot be read or removed. All other segments are removed.
    """
    segments: list[_Segment] = []
    for name in os.listdir(root):
        if name.startswith(_GONE):
            remove_tree(name, root)
        elif name[0] != ".":
            segments += _segments(root, name, now)
        await asyncio.sleep(0)
    segments.sort(key=lambda one: one.at)
    total = sum(one.size for one in segments)
    count = 0
    failed: OSError | None = None
    for one in segments:
        if one.at >= now - age and total <= size:
            break
        try:
            if one.in_use or not _remove_segment(root, one):
                continue
        except OSError as error:
            # An immutable file, for example: it keeps no other segment.
            failed = failed or error
            continue
        count += 1
        total -= one.size
        await asyncio.sleep(0)
    if failed is not None:
        raise failed
    for log in {one.log for one in segments if not one.in_use}:
        _remove_if_empty(root, log)
    return count


def remove_log(root: int, name: str) -> None:
    """Remove a complete log. Idempotent.

    Raises:
        OSError: It cannot be removed.
    """
    gone = f"{_GONE}{secrets.token_hex(8)}"
    try:
        os.rename(name, gone, src_dir_fd=root, dst_dir_fd=root)
    except FileNotFoundError:
        return
    remove_tree(gone, root)


def _segments(root: int, name: str, now: float) -> list[_Segment]:
    try:
        folder = open_directory(name, root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        ids = Log.listed(folder)
        dead = is_dead(folder)
        if not ids and dead and os.fstat(folder).st_mtime < now - _STRAY:
            remove_log(root, name)
        found: list[_Segment] = []
        for own in ids:
            try:
                status = os.stat(segment_name(own), dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                continue
            in_use = own == ids[-1] and not dead
            found.append(_Segment(status.st_mtime, name, own, status.st_blocks * 512, in_use))
        return found
    finally:
        os.close(folder)


def _remove_segment(root: int, segment: _Segment) -> bool:
    # False: another process removed it.
    return try_unlink(f"{segment.log}/{segment_name(segment.id)}", root)


def _remove_if_empty(root: int, log: str) -> None:
    try:
        folder = open_directory(log, root)
    except FileNotFoundError:
        return
    try:
        empty = not Log.listed(folder) and is_dead(folder)
    finally:
        os.close(folder)
    if empty:
        remove_log(root, log)
