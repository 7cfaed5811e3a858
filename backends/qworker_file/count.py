"""One count of a queue with what the names say: tasks, and the messages that are leased next and last."""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Sequence

from qworker.bulk.load_files import names_in
from qworker.kit.directory.tally import Tally
from qworker.message import State
from qworker_file.layout import FORMAT_FILE, MESSAGE_PARTS
from qworker_file.loads import is_load
from qworker_file.names import count_labels

__all__ = ["DetailedTally", "TooManyMessages", "version_of"]

# Message ids at each end of the order.
_ENDS = 50
# Tasks that are counted by their names. Other programs can give each message a task of its own.
_MOST_TASKS = 200


class TooManyMessages(Exception):
    """The queue has more messages than this count may list."""


class DetailedTally(Tally):
    """A tally that also counts the tasks of ready messages.

    Args:
        most: The largest number of messages to count. None: any number.

    Attributes:
        tasks: The number of ready messages of each task. "" counts those without a task in their name, and those of
            further tasks.
    """

    __slots__ = ("_first", "_last", "_most", "tasks")

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self._most = most
        self.tasks: Counter[str] = Counter()
        # Both sorted, in the order in which messages are leased.
        self._first: list[str] = []
        self._last: list[str] = []

    @property
    def first(self) -> list[str]:
        """The items that are leased next, the first one first."""
        return self._first

    @property
    def last(self) -> list[str]:
        """The items that are leased last, the last one first."""
        return self._last[::-1]

    def add(self, state: State, items: Sequence[str]) -> None:
        """Count items of one state.

        Raises:
            TooManyMessages: There are more than `most`.
        """
        super().add(state, items)
        # Before the whole directory is listed.
        if self._most is not None and sum(self.counts.values()) > self._most:
            raise TooManyMessages
        if state is State.READY and items:
            self._add_tasks(items)
            self._add_ends(items)

    def _add_tasks(self, items: Sequence[str]) -> None:
        for task, count in count_labels(items).items():
            known = task in self.tasks or len(self.tasks) < _MOST_TASKS
            self.tasks[task if known else ""] += count

    def _add_ends(self, items: Sequence[str]) -> None:
        if len(self._first) == _ENDS:
            # Comparing with the ends first is what makes a pass over a million names cheap.
            lowest, highest = self._first[-1], self._last[0]
            before = [item for item in items if item < lowest]
            after = [item for item in items if item > highest]
        else:
            before = after = list(items)
        if before:
            self._first = heapq.nsmallest(_ENDS, self._first + before)
        if after:
            self._last = heapq.nlargest(_ENDS, self._last + after)[::-1]


def version_of(queue: str, parent: int) -> str | None:
    """Return a text that changes with every change of a queue's directories and format, which are not opened.

    Args:
        queue: The path of the queue.
        parent: The open directory from which the path begins.

    Returns:
        None: the queue has loads, which change without it.

    Raises:
        FileNotFoundError: The queue does not exist.
        OSError: The queue cannot be read.
    """
    base = os.stat(queue, dir_fd=parent).st_mtime_ns
    if any(map(is_load, names_in(queue, parent))):
        return None
    parts = [_changed_at(f"{queue}/{part}", parent) for part in (*MESSAGE_PARTS, FORMAT_FILE)]
    return "-".join(map(str, [base, *parts]))


def _changed_at(path: str, parent: int) -> int:
    """Return the time of a part of a queue, or 0 if it does not exist."""
    try:
        return os.stat(path, dir_fd=parent).st_mtime_ns
    except FileNotFoundError:
        return 0
