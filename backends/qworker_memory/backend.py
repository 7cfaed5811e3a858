"""`memory:` and `memory://NAME`: queues in the memory of this process.

This is the reference implementation: the shortest code that keeps the contract, with its methods in the order of the contract. Each of
them is one step under one lock, so that it happens completely or not at all. The docstrings of `qworker.backend.Backend` say what a
method promises.

Backends with the same name share one store, across threads and event loops. The store lives as long as the process.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import AsyncIterator, Sequence
from operator import attrgetter
from typing import ClassVar, Self

import msgspec

from qworker.backend import Backend
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import QueueNotFound
from qworker.history.memory import MemoryHistory
from qworker.history.store import NO_HISTORY
from qworker.kit.browse import Chosen, Place, browse_rows
from qworker.kit.parts import WHOLE, bad_part
from qworker.kit.retention import KEEP_ALL, KEEP_NONE, KEEP_OPTIONS, RetentionPolicy, keep_done, keep_failed
from qworker.kit.wait import wait_for_ready
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
from qworker.url import BackendURL

__all__ = ["MemoryBackend"]


# Seconds between two searches of a queue for finished messages that are too old or too many.
_PRUNING = 60.0

# The order within a state, the order of publishing, and the id.
_Row = tuple[float, int, str]


class _Entry(msgspec.Struct, kw_only=True, eq=False):
    """One stored message.

    Attributes:
        message: The message.
        state: Its state.
        order: Its number in the order of publishing.
        token: The fencing token of its last lease. It rises with each lease.
        at: When it is due (delayed), when its lease expires (leased), or when it finished (done, failed); Unix seconds.
        holder: The worker that leases it.
        error: Why it failed last.
    """

    message: Message
    state: State
    order: int
    token: int = 0
    at: float = 0.0
    holder: str | None = None
    error: str | None = None

    def row(self) -> _Row:
        """Return its row in the heap of its state."""
        first = -self.message.priority if self.state is State.READY else self.at
        return first, self.order, self.message.id

    def place(self) -> Place:
        """Return its place in the order of its state, as `browse` compares places."""
        first, order, _ = self.row()
        return first, f"{order:020}"

    def to_stored(self) -> StoredMessage:
        """Return what `browse` and `find` show of it."""
        return StoredMessage(
            message=self.message,
            state=self.state,
            due_at=self.at if self.state is State.DELAYED else None,
            expires_at=self.at if self.state is State.LEASED else None,
            finished_at=self.at if self.state in {State.DONE, State.FAILED} else None,
            holder=self.holder,
            error=self.error,
        )

    def count_try(self, error: str | None) -> None:
        """Count a failed attempt."""
        self.error = error
        self.message = msgspec.structs.replace(self.message, tries=self.message.tries + 1)


class _Queue:
    """The messages of one queue: all of them by id, and a heap for each state whose first message is looked for.

    An entry that leaves a state leaves its row in the heap. A row counts only if the entry still has that row.
    """

    def __init__(self) -> None:
        self.entries: dict[str, _Entry] = {}
        # The ids of the ready, delayed and leased messages that have a unique key, by the key.
        self.pending_keys: dict[str, str] = {}
        self.heaps: dict[State, list[_Row]] = {State.READY: [], State.DELAYED: [], State.LEASED: []}
        self.paused = False
        self.next_order = 0

    def put(self, entry: _Entry, state: State, at: float = 0.0) -> None:
        """Move an entry to a state."""
        entry.state = state
        entry.at = at
        heap = self.heaps.get(state)
        if heap is None:
            self._free_key(entry)
            return
        heapq.heappush(heap, entry.row())
        if len(heap) > 2 * len(self.entries) + 64:
            # Most rows are old. Without this step, a heap would grow with each extension of a lease.
            self.heaps[state] = [other.row() for other in self.entries.values() if other.state is state]
            heapq.heapify(self.heaps[state])
        if entry.message.unique_key is not None:
            self.pending_keys.setdefault(entry.message.unique_key, entry.message.id)

    def remove(self, entry: _Entry) -> None:
        """Delete an entry."""
        del self.entries[entry.message.id]
        self._free_key(entry)

    def _free_key(self, entry: _Entry) -> None:
        key = entry.message.unique_key
        if key is not None and self.pending_keys.get(key) == entry.message.id:
            del self.pending_keys[key]

    def first(self, state: State) -> _Entry | None:
        """Return the first entry of a state; None if there is none."""
        heap = self.heaps[state]
        while heap:
            entry = self.entries.get(heap[0][2])
            if entry is not None and entry.state is state and entry.row() == heap[0]:
                return entry
            heapq.heappop(heap)
        return None

    def make_ready(self, state: State, now: float) -> list[_Entry]:
        """Move the delayed messages that are due, or the leased ones that have expired, to ready; return them."""
        moved: list[_Entry] = []
        while (entry := self.first(state)) is not None and entry.at <= now:
            self.put(entry, State.READY)
            moved.append(entry)
        return moved

    def in_state(self, state: State) -> list[_Entry]:
        """Return the entries of a state, in no order."""
        return [entry for entry in self.entries.values() if entry.state is state]


class _Store:
    """The queues of one name, and the calls of `wait` that wait for them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.queues: dict[str, _Queue] = {}
        self.waiters: set[_Waiter] = set()
        self.history = MemoryHistory()

    def wake(self, queue: str) -> None:
        """Wake every call that waits for a queue."""
        for waiter in tuple(self.waiters):
            if queue in waiter.queues:
                waiter.wake()


