"""Which mounted file system a path is on, as the kernel tells it under /proc."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

import msgspec

from qworker.kit.linux import read_ext4_options, read_mountinfo

__all__ = ["Mount", "ext4_options", "find_mount", "parse_mounts"]

# Spaces and line ends of names are written in octal.
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """One line of mountinfo."""

    id: int
    # The mount that this one is mounted on.
    parent: int
    # Where it is mounted; absolute, without a slash at its end (so that the root is empty).
    point: str
    kind: str
    # The device, or what a virtual file system gives for it.
    source: str
    # Of the mount and of the file system.
    options: frozenset[str]

    def holds(self, path: str) -> bool:
        """Whether a path is, by its name, below the mount point."""
        return path.startswith(f"{self.point}/") or path == self.point


def find_mount(path: str) -> Mount | None:
    """The mount that an absolute path without links is on; None where the kernel does not show it.

    The device number of the path is no help: a btrfs subvolume has one of its own, which no mount has.

    Raises:
        OSError: /proc is not mounted.
    """
    return _deepest(path, [mount for mount in parse_mounts(read_mountinfo()) if mount.holds(path)])


def parse_mounts(lines: Iterable[str]) -> Iterator[Mount]:
    """The mounts of a mountinfo file; lines of another form are passed over."""
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
    """Of the mounts above a path, the one that a walk to it ends on.

    Not simply the longest: a mount over a directory hides those that were made below it before.
    """
    ids = {mount.id for mount in mounts}
    roots = [mount for mount in mounts if mount.parent not in ids or mount.parent == mount.id]
    found = max(reversed(roots), key=lambda mount: len(mount.point), default=None)
    while found is not None:
        on = [mount for mount in mounts if mount.parent == found.id != mount.id]
        if not on:
            break
        # The first that the walk comes across; of two on one directory the later one, which covers the other.
        found = min(reversed(on), key=lambda mount: len(mount.point))
    return found


def _unescaped(name: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), name)


def ext4_options(device: int, source: str) -> frozenset[str]:
    """The options in force on an ext4 file system, defaults among them; none where they are not shown.

    Args:
        device: its number, as `stat` gives it.
        source: as mountinfo gives it, which may be another name of the device (a mapper's).
    """
    shown = os.path.realpath(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for name in (os.path.basename(shown), os.path.basename(source)):
        options = read_ext4_options(name)
        if options is not None:
            return options
    # A container may hide them: nothing is promised then.
    return frozenset()
