"""Remove what dead loads have staged."""

from __future__ import annotations

import os
import time

from qworker.bulk.load_files import GONE, RUN, STAGED, LoadFiles, names_in
from qworker.kit.files import has_entry, remove_tree

__all__ = ["clean_up_staged", "has_staged"]


def has_staged(parent: int) -> bool:
    """Return whether anything is staged below a directory."""
    return has_entry(STAGED, parent)


def clean_up_staged(parent: int, older_than: float) -> int:
    """Remove the runs that are not sealed and were last written before `older_than` (Unix seconds).

    Return their number.

    It blocks, and can take long. A sealed run stays: the rest of its load is published when the load is run again.

    Raises:
        OSError: A run cannot be removed.
    """
    count = 0
    for load in names_in(STAGED, parent):
        folder = LoadFiles(parent, parent, load, mode=0o700, durable=False)
        path = f"{STAGED}/{load}"
        for name in names_in(path, parent):
            if name.startswith(GONE):
                remove_tree(f"{path}/{name}", parent)
            elif name.startswith(RUN) and _last_change(f"{path}/{name}", parent) < older_than:
                folder.discard(name.removeprefix(RUN))
                count += 1
        folder.remove_empty()
    return count


def _last_change(path: str, parent: int) -> float:
    """Return when something was last written to a run, in Unix seconds.

    A new file changes the time of its directory.
    """
    places = [path]
    for partition in names_in(path, parent):
        places.append(f"{path}/{partition}")
        chunks = names_in(f"{path}/{partition}", parent)
        if chunks:
            # Chunks are created one after another, so the last one is the newest.
            places.append(f"{path}/{partition}/{max(chunks)}")
    latest = 0.0
    for place in places:
        try:
            latest = max(latest, os.stat(place, dir_fd=parent, follow_symlinks=False).st_mtime)
        except FileNotFoundError:
            # Another process works there now.
            return time.time()
    return latest
