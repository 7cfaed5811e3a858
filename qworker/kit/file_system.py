"""The promises of a directory's file system: whether synced data is found after a power failure."""

from __future__ import annotations

import os
from typing import Self

from qworker.kit.linux import file_system_number, open_path, path_of
from qworker.kit.mounts import Mount, ext4_options, find_mount
from qworker.kit.store_errors import store_errors
from qworker.url import BackendURL

__all__ = ["LOCAL", "FileSystem", "durability_at", "shared_option"]

# Only this host uses these. Every other type may be shared by hosts, which do not see each other's locks and changes.
LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "overlay"})
# The numbers of these types, as `statfs` returns them: ext2 to ext4 have one. A chroot shows no mounts.
_LOCAL_NUMBERS = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1, 0x01021994, 0x794C7630})
_JOURNALED = frozenset({"xfs", "btrfs", "f2fs", "zfs", "bcachefs", "jfs"})
# Mount options of ext4, xfs and btrfs; of ext3; of reiserfs; of f2fs.
_NO_BARRIERS = frozenset({"nobarrier", "barrier=0", "barrier=none", "fsync_mode=nobarrier"})


class FileSystem:
    """The file system of a directory, and what a sync on it promises.

    `kind` is empty if the kernel does not show the type.
    """

    __slots__ = ("has_barriers", "is_local", "is_ordered", "keeps_renames", "kind", "source")

    def __init__(self, directory: int) -> None:
        mount = _mount_of(directory)
        self.kind = "" if mount is None else mount.kind
        self.source = "" if mount is None else mount.source
        options = frozenset[str]() if mount is None else mount.options
        if self.kind in {"ext4", "ext3"}:
            options |= ext4_options(os.fstat(directory).st_dev, self.source)
        journal = {option for option in options if option.startswith("data=")}
        # A synced rename is found after a power failure. Without a journal, a torn rename can lose a file that existed.
        self.keeps_renames = bool(journal) or self.kind in _JOURNALED
        # A sync waits until the disk has emptied its cache. Without this, a sync survives a system crash but not a
        # power failure.
        self.has_barriers = options.isdisjoint(_NO_BARRIERS)
        # ext4 in its usual mode: a journal commit writes everything that was allocated before it (`GroupCommit.data`).
        self.is_ordered = "data=ordered" in journal
        self.is_local = self.kind in LOCAL if self.kind else file_system_number(directory) in _LOCAL_NUMBERS

    @property
    def survives_power_loss(self) -> bool:
        """True if the file system keeps synced data after a power failure."""
        return self.keeps_renames and self.has_barriers

    def describe(self, shared: bool | None) -> str:
        """Return the type and the source of the file system, and its class: local or shared.

        Args:
            shared: The class that the URL gives, if it gives one.
        """
        name = f"{self.kind or 'an unknown file system'} on {self.source}" if self.source else self.kind or "unknown"
        if shared is not None:
            return f"{name}, {'shared' if shared else 'local'} (?shared={shared:d})"
        return f"{name}, {'local' if self.is_local else 'shared'}"

    @classmethod
    def of(cls, path: str) -> Self:
        """Return the file system of a directory, or of its nearest existing ancestor. Nothing is left open.

        Raises:
            OSError: It cannot be opened.
        """
        while not os.path.isdir(path):
            path = os.path.dirname(path)
        # A directory that this user cannot read still has a file system.
        fd = open_path(path)
        try:
            return cls(fd)
        finally:
            os.close(fd)


def shared_option(url: BackendURL) -> bool | None:
    """Return the value of `?shared=0|1`, or None without it: then the type of the file system counts.

    Raises:
        InvalidURL: It has another value.
    """
    return url.choice("shared", "0", ("0", "1")) == "1" if "shared" in url.options else None


def durability_at(path: str, *, sync: bool) -> str:
    """Return the `Backend.durability` of a directory.

    It is `disk` if the directory is synced on a file system that keeps synced data, and `process` otherwise.

    Raises:
        BackendError: It cannot be checked.
    """
    if not sync:
        return "process"
    with store_errors(f"open {path}"):
        return "disk" if FileSystem.of(path).survives_power_loss else "process"


def _mount_of(directory: int) -> Mount | None:
    try:
        return find_mount(os.readlink(path_of(directory)))
    except OSError:
        # Without /proc nothing is known, and nothing is promised. `qworker doctor` shows the reason.
        return None
