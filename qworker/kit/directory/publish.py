"""Putting published messages on the disk: first the contents, then the names."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from qworker.errors import BackendError, PublishUncertain
from qworker.kit.group_commit import GroupCommit
from qworker.kit.store_errors import FINAL, store_error

__all__ = ["publish_error", "sync_bodies", "sync_names"]


def publish_error(error: OSError) -> BackendError:
    """Return what a publish raises for an error of the store before its messages are visible."""
    known = store_error(error, "publish")
    if error.errno in FINAL:
        return known
    return PublishUncertain(f"the message may or may not be stored: {known}: publish it again with the same id")


async def sync_bodies(commit: GroupCommit, files: Sequence[int]) -> None:
    """Put the contents of new files on the disk.

    Raises:
        StorageFull, PermissionDenied, PublishUncertain: The contents are not on the disk.
    """
    try:
        await commit.data(files)
    except OSError as error:
        raise publish_error(error) from error


async def sync_names(commit: GroupCommit, directories: Collection[int]) -> None:
    """Put the names in directories on the disk.

    Raises:
        PublishUncertain: The messages are visible, but perhaps not after a power cut, whatever the error is.
    """
    try:
        await commit.directories(directories)
    except OSError as error:
        raise PublishUncertain(
            "the message may or may not be stored: the disk could not store the file names: "
            f"{error.strerror}: publish it again with the same id"
        ) from error
