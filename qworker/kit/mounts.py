"""Find the mounted file system of a path, as the kernel shows it under /proc."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

import msgspec

from qworker.kit.linux import read_ext4_options, read_mountinfo

__all__ = ["Mount", "ext4_options", "find_mount", "parse_mounts"]

# Spaces and line ends in names are written in octal.
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """One line of mountinfo.

    Attributes:
        id: The number of the mount.
        parent: The mount on which this one is mounted.
        point: Where it is mounted. The path is absolute, without a slash at its end (so that the root is empty).
        kind: The type of the file system.
        source: The device, or the name that a virtual file system shows for it.
        options: The options of the mount and of the file system.
    """

    id: int
    parent: int
    point: str
    kind: str
    source: str
    options: frozenset[str]

    def holds(self, path: str) -> bool:
        """Return whether a path is, by its name, below the mount point."""
        return path.startswith(f"{self.point}/") or path == self.point


def find_mount(path: str) -> Mount | None:
    """Return the mount of an absolute path without links, or None if the kernel does not show it.

    The device number of the path does not identify it: a btrfs subvolume has its own number, which no mount has.

    Raises:
        OSError: /proc is not mounted.
    """
    return _deepest(path, [mount for mount in parse_mounts(read_mountinfo()) if mount.holds(path)])


def parse_mounts(lines: Iterable[str]) -> Iterator[Mount]:
    """Yield the mounts of a mountinfo file. Lines of another form are skipped."""
    for line in lines:
        before, separator, after = line.rstrip("\n").partition(" - ")
        place, device = before.split(" "), after.split(" ")
        if not separator or len(place) < 6 or len(device) < 3:
            continue
        yield Mount(
            id=int(place[0]),
            parent=int(place[1]),
            point=_unescaped(place[4]).rstrip("/"),
            kind=device[0],
            source=_unescaped(device[1]),
            options=frozenset((*place[5].split(","), *device[2].split(","))),
        )


def _deepest(path: str, mounts: list[Mount]) -> Mount | None:
    """Return the mount on which a walk to the path ends, out of the mounts above it.

    It is not always the longest one: a mount over a directory hides those that were mounted below it before.
    """
    ids = {mount.id for mount in mounts}
    roots = [mount for mount in mounts if mount.parent not in ids or mount.parent == mount.id]
    found = max(reversed(roots), key=lambda mount: len(mount.point), default=None)
    while found is not None:
        on = [mount for mount in mounts if mount.parent == found.id != mount.id]
        if not on:
            break
        # The first one on the walk. Of two on one directory it is the later one, which covers the other.
        found = min(reversed(on), key=lambda mount: len(mount.point))
    return found


def _unescaped(name: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), name)


def ext4_options(device: int, source: str) -> frozenset[str]:
    """Return the options in force on an ext4 file system, including defaults, or none if they are not shown.

    Args:
        device: Its number, as `stat` returns it.
        source: Its name in mountinfo, which may be another name of the device (a mapper's).
    """
    shown = os.path.realpath(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for name in (os.path.basename(shown), os.path.basename(source)):
        options = read_ext4_options(name)
        if options is not None:
            return options
    # A container may hide them. Then nothing is promised.
    return frozenset()
