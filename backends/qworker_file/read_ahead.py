"""Reading ahead: if a backlog is older than the page cache, the disk reads many of its messages at once.

A lease reads each body on the loop. From the cache that takes microseconds. From a disk, each read blocks the loop.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable

from qworker.kit.opening import open_entry

__all__ = ["ReadAhead"]

# Files requested at once.
_MANY = 128
# A claim that takes this many times as long as the fastest one has waited for the disk, if the claims next to it have
# waited, too.
_TIMES, _IN_A_ROW = 2.5, 3
# The requested files must be claimed this much faster. If not, the machine is slow and not the disk: next time this
# many times more claims in a row must have waited, and at most the last number.
_WORTH, _DOUBT, _MOST_DOUBT = 2.0, 4, 4096
# How fast the memory of the fastest claim fades, for machines whose speed changes.
_FADING = 1.0005


class ReadAhead:
    """Notices claims that wait for the disk.

    Args:
        directory: The descriptor of the directory whose files are claimed.
        following: Returns the names that are claimed next.
    """

    __slots__ = ("_asked", "_directory", "_fastest", "_following", "_needed", "_slow", "_taken", "_waited")

    def __init__(self, directory: int, following: Callable[[int], Iterable[str]]) -> None:
        self._directory = directory
        self._following = following
        self._fastest = 1.0
        # The slow claims in a row, how many of them are needed, and their seconds.
        self._slow = 0
        self._needed = _IN_A_ROW
        self._waited = 0.0
        # The number of the next files that were requested already, and the seconds that those before them took.
        self._asked = 0
        self._taken = 0.0

    def claimed(self, seconds: float) -> None:
        """Record how long a claim took."""
        fastest = self._fastest * _FADING
        self._fastest = seconds if seconds < fastest else fastest
        if self._asked:
            self._asked -= 1
            self._taken += seconds
            if not self._asked:
                self._judge()
        elif seconds < fastest * _TIMES:
            self._slow = 0
            self._waited = 0.0
        else:
            self._slow += 1
            self._waited += seconds
            if self._slow >= self._needed:
                self._asked, self._taken = _MANY, 0.0
                self._ask()

    def _judge(self) -> None:
        """Decide whether the requests were useful."""
        if self._taken / _MANY * _WORTH <= self._waited / self._slow:
            self._needed = _IN_A_ROW
        else:
            self._needed = min(self._needed * _DOUBT, _MOST_DOUBT)
        self._slow, self._waited = 0, 0.0

    def _ask(self) -> None:
        for name in self._following(_MANY):
            try:
                fd = open_entry(name, os.O_RDONLY, self._directory)
            except OSError:
                # If something is wrong with the file, its claim will show that.
                continue
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
            except OSError as error:
                # This is only a hint. A pipe in the place of a message does not accept it.
                if error.errno not in {errno.ESPIPE, errno.EINVAL}:
                    raise
            finally:
                os.close(fd)
