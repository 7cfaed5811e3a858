"""The names of messages that are published."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import msgspec

from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import NotSupported
from qworker.message import Draft
from qworker.names import new_id, new_ids, to_message_id
from qworker_file.names import MAX_OWN, byte_length, delay_name, item_name, stem_for
from qworker_file.unique_keys import make_mark

__all__ = ["Plan", "Planner"]

# Nanoseconds: the largest distance between messages from another store that count as enqueued at the same time.
_SAME_TIME_NS = 1_000_000

# Bytes by which the tries can grow. With more than MAX_OWN a name is replaced, which can lose a given id and its marks.
_GROWTH = 8

_serial = itertools.count(1)


class Plan(msgspec.Struct, gc=False):
    """The plan for storing one message.

    Attributes:
        body: The bytes to write.
        temporary: The file's name in tmp/.
        name: Its name in queue/ or delay/.
        delayed: Whether it goes to delay/.
        given_id: The id, if its publisher chose it.
        unique_key: Its unique key, if it has one.
        key_mark: The mark of that key in the name.
        fd: A descriptor of the file. -1: not opened yet. -2: closed.
    """

    body: bytes
    temporary: str
    name: str
    delayed: bool
    given_id: str | None
    unique_key: str | None = None
    key_mark: str = ""
    fd: int = -1


class Planner:
    """Names the messages of one store.

    Args:
        clock: The store's clock.
        local_time: Whether timestamps are in local time.
    """

    def __init__(self, clock: Clock, *, local_time: bool) -> None:
        self._clock = clock
        self._local = local_time
        self._last_ns = 0
        self._last_given_ns = 0
        self._own_serial = next(_serial)

    def plan(self, drafts: Sequence[Draft], ids: list[str]) -> list[Plan]:
        """Plan how messages are stored. A draft whose id occurred before is left out.

        Args:
            drafts: The messages.
            ids: Receives the ids of all drafts, in order.

        Raises:
            NotSupported, InvalidName: A draft cannot be stored.
        """
        now = self._clock.time()
        fresh = self._new_stems(len(drafts), now)
        plans: list[Plan] = []
        seen: set[str] = set()
        for draft, stem in zip(drafts, fresh, strict=True):
            message_id = None
            if draft.id is not None:
                message_id = to_message_id(draft.id)
                ids.append(message_id)
                if message_id in seen:
                    continue
                seen.add(message_id)
            plans.append(self._plan_one(draft, message_id, stem, now, ids))
        return plans

    def _plan_one(self, draft: Draft, message_id: str | None, stem: str, now: float, ids: list[str]) -> Plan:
        dated = stem if draft.enqueued_at is None else self._stem_at(draft.enqueued_at)
        own, mark = dated, make_mark(draft)
        if message_id is None:
            ids.append(own)
        else:
            own = stem_for(message_id, dated, int((now + draft.hold) * 1000) if draft.hold > 0 else None, mark)
        name = self._name(own, draft, MAX_OWN if message_id is None else MAX_OWN - _GROWTH)
        due = now + draft.delay if draft.due_at is None else draft.due_at
        # With tries, its name in queue/ would not be known to a search for its id.
        delayed = due > now or draft.tries > 0
        if delayed:
            name = delay_name(name, int(max(due, now) * 1000))
        return Plan(draft.body, f"_{stem}_0", name, delayed, message_id, draft.unique_key, mark)

    @staticmethod
    def _name(stem: str, draft: Draft, most: int) -> str:
        if draft.task is None and not draft.argv and not draft.priority:
            return f"_{stem}_{draft.tries}"
        words = draft.argv if draft.task is None else (draft.task, *draft.argv)
        name = item_name(stem, draft.tries, words, draft.priority)
        if byte_length(name) <= most:
            return name
        if draft.argv:
            raise NotSupported("file: argv must fit into the name of a file: put long texts into the body")
        # This is only a label: the envelope in the body has the complete name of the task.
        return item_name(stem, draft.tries, priority=draft.priority)

    def _new_stems(self, count: int, now: float) -> list[str]:
        if self._clock is SYSTEM_CLOCK and not self._local:
            return new_ids(count)
        # This is a separate sequence, so the names need their own serial number: another planner of this process may be
        # at the same nanosecond.
        first = max(int(now * 1e9), self._last_ns + 1)
        self._last_ns = first + count - 1
        pid, host = new_id().split("_")[2:]
        suffix = f"{pid}_{self._own_serial}.{host}"
        return [f"{self._stamp(ns)}_{suffix}" for ns in range(first, first + count)]

    def _stem_at(self, moment: float) -> str:
        """Make a stem of an earlier time, unique by a serial number, because other messages may have the same time."""
        ns = round(moment * 1e6) * 1000
        if ns <= self._last_given_ns < ns + _SAME_TIME_NS:
            # They keep the order in which they come, which is the order of their names.
            ns = self._last_given_ns + 1
        self._last_given_ns = ns
        stamp = self._stamp(ns)
        pid, host = new_id().split("_")[2:]
        return f"{stamp}_{pid}_{next(_serial)}.{host}"

    def _stamp(self, ns: int) -> str:
        second, rest = divmod(ns, 1_000_000_000)
        moment = time.localtime(second) if self._local else time.gmtime(second)
        return f"{time.strftime('%Y%m%d%H%M%S', moment)}_{rest:09d}"
