"""Reading ahead: the disk reads many messages of a backlog at once that is older than the page cache.

A lease reads each body on the loop. From the cache that costs microseconds; from a disk it holds up the loop for each
of them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable

from qworker.kit.files import READ

__all__ = ["ReadAhead"]

# Files asked for at once.
_MANY = 128
# A claim that takes so many times what the fastest took has waited for the disk, if its neighbours have, too.
_TIMES, _IN_A_ROW = 2.5, 3
# What was asked for must be claimed this much faster. If not, the machine is slow and not the disk: next time so many
# times more claims in a row must have waited, and at most so many.
_WORTH, _DOUBT, _MOST_DOUBT = 2.0, 4, 4096
# How fast the memory of the fastest claim fades, for machines whose speed changes.
_FADING = 1.0005


class ReadAhead:
    """Notices claims that wait for the disk.

    Args:
        directory: The descriptor of the directory whose files are claimed.
        following: Gives the names that are claimed next.
    """

    __slots__ = ("_asked", "_directory", "_fastest", "_following", "_needed", "_slow", "_taken", "_waited")

    def __init__(self, directory: int, following: Callable[[int], Iterable[str]]) -> None:
        self._directory = directory
        self._following = following
        self._fastest = 1.0
        # Slow claims in a row, how many of them it takes, and their seconds.
        self._slow = 0
        self._needed = _IN_A_ROW
        self._waited = 0.0
        # How many of the next files were asked for already, and the seconds that those before them took.
        self._asked = 0
        self._taken = 0.0

    def claimed(self, seconds: float) -> None:
        """Note how long a claim took."""
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
        """Find out whether asking was of use."""
        if self._taken / _MANY * _WORTH <= self._waited / self._slow:
            self._needed = _IN_A_ROW
        else:
            self._needed = min(self._needed * _DOUBT, _MOST_DOUBT)
        self._slow, self._waited = 0, 0.0

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
