"""The sizes of the messages that wait in a directory, for `qworker doctor`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from qworker.kit.doctor_check import Check, CheckStatus
from qworker.kit.doctor_sizes import check_sizes
from qworker.kit.store_errors import store_error
from qworker.kit.threads import BlockingCall, run_in_thread

__all__ = ["examine_bodies"]

# Files that are checked.
_MOST = 200_000


async def examine_bodies(root: Path, patterns: Iterable[str], most: int | None) -> list[Check]:
    """Check the sizes of the messages that wait. Without a `max_body` there is nothing to check.

    Args:
        root: The directory of the store, which may not exist.
        patterns: The directories with messages that wait, relative to the root.
        most: The largest body in bytes. None: any size.
    """
    return [] if most is None else [await run_in_thread(BlockingCall.CHECK, _examine, root, tuple(patterns), most)]


def _examine(root: Path, patterns: Iterable[str], most: int) -> Check:
    try:
        return check_sizes(islice(_sizes(root, patterns), _MOST), most)
    except OSError as error:
        detail = f"unknown: {store_error(error, 'read the sizes of messages')}"
        return Check("message sizes", CheckStatus.WARN, detail, f"make {root} readable for this user")


def _sizes(root: Path, patterns: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the path of each file that waits, and its size in bytes."""
    for pattern in patterns:
        for directory in root.glob(pattern):
            if directory.relative_to(root).parts[0][0] == "." or not directory.is_dir():
                continue
            with os.scandir(directory) as entries:
                for entry in entries:
                    try:
                        if entry.name[0] != "." and entry.is_file(follow_symlinks=False):
                            yield (
                                str(directory.relative_to(root) / entry.name),
                                entry.stat(follow_symlinks=False).st_size,
                            )
                    except FileNotFoundError:
                        # A worker took it in the meantime.
                        continue
