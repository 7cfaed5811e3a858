"""Operations on names in directories that are given by descriptors, so no path can be swapped below them."""

from __future__ import annotations

import os
import shutil

__all__ = ["find_inode", "has_entry", "remove_entry", "try_unlink"]


def has_entry(name: str, directory: int) -> bool:
    """Return whether a directory has a name."""
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def find_inode(name: str, directory: int) -> int | None:
    """Return the inode of a name, or None if it is gone."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return None


def try_unlink(name: str, directory: int) -> bool:
    """Remove a file and return whether it existed."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return False
    return True


def remove_entry(name: str, directory: int) -> bool:
    """Remove a file, or a directory that another program put there, and return whether it existed.

    No link in a directory is followed.
    """
    try:
        return try_unlink(name, directory)
    except IsADirectoryError:
        shutil.rmtree(name, dir_fd=directory)
    return True
