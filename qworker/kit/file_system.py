"""What the file system of a directory promises: whether what was synced on it is found after a power cut."""

from __future__ import annotations

import os
from typing import Self

from qworker.kit.linux import open_path, path_of
from qworker.kit.mounts import Mount, ext4_options, find_mount
from qworker.kit.store_errors import store_errors

__all__ = ["NETWORK", "FileSystem", "durability_at"]

NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "lustre", "afs", "virtiofs"})
_JOURNALED = frozenset({"xfs", "btrfs", "f2fs", "zfs", "bcachefs", "jfs"})
# Mount options of ext4, xfs and btrfs; of ext3; of reiserfs; of f2fs.
_NO_BARRIERS = frozenset({"nobarrier", "barrier=0", "barrier=none", "fsync_mode=nobarrier"})


class FileSystem:
    """The file system that a directory is on, and what a sync on it is worth; `kind` is empty where the kernel does not show it."""

    __slots__ = ("has_barriers", "is_local", "is_ordered", "keeps_renames", "kind", "source")

    def __init__(self, directory: int) -> None:
        mount = _mount_of(directory)
        self.kind = "" if mount is None else mount.kind
        self.source = "" if mount is None else mount.source
        options = frozenset[str]() if mount is None else mount.options
        if self.kind in {"ext4", "ext3"}:
            options |= ext4_options(os.fstat(directory).st_dev, self.source)
        journal = {option for option in options if option.startswith("data=")}
        # A synced rename is found after a power cut. Without a journal a torn one can lose a file that was there.
        self.keeps_renames = bool(journal) or self.kind in _JOURNALED
        # A sync waits until the disk has emptied its cache. Without it a sync survives the system, and not a power cut.
        self.has_barriers = options.isdisjoint(_NO_BARRIERS)
        # ext4 in its usual mode: a journal commit carries everything that was allocated before it (`GroupCommit.data`).
        self.is_ordered = "data=ordered" in journal
        self.is_local = self.kind not in NETWORK and not self.kind.startswith("fuse")

    @property
    def survives_power_loss(self) -> bool:
        """Whether what was synced is found after a power cut, as far as the file system is concerned."""
        return self.keeps_renames and self.has_barriers

    @classmethod
    def of(cls, path: str) -> Self:
        """The file system of a directory, or of the nearest one above it that exists; nothing is left open.

        Raises:
            OSError: it cannot be opened.
        """
        while not os.path.isdir(path):
            path = os.path.dirname(path)
        # One that this user may not read is on a file system all the same.
        fd = open_path(path)
        try:
            return cls(fd)
        finally:
            os.close(fd)


def durability_at(path: str, *, sync: bool) -> str:
    """The `Backend.durability` of a directory: `disk` if it is synced on a file system that keeps what was synced, else `process`.

    Raises:
        BackendError: it cannot be looked at.
    """
    if not sync:
        return "process"
    with store_errors(f"open {path}"):
        return "disk" if FileSystem.of(path).survives_power_loss else "process"


def _mount_of(directory: int) -> Mount | None:
    try:
        return find_mount(os.readlink(path_of(directory)))
    except OSError:
        # Without /proc nothing is known, and nothing promised: `qworker doctor` gives the reason.
        return None
