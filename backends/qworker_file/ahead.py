"""Reading ahead: a backlog that is older than the page cache is read by the disk side by side, not one message after another.

A lease reads each body on the loop. From the cache that costs microseconds; from a disk it holds up the loop for each of them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable

from qworker.files import READ

__all__ = ["ReadAhead"]

# Files asked for at once.
_MANY = 128
# A claim that takes so many times what the fastest took has waited for the disk, when others beside it have, too.
_TIMES, _IN_A_ROW = 2.5, 3
# How fast the memory of the fastest claim fades, for machines whose speed changes.
_FADING = 1.0005


class ReadAhead:
    """Notices claims that wait for the disk.

    Args:
        directory: the descriptor of the directory whose files are claimed.
        following: the names that are claimed next.
    """

    __slots__ = ("_asked", "_directory", "_fastest", "_following", "_slow")

    def __init__(self, directory: int, following: Callable[[int], Iterable[str]]) -> None:
        self._directory = directory
        self._following = following
        self._fastest = 1.0
        self._slow = 0
        # How many of the next files were asked for already.
        self._asked = 0

    def claimed(self, seconds: float) -> None:
        """A claim took so long."""
        fastest = self._fastest * _FADING
        self._fastest = seconds if seconds < fastest else fastest
        if self._asked:
            self._asked -= 1
        elif seconds < fastest * _TIMES:
            self._slow = 0
        else:
            self._slow += 1
            if self._slow >= _IN_A_ROW:
                self._slow, self._asked = 0, _MANY
                self._ask()

    def _ask(self) -> None:
        for name in self._following(_MANY):
            try:
                fd = os.open(name, READ, dir_fd=self._directory)
            except OSError:
                # Whatever is wrong with it, its claim finds out.
                continue
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
            except OSError as error:
                # Only a hint; a pipe in a message's place takes none.
                if error.errno not in {errno.ESPIPE, errno.EINVAL}:
                    raise
            finally:
                os.close(fd)