class _Waiter:
    """One call of `wait`. It may be woken from another thread."""

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
    """Queues in the memory of this process.

    Args:
        name: The name of the store.
        clock: The time.
        keep_done: How long acked messages are kept.
        keep_failed: How long failed messages are kept.
        history: Whether events are kept.
    """

    shared: ClassVar[bool] = False

    def __init__(
        self,
        name: str = "",
        *,
        clock: Clock = SYSTEM_CLOCK,
        keep_done: RetentionPolicy = KEEP_NONE,
        keep_failed: RetentionPolicy = KEEP_ALL,
        history: bool = True,
    ) -> None:
        self._name = name
        self._clock = clock
        self._kept = {State.DONE: keep_done, State.FAILED: keep_failed}
        # When each queue was last searched for finished messages to delete.
        self._pruned_at: dict[str, float] = {}
        self._store = _stores.setdefault(name, _Store())
        self.history = self._store.history if history else NO_HISTORY

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """Make an instance for `memory:` or `memory://NAME`. The options are `keep_done`, `keep_failed` and `history`."""
        url.only({*KEEP_OPTIONS, "history"})
        return cls(
            url.authority + url.path,
            clock=clock,
            keep_done=keep_done(url),
            keep_failed=keep_failed(url),
            history=url.boolean("history", True),
        )

    async def open(self) -> None:
        """Do nothing."""

    async def aclose(self) -> None:
        """Do nothing: the store stays as long as the process."""

    def describe(self) -> str:
        """Return the URL."""
        return f"memory://{self._name}"

    @property
    def durability(self) -> str:
        """`none`: the messages are lost with the process."""
        return "none"

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages."""
        check_queue(queue)
        now = self._clock.time()
        with self._store.lock:
            content = self._store.queues.setdefault(queue, _Queue())
            ids = [self._publish_one(queue, content, draft, now) for draft in drafts]
        self._store.wake(queue)
        return ids

    def _publish_one(self, queue: str, content: _Queue, draft: Draft, now: float) -> str:
        message_id = new_id() if draft.id is None else check_id(draft.id)
        if message_id in content.entries:
            return message_id
        if draft.unique_key is not None and draft.unique_key in content.pending_keys:
            return content.pending_keys[draft.unique_key]
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
        entry = content.entries[message_id] = _Entry(message=message, state=State.READY, order=content.next_order)
        content.next_order += 1
        due = now + draft.delay if draft.due_at is None else draft.due_at
        if due > now:
            content.put(entry, State.DELAYED, due)
        else:
            content.put(entry, State.READY)
        return message_id

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Lease ready messages."""
        await wait_for_ready(self, queue, limit, timeout)
        with self._store.lock:
            content = self._store.queues.get(queue)
            if content is None or content.paused:
                return []
            now = self._clock.time()
            content.make_ready(State.DELAYED, now)
            leases: list[Lease] = []
            while len(leases) < limit and (entry := content.first(State.READY)) is not None:
                entry.token += 1
                entry.holder = self._name or "memory"
                content.put(entry, State.LEASED, now + visibility)
                leases.append(Lease(message=entry.message, token=entry.token, expires_at=now + visibility))
            return leases

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Wait for a ready message; a message that becomes due ends the wait too."""
        waiter = _Waiter(queues)
        with self._store.lock:
            self._store.waiters.add(waiter)
            seconds = self._seconds_until_ready(queues)
        try:
            if seconds > 0:
                await waiter.wait(min(timeout, seconds))
        finally:
            with self._store.lock:
                self._store.waiters.discard(waiter)

    def _seconds_until_ready(self, queues: Sequence[str]) -> float:
        """Return how long it takes until one of the queues has a ready message, if nothing is published meanwhile."""
        now = self._clock.time()
        soonest = float("inf")
        for queue in queues:
            content = self._store.queues.get(queue)
            if content is None or content.paused:
                continue
            content.make_ready(State.DELAYED, now)
            if content.first(State.READY) is not None:
                return 0.0
            delayed = content.first(State.DELAYED)
            if delayed is not None:
                soonest = min(soonest, delayed.at - now)
        return soonest

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases and return the lost ones."""
        lost: list[Lease] = []
        with self._store.lock:
            expires_at = self._clock.time() + visibility
            for lease in leases:
                found = self._get_leased(lease)
                if found is None:
                    lost.append(lease)
                    continue
                content, entry = found
                content.put(entry, State.LEASED, expires_at)
                lease.expires_at = expires_at
        return lost

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """Settle leases and return the refused settlements."""
        refused: list[Settlement] = []
        to_wake: set[str] = set()
        with self._store.lock:
            now = self._clock.time()
            for settlement in settlements:
                found = self._get_leased(settlement.lease)
                if found is None:
                    refused.append(settlement)
                    continue
                self._settle_one(*found, settlement, now)
                if settlement.action in {SettleAction.RELEASE, SettleAction.FAIL_TMP}:
                    to_wake.add(settlement.lease.message.queue)
        for queue in to_wake:
            self._store.wake(queue)
        return refused

    def _get_leased(self, lease: Lease) -> tuple[_Queue, _Entry] | None:
        """Return the entry of a lease, with its queue; None if the lease is lost."""
        content = self._store.queues.get(lease.message.queue)
        entry = content.entries.get(lease.message.id) if content is not None else None
        if content is None or entry is None or entry.state is not State.LEASED or entry.token != lease.token:
            return None
        return content, entry

    def _settle_one(self, content: _Queue, entry: _Entry, settlement: Settlement, now: float) -> None:
        entry.holder = None
        if settlement.action is SettleAction.ACK:
            if self._kept[State.DONE].keep:
                content.put(entry, State.DONE, now)
            else:
                content.remove(entry)
        elif settlement.action is SettleAction.FAIL_PERM:
            entry.error = settlement.error
            content.put(entry, State.FAILED, now)
        else:
            if settlement.action is SettleAction.FAIL_TMP:
                entry.count_try(settlement.error)
            if settlement.delay > 0:
                content.put(entry, State.DELAYED, now + settlement.delay)
            else:
                content.put(entry, State.READY)

    async def reap(self, queue: str) -> int:
        """Make expired and due messages ready; delete finished messages that are too old or too many."""
        with self._store.lock:
            content = self._store.queues.get(queue)
            if content is None:
                return 0
            now = self._clock.time()
            due = content.make_ready(State.DELAYED, now)
            expired = content.make_ready(State.LEASED, now)
            for entry in expired:
                entry.holder = None
                entry.count_try("the lease expired")
            self._prune(queue, content, now)
        if due or expired:
            self._store.wake(queue)
        return len(due) + len(expired)

    def _prune(self, queue: str, content: _Queue, now: float) -> None:
        """Delete finished messages that are too old or too many. Each search reads all messages, so it is rare."""
        limited = {state: keep for state, keep in self._kept.items() if keep.limits}
        moment = self._clock.monotonic()
        if not limited or moment - self._pruned_at.get(queue, float("-inf")) < _PRUNING:
            return
        self._pruned_at[queue] = moment
        for state, keep in limited.items():
            oldest_first = sorted(content.in_state(state), key=_Entry.row)
            for entry in keep.choose_old([(entry.at, entry) for entry in oldest_first], now):
                content.remove(entry)

    # -- queues ------------------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """Return the names of the queues, sorted."""
        with self._store.lock:
            return sorted(self._store.queues)

    async def create(self, queue: str) -> None:
        """Create a queue."""
        with self._store.lock:
            self._store.queues.setdefault(check_queue(queue), _Queue())

    async def delete(self, queue: str) -> None:
        """Delete a queue with its messages."""
        with self._store.lock:
            self._store.queues.pop(queue, None)

    async def stats(self, queue: str) -> QueueStats:
        """Count the messages of a queue."""
        with self._store.lock:
            content = self._require_queue(queue)
            counts = dict.fromkeys(State, 0)
            oldest: float | None = None
            for entry in content.entries.values():
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
                paused=content.paused,
                retention={
                    "done": self._kept[State.DONE].describe(),
                    "failed": self._kept[State.FAILED].describe(),
                    **self.history.retention,
                },
            )

    async def pause(self, queue: str) -> None:
        """Pause a queue."""
        with self._store.lock:
            self._require_queue(queue).paused = True

    async def resume(self, queue: str) -> None:
        """Resume a queue."""
        with self._store.lock:
            self._require_queue(queue).paused = False
        self._store.wake(queue)

    def _require_queue(self, queue: str) -> _Queue:
        """Return a queue, in which no message that is due is still delayed.

        Raises:
            QueueNotFound: There is no such queue.
        """
        content = self._store.queues.get(queue)
        if content is None:
            raise QueueNotFound(queue)
        content.make_ready(State.DELAYED, self._clock.time())
        return content

    # -- messages ----------------------------------------------------------------------------------------------------

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Yield the messages of a state, page after page."""
        if query.part not in {None, WHOLE}:
            raise bad_part(query.part or "")
        with self._store.lock:
            content = self._require_queue(queue)

        async def choose(after: Place | None, limit: int | None) -> list[_Entry]:
            chosen = Chosen(_Entry.place, after, limit, newest=query.newest)
            with self._store.lock:
                chosen.add(content.in_state(query.state))
                return chosen.rows()

        def read(entry: _Entry) -> StoredMessage | None:
            with self._store.lock:
                there = content.entries.get(entry.message.id) is entry and entry.state is query.state
                return entry.to_stored() if there else None

        # A lease that is extended changes its place.
        identity = attrgetter("order") if query.state is State.LEASED else None
        async for page in browse_rows(query, choose, _Entry.place, read, identity=identity):
            yield page

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Return one part: all readers are in this process."""
        with self._store.lock:
            self._require_queue(queue)
        return [WHOLE]

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Return messages by their ids."""
        with self._store.lock:
            content = self._require_queue(queue)
            return [content.entries[one].to_stored() for one in dict.fromkeys(ids) if one in content.entries]

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready again."""
        selection.require_failed()
        with self._store.lock:
            content = self._require_queue(queue)
            chosen = [entry for entry in self._select(content, selection) if entry.state is State.FAILED]
            for entry in chosen:
                entry.error = None
                entry.message = msgspec.structs.replace(entry.message, tries=0)
                content.put(entry, State.READY)
        if chosen:
            self._store.wake(queue)
        return len(chosen)

    async def remove(self, queue: str, selection: Selection) -> int:
        """Remove messages."""
        with self._store.lock:
            content = self._require_queue(queue)
            selected = self._select(content, selection)
            for entry in selected:
                content.remove(entry)
            return len(selected)

    def _select(self, content: _Queue, selection: Selection) -> list[_Entry]:
        """Return the entries that a selection names."""
        if selection.state is not None:
            return content.in_state(selection.state)
        if selection.ids is not None:
            return [content.entries[i] for i in dict.fromkeys(selection.ids) if i in content.entries]
        unchanged = {one.id: one for one in selection.unchanged or ()}
        selected = [content.entries[i] for i in unchanged if i in content.entries]
        return [entry for entry in selected if unchanged[entry.message.id].matches(entry.to_stored())]
