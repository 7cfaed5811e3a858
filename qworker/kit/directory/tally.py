"""Counts of the messages of a queue that is a directory, made in one pass over the names in constant memory."""

from __future__ import annotations

from collections.abc import Sequence

from qworker.message import State

__all__ = ["Tally"]


class Tally:
    """Counts by state, and the items that may be the oldest ready ones.

    Attributes:
        counts: The number of messages in each state.
        next_due: Unix seconds at which the next delayed message is due. None: no message is delayed.
    """

    __slots__ = ("_firsts", "counts", "next_due")

    def __init__(self) -> None:
        self.counts = dict.fromkeys(State, 0)
        self.next_due: float | None = None
        # The smallest item for each first character. An item of a higher priority sorts before older ones.
        self._firsts: dict[str, str] = {}

    @property
    def first_items(self) -> list[str]:
        """The smallest ready item of each priority. The oldest ready message is one of them."""
        return list(self._firsts.values())

    def add(self, state: State, items: Sequence[str]) -> None:
        """Count items of one state.

        Args:
            state: Their state.
            items: Their names, without what the state adds to them.
        """
        if not items:
            return
        self.counts[state] += len(items)
        if state is State.READY:
            self._add_firsts(items)

    def add_due(self, times: Sequence[float]) -> None:
        """Add the due times of delayed messages, in Unix seconds."""
        if times:
            self.next_due = min(times) if self.next_due is None else min(self.next_due, *times)

    def _add_firsts(self, items: Sequence[str]) -> None:
        first = min(items)
        # Nearly always all items have one priority. They are compared in C then.
        smallest = (first,) if first[0] == max(items)[0] else items
        for item in smallest:
            known = self._firsts.get(item[0])
            if known is None or item < known:
                self._firsts[item[0]] = item
