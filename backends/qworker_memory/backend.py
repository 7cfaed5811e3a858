"""`memory:` and `memory://NAME`: queues in this process's memory.

The reference model: the shortest code that keeps the contract, against which every other backend is compared. Instances with the
same name share one store, across threads and event loops; the store lives as long as the process.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar, Self

import msgspec

from qworker.backend import Backend
from qworker.backend_waiting import wait_for_ready
from qworker.browsing import Chosen, Place, browse_rows
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import QueueNotFound
from qworker.history.memory import MemoryHistory
from qworker.history.store import NO_HISTORY
from qworker.message import (
    Draft,
    Lease,
    Message,
    Query,
    QueueStats,
    Selection,
    SettleAction,
    Settlement,
    State,
    StoredMessage,
)
from qworker.names import check_id, check_queue, new_id
from qworker.parts import WHOLE, bad_part
from qworker.retention import KEEP_ALL, KEEP_NONE, KEEP_OPTIONS, Retention, keep_done, keep_failed
from qworker.url import BackendURL

__all__ = ["MemoryBackend"]


# Seconds between two searches of a queue for messages that are kept no longer.
_PRUNING = 60.0

# What a state is ordered by, the order of publishing, and the id.
_Row = tuple[float, int, str]


class _Entry(msgspec.Struct, kw_only=True, eq=False):
    """One stored message and its state."""

    message: Message
    state: State
    order: int
    # Rises with each lease.
    token: int = 0
    # Due (delayed), expiry (leased) or finish (done, fail); Unix seconds.
    at: float = 0.0
    holder: str | None = None
    error: str | None = None

    def row(self) -> _Row:
        """Where the entry stands in the order of its state."""
        first = -self.message.priority if self.state is State.READY else self.at
        return first, self.order, self.message.id

    def place(self) -> Place:
        """The same, as `browse` compares it."""
        first, order, _ = self.row()
        return first, f"{order:020}"

    def id(self) -> str:
        """The message's id."""
        return self.message.id


class _Queue:
    """One queue: its messages by id, and for each state that is taken from in an order, a heap.

    An entry that leaves a state leaves its row behind: a row counts only while the entry is still as the row says.
    """

    def __init__(self) -> None:
        self.entries: dict[str, _Entry] = {}
        self.pending_keys: dict[str, str] = {}
        # (-priority, order, id) of ready messages; (at, order, id) of delayed and leased ones.
        self.heaps: dict[State, list[_Row]] = {State.READY: [], State.DELAYED: [], State.LEASED: []}
        self.down = False
        self.next_order = 0

    def put(self, entry: _Entry, state: State, at: float = 0.0) -> None:
        """Move an entry to a state, and to the order that the state has."""
        entry.state = state
        entry.at = at
        key = entry.message.unique_key
        heap = self.heaps.get(state)
        if heap is None:
            self._free_key(entry)
            return
        heapq.heappush(heap, entry.row())
        if len(heap) > 2 * len(self.entries) + 64:
            self.heaps[state] = [other.row() for other in self.entries.values() if other.state is state]
            heapq.heapify(self.heaps[state])
        if key is not None:
            self.pending_keys.setdefault(key, entry.message.id)

    def first(self, state: State) -> _Entry | None:
        """The entry that a state's order puts first."""
        heap = self.heaps[state]
        while heap:
            entry = self.entries.get(heap[0][2])
            if entry is not None and entry.state is state and entry.row() == heap[0]:
                return entry
            heapq.heappop(heap)
        return None

    def make_ready(self, state: State, now: float) -> list[_Entry]:
        """Move the delayed that are due, or the leased that have expired, to ready."""
        moved: list[_Entry] = []
        while (entry := self.first(state)) is not None and entry.at <= now:
            self.put(entry, State.READY)
            moved.append(entry)
        return moved

    def drop(self, entry: _Entry) -> None:
        """Forget an entry."""
        del self.entries[entry.message.id]
        self._free_key(entry)

    def _free_key(self, entry: _Entry) -> None:
        key = entry.message.unique_key
        if key is not None and self.pending_keys.get(key) == entry.message.id:
            del self.pending_keys[key]

    def in_state(self, state: State) -> list[_Entry]:
        """The entries of a state in the order that `browse` promises."""
        found = [entry for entry in self.entries.values() if entry.state is state]
        return sorted(found, key=_Entry.row)


