"""Putting published messages on the disk: first the contents, then the names."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from qworker.errors import PublishUncertain, StorageFull
from qworker.kit.group_commit import GroupCommit
from qworker.kit.store_errors import FULL

__all__ = ["sync_bodies", "sync_names"]


async def sync_bodies(commit: GroupCommit, files: Sequence[int]) -> None:
    """Put the contents of new files on the disk.

    Raises:
        StorageFull: The disk is full.
        PublishUncertain: The contents are not on the disk.
    """
    try:
        await commit.data(files)
    except OSError as error:
        if error.errno in FULL:
            raise StorageFull(f"cannot publish: {error.strerror}: free some space") from error
        raise PublishUncertain(f"cannot publish: the disk could not store the data: {error.strerror}") from error


async def sync_names(commit: GroupCommit, directories: Collection[int]) -> None:
    """Put the names in directories on the disk.

    Raises:
        PublishUncertain: The outcome is unknown.
    """
    try:
        await commit.directories(directories)
    except OSError as error:
        raise PublishUncertain(
            "the message may or may not be stored: the disk could not store the file names: "
            f"{error.strerror}: publish it again with the same id"
        ) from error
