"""The names of messages that are published."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import msgspec

from qworker.backend.unique_keys import due_of
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import NotSupported
from qworker.message import Draft
from qworker.names import new_id, new_ids, to_message_id
from qworker_file.id_place import Place, item_at
from qworker_file.names import (
    MAX_OWN,
    byte_length,
    delay_name,
    first_moment,
    item_name,
    replacing_stem,
    stem_for,
)
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
        replacing: Its draft, if it takes the place of a message that waits with the key.
        fd: A descriptor of the file. -1: not opened yet. -2: closed.
    """

    body: bytes
    temporary: str
    name: str
    delayed: bool
    given_id: str | None
    unique_key: str | None = None
    key_mark: str = ""
    replacing: Draft | None = None
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
        # With tries, its name in queue/ would not be known to a search for its id.
        name, delayed = self._placed(name, due_of(draft, now, now), now, is_delayed=draft.tries > 0)
        replacing = draft if draft.unique is not None and draft.unique.replaces else None
        return Plan(draft.body, f"_{stem}_0", name, delayed, message_id, draft.unique_key, mark, replacing)

    @staticmethod
    def _placed(item: str, due: float, now: float, *, is_delayed: bool = False) -> tuple[str, bool]:
        """Return the name of an item in delay/ or in queue/, and whether it is the one in delay/."""
        if due > now or is_delayed:
            return delay_name(item, int(max(due, now) * 1000)), True
        return item, False

    def replan(self, plan: Plan, place: Place, now: float) -> Plan:
        """Plan how a message takes the place of a waiting one with its unique key.

        Args:
            plan: The message.
            place: Where the other one waits.
            now: Unix seconds.

        Raises:
            NotSupported: Its name has no room for its arguments.
        """
        draft = plan.replacing
        assert draft is not None, plan.name
        item = item_at(place) or ""
        hold_ms = int((now + draft.hold) * 1000) if draft.hold > 0 else None
        moment = now if draft.enqueued_at is None else draft.enqueued_at
        own = self._name(replacing_stem(item, moment, hold_ms, plan.key_mark), draft, MAX_OWN - _GROWTH)
        first = first_moment(item, local=self._local)
        due = due_of(draft, now, now if first is None else first)
        # The old file has this name first. An fsq program could take it from queue/, where its lock is not sure to be
        # free, and would then end the new one.
        name, delayed = self._placed(own, due, now, is_delayed=place.directory == "delay")
        return msgspec.structs.replace(plan, name=name, delayed=delayed)

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
