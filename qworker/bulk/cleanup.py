"""Removing what dead loads have staged."""

from __future__ import annotations

import os
import time

from qworker.bulk.load_files import GONE, RUN, STAGED, LoadFiles, names_in, remove_tree

__all__ = ["clean_up_staged", "has_staged"]


def has_staged(parent: int) -> bool:
    """Whether there is anything to sweep."""
    try:
        os.stat(STAGED, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def clean_up_staged(parent: int, older_than: float) -> int:
    """Remove runs that nobody sealed, and in which nothing was written since a moment; count them. May take long.

    A run that is sealed stays: the rest of its load is published when the load is run again.

    Raises:
        OSError: one cannot be removed.
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
    """When something was last written to a run: a file changes its directory's time when it is made."""
    places = [path]
    for partition in names_in(path, parent):
        places.append(f"{path}/{partition}")
        chunks = names_in(f"{path}/{partition}", parent)
        if chunks:
            # They are made one after another.
            places.append(f"{path}/{partition}/{max(chunks)}")
    latest = 0.0
    for place in places:
        try:
            latest = max(latest, os.stat(place, dir_fd=parent, follow_symlinks=False).st_mtime)
        except FileNotFoundError:
            # Somebody is at work there.
            return time.time()
    return latest
