"""The names of items that are enqueued."""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import time

import msgspec

from qworker.message import Draft
from qworker_fsq.environment import Constants
from qworker_fsq.names import construct

__all__ = ["Plan", "Planner", "hash_id"]

# Nanoseconds: messages that were enqueued this close to one another, in another store, keep the order in which they
# come.
_SAME_TIME_NS = 1_000_000
_serial = itertools.count()


class _Stamps:
    """The first four fields of names: a time, in local time, and this process.

    Args:
        constants: The notation of a time.
    """

    def __init__(self, constants: Constants) -> None:
        self._timefmt = constants.timefmt
        self._second = -1
        self._stamp = ""
        self.hostname = socket.gethostname()

    def make(self, ns: int, original_id: str | None = None) -> tuple[str, str, str, str]:
        """Return timestamp, entropy, pid and hostname for a time in nanoseconds.

        A message from another store has a number of its id there instead of the pid. It is recognized by that if it is
        moved twice.
        """
        second, rest = divmod(ns, 1_000_000_000)
        if second != self._second:
            self._second = second
            self._stamp = time.strftime(self._timefmt, time.localtime(second))
        pid = os.getpid() if original_id is None else hash_id(original_id)
        return self._stamp, f"{rest:09d}", str(pid), self.hostname


class Plan(msgspec.Struct, gc=False):
    """The plan for storing one item.

    Attributes:
        draft: The message.
        ns: The time in its name.
        name: Its name in queue/.
        temporary: Its name in tmp/ while it is there.
        due: When it is due, in Unix seconds; None: now.
        fd: A descriptor of the file, or -1.
    """

    draft: Draft
    ns: int
    name: str
    temporary: str = ""
    due: float | None = None
    fd: int = -1


class Planner:
    """Names the items of one store.

    Args:
        constants: The standard's constants.
    """

    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        self._stamps = _Stamps(constants)
        self._last_ns = 0
        self._last_given_ns = 0

    def plan(self, draft: Draft, now: float) -> Plan:
        """Plan how a message is stored.

        Raises:
            NotSupported: It cannot be stored.
        """
        if draft.enqueued_at is None:
            ns = self._last_ns = max(int(now * 1e9), self._last_ns + 1)
        else:
            ns = self._given_ns(draft.enqueued_at)
        due = now + draft.delay if draft.due_at is None else draft.due_at
        return Plan(draft, ns, self._name(draft, ns), due=due if due > now else None)

    def _given_ns(self, moment: float) -> int:
        """Return a given time, to the microsecond, that differs from others, because it becomes id and order."""
        base = round(moment * 1e6) * 1000
        if base <= self._last_given_ns < base + _SAME_TIME_NS:
            self._last_given_ns += 1
        else:
            self._last_given_ns = base + next(_serial) % 1000
        return self._last_given_ns

    def _name(self, draft: Draft, ns: int) -> str:
        return construct((*self._stamps.make(ns, draft.original_id), str(draft.tries), *draft.argv), self._constants)

    def rename(self, plan: Plan) -> None:
        """Give another name to an item whose name is taken."""
        plan.ns += 1
        plan.name = self._name(plan.draft, plan.ns)


def hash_id(original_id: str) -> int:
    """Return a number of an id of another store, far above any pid."""
    return (1 << 48) + int.from_bytes(hashlib.sha256(original_id.encode()).digest()[:6])