class _Store:
    """The queues of one name."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.queues: dict[str, _Queue] = {}
        self.waiters: set[_Waiter] = set()
        self.history = MemoryHistory()

    def wake(self, queue: str) -> None:
        for waiter in tuple(self.waiters):
            if queue in waiter.queues:
                waiter.wake()


class _Waiter:
    """A `wait` that may have to be woken from another thread."""

    __slots__ = ("_event", "_loop", "_thread", "queues")

    def __init__(self, queues: Sequence[str]) -> None:
        self.queues = frozenset(queues)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._event = asyncio.Event()

    def wake(self) -> None:
        if threading.get_ident() == self._thread:
            self._event.set()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            pass


_stores: dict[str, _Store] = {}


class MemoryBackend(Backend):
    """Queues in memory; see the module."""

    shared: ClassVar[bool] = False

    def __init__(
        self,
        name: str = "",
        *,
        clock: Clock = SYSTEM_CLOCK,
        keep_done: Retention = KEEP_NONE,
        keep_failed: Retention = KEEP_ALL,
        history: bool = True,
    ) -> None:
        self._name = name
        self._clock = clock
        self._kept = {State.DONE: keep_done, State.FAILED: keep_failed}
        # When each queue was last searched for messages that are kept no longer.
        self._pruned_at: dict[str, float] = {}
        self._store = _stores.setdefault(name, _Store())
        self.history = self._store.history if history else NO_HISTORY

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """`memory:`, `memory://NAME`; `?keep_done=`, `?keep_failed=`; `?history=0` keeps no events."""
        url.only({*KEEP_OPTIONS, "history"})
        return cls(
            url.authority + url.path,
            clock=clock,
            keep_done=keep_done(url),
            keep_failed=keep_failed(url),
            history=url.boolean("history", True),
        )

    async def open(self) -> None:
        """Nothing to reach."""

    async def aclose(self) -> None:
        """Nothing to let go of."""

    def describe(self) -> str:
        """The URL."""
        return f"memory://{self._name}"

    @property
    def durability(self) -> str:
        """`none`: the process is the store."""
        return "none"

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages."""
        check_queue(queue)
        now = self._clock.time()
        with self._store.lock:
            held = self._store.queues.setdefault(queue, _Queue())
            ids = [self._put_draft(queue, held, draft, now) for draft in drafts]
        self._store.wake(queue)
        return ids

    def _put_draft(self, queue: str, held: _Queue, draft: Draft, now: float) -> str:
        message_id = new_id() if draft.id is None else check_id(draft.id)
        if message_id in held.entries:
            return message_id
        if draft.unique_key is not None and draft.unique_key in held.pending_keys:
            return held.pending_keys[draft.unique_key]
        message = Message(
            id=message_id,
            queue=queue,
            body=draft.body,
            tries=draft.tries,
            enqueued_at=now if draft.enqueued_at is None else draft.enqueued_at,
            priority=draft.priority,
            unique_key=draft.unique_key,
            argv=draft.argv,
            fields=draft.fields,
        )
        entry = held.entries[message_id] = _Entry(message=message, state=State.READY, order=held.next_order)
        held.next_order += 1
        due = now + draft.delay if draft.due_at is None else draft.due_at
        if due > now:
            held.put(entry, State.DELAYED, due)
        else:
            held.put(entry, State.READY)
        return message_id

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Claim messages."""
        await wait_for_ready(self, queue, limit, timeout)
        with self._store.lock:
            held = self._store.queues.get(queue)
            if held is None or held.down:
                return []
            now = self._clock.time()
            held.make_ready(State.DELAYED, now)
            leases: list[Lease] = []
            while len(leases) < limit and (entry := held.first(State.READY)) is not None:
                entry.token += 1
                entry.holder = self._name or "memory"
                held.put(entry, State.LEASED, now + visibility)
                leases.append(Lease(message=entry.message, token=entry.token, expires_at=now + visibility))
            return leases

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Wait for a publish, a release, or the moment at which a message becomes due."""
        waiter = _Waiter(queues)
        with self._store.lock:
            self._store.waiters.add(waiter)
            rest = self._until_work(queues)
        try:
            if rest > 0:
                await waiter.wait(min(timeout, rest))
        finally:
            with self._store.lock:
                self._store.waiters.discard(waiter)

    def _until_work(self, queues: Sequence[str]) -> float:
        """Seconds until a queue has something to lease, as far as is known now; 0 when one has."""
        now = self._clock.time()
        soonest = float("inf")
        for queue in queues:
            held = self._store.queues.get(queue)
            if held is None or held.down:
                continue
            held.make_ready(State.DELAYED, now)
            if held.first(State.READY) is not None:
                return 0.0
            delayed = held.first(State.DELAYED)
            if delayed is not None:
                soonest = min(soonest, delayed.at - now)
        return soonest

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases."""
        lost: list[Lease] = []
        with self._store.lock:
            expires_at = self._clock.time() + visibility
            for lease in leases:
                found = self._claimed(lease)
                if found is None:
                    lost.append(lease)
                    continue
                held, entry = found
                held.put(entry, State.LEASED, expires_at)
                lease.expires_at = expires_at
        return lost

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases."""
        refused: list[Settlement] = []
        awake: set[str] = set()
        with self._store.lock:
            now = self._clock.time()
            for settlement in settlements:
                found = self._claimed(settlement.lease)
                if found is None:
                    refused.append(settlement)
                    continue
                self._end(*found, settlement, now)
                if settlement.action in {SettleAction.RELEASE, SettleAction.FAIL_TMP}:
                    awake.add(settlement.lease.message.queue)
        for queue in awake:
            self._store.wake(queue)
        return refused

    def _claimed(self, lease: Lease) -> tuple[_Queue, _Entry] | None:
        held = self._store.queues.get(lease.message.queue)
        entry = held.entries.get(lease.message.id) if held is not None else None
        if held is None or entry is None or entry.state is not State.LEASED or entry.token != lease.token:
            return None
        return held, entry

    def _end(self, held: _Queue, entry: _Entry, settlement: Settlement, now: float) -> None:
        entry.holder = None
        if settlement.action is SettleAction.ACK:
            if self._kept[State.DONE].keep:
                held.put(entry, State.DONE, now)
            else:
                held.drop(entry)
        elif settlement.action is SettleAction.FAIL_PERM:
            entry.error = settlement.error
            held.put(entry, State.FAILED, now)
        else:
            if settlement.action is SettleAction.FAIL_TMP:
                entry.error = settlement.error
                entry.message = msgspec.structs.replace(entry.message, tries=entry.message.tries + 1)
            if settlement.delay > 0:
                held.put(entry, State.DELAYED, now + settlement.delay)
            else:
                held.put(entry, State.READY)

    async def reap(self, queue: str) -> int:
        """Return what has expired, and what is due; remove what is kept no longer."""
        with self._store.lock:
            held = self._store.queues.get(queue)
            if held is None:
                return 0
            now = self._clock.time()
            due = held.make_ready(State.DELAYED, now)
            expired = held.make_ready(State.LEASED, now)
            for entry in expired:
                entry.holder = None
                entry.error = "the lease expired"
                entry.message = msgspec.structs.replace(entry.message, tries=entry.message.tries + 1)
            self._prune(queue, held, now)
        if due or expired:
            self._store.wake(queue)
        return len(due) + len(expired)

    def _prune(self, queue: str, held: _Queue, now: float) -> None:
        """Remove what is kept no longer, now and then: each search goes through all messages."""
        limited = {state: keep for state, keep in self._kept.items() if keep.limits}
        moment = self._clock.monotonic()
        if not limited or moment - self._pruned_at.get(queue, float("-inf")) < _PRUNING:
            return
        self._pruned_at[queue] = moment
        for state, keep in limited.items():
            for entry in keep.choose_old([(entry.at, entry) for entry in held.in_state(state)], now):
                held.drop(entry)

    # -- administering -----------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """The queues."""
        with self._store.lock:
            return sorted(self._store.queues)

    async def create(self, queue: str) -> None:
        """Make a queue."""
        with self._store.lock:
            self._store.queues.setdefault(check_queue(queue), _Queue())

    async def delete(self, queue: str) -> None:
        """Forget a queue."""
        with self._store.lock:
            self._store.queues.pop(queue, None)

    def _found(self, queue: str) -> _Queue:
        held = self._store.queues.get(queue)
        if held is None:
            raise QueueNotFound(queue)
        return held

    async def stats(self, queue: str) -> QueueStats:
        """Count."""
        with self._store.lock:
            held = self._found(queue)
            held.make_ready(State.DELAYED, self._clock.time())
            counts = dict.fromkeys(State, 0)
            oldest: float | None = None
            for entry in held.entries.values():
                counts[entry.state] += 1
                if entry.state is State.READY:
                    since = entry.message.enqueued_at
                    oldest = since if oldest is None else min(oldest, since)
            return QueueStats(
                queue=queue,
                ready=counts[State.READY],
                leased=counts[State.LEASED],
                delayed=counts[State.DELAYED],
                done=counts[State.DONE],
                failed=counts[State.FAILED],
                oldest_age_s=None if oldest is None else max(0.0, self._clock.time() - oldest),
                paused=held.down,
                retention={
                    "done": self._kept[State.DONE].describe(),
                    "failed": self._kept[State.FAILED].describe(),
                    **self.history.retention,
                },
            )

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Look at messages."""
        if query.part not in {None, WHOLE}:
            raise bad_part(query.part or "")
        with self._store.lock:
            held = self._found(queue)
            held.make_ready(State.DELAYED, self._clock.time())

        async def choose(after: Place | None, limit: int | None) -> list[_Entry]:
            chosen = Chosen(_Entry.place, after, limit, newest=query.newest)
            with self._store.lock:
                chosen.add(entry for entry in held.entries.values() if entry.state is query.state)
                return chosen.rows()

        def read(entry: _Entry) -> StoredMessage | None:
            with self._store.lock:
                there = held.entries.get(entry.message.id) is entry and entry.state is query.state
                return _stored(entry) if there else None

        moving = query.state is State.LEASED
        async for page in browse_rows(query, choose, _Entry.place, read, identity=_Entry.id if moving else None):
            yield page

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """One: whoever reads it is in this process."""
        with self._store.lock:
            self._found(queue)
        return [WHOLE]

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Look at messages."""
        with self._store.lock:
            held = self._found(queue)
            held.make_ready(State.DELAYED, self._clock.time())
            return [_stored(held.entries[one]) for one in dict.fromkeys(ids) if one in held.entries]

    def _selected(self, held: _Queue, selection: Selection) -> list[_Entry]:
        if selection.state is not None:
            held.make_ready(State.DELAYED, self._clock.time())
            return held.in_state(selection.state)
        if selection.ids is not None:
            return [held.entries[i] for i in dict.fromkeys(selection.ids) if i in held.entries]
        unchanged = {one.id: one for one in selection.unchanged or ()}
        return [
            held.entries[i]
            for i, one in unchanged.items()
            if i in held.entries and one.matches(_stored(held.entries[i]))
        ]

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready."""
        selection.require_failed()
        with self._store.lock:
            held = self._found(queue)
            chosen = [entry for entry in self._selected(held, selection) if entry.state is State.FAILED]
            for entry in chosen:
                entry.error = None
                entry.message = msgspec.structs.replace(entry.message, tries=0)
                held.put(entry, State.READY)
        if chosen:
            self._store.wake(queue)
        return len(chosen)

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages."""
        with self._store.lock:
            held = self._found(queue)
            selected = self._selected(held, selection)
            for entry in selected:
                held.drop(entry)
            return len(selected)

    async def pause(self, queue: str) -> None:
        """Pause."""
        with self._store.lock:
            self._found(queue).down = True

    async def resume(self, queue: str) -> None:
        """Resume."""
        with self._store.lock:
            self._found(queue).down = False
        self._store.wake(queue)


def _stored(entry: _Entry) -> StoredMessage:
    return StoredMessage(
        message=entry.message,
        state=entry.state,
        due_at=entry.at if entry.state is State.DELAYED else None,
        expires_at=entry.at if entry.state is State.LEASED else None,
        finished_at=entry.at if entry.state in {State.DONE, State.FAILED} else None,
        holder=entry.holder,
        error=entry.error,
    )
