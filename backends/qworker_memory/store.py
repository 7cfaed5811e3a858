"""The store of `memory:`: queues with their messages, and the calls of `wait` that wait for them.

The caller of each method but `browse` holds the store's lock.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from operator import attrgetter

import msgspec
import structlog

from qworker import log_events as events
from qworker.backend.unique_keys import due_of, held_error
from qworker.cell import Cell, CellOp, CellReply, CellWatch
from qworker.errors import AlreadyEnqueued, QueueNotFound
from qworker.failure_text import CANCELLED, code_of
from qworker.history.memory import MemoryHistory
from qworker.kit.browse import Chosen, Place, browse_rows
from qworker.kit.max_body import describe_too_large
from qworker.message import (
    Cancelled,
    Draft,
    KeyHolder,
    Lease,
    LostLease,
    Message,
    Query,
    QueueStats,
    Selection,
    SettleAction,
    Settlement,
    State,
    StoredMessage,
)
from qworker.names import new_id, to_message_id
from qworker.unique import Unique
from qworker_memory.cells import MemoryCells

__all__ = ["MemoryEntry", "MemoryQueue", "MemoryStore", "MemoryWaiter"]

# The order within a state, the order of publishing, and the id.
_Row = tuple[float, int, str]
# Seconds until a message that is too large is tried again.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 60.0, 600.0

_log = structlog.get_logger("qworker.memory")


class MemoryEntry(msgspec.Struct, kw_only=True, eq=False):
    """One stored message.

    Attributes:
        message: The message.
        state: Its state.
        order: Its number in the order of publishing.
        token: The fencing token of its last lease. It rises with each lease.
        at: When it is due (delayed), when its lease expires (leased), or when it finished (done, failed); Unix seconds.
        holder: The worker that leases it.
        error: Why it failed last.
        held_until: Unix seconds until which its id stays taken once it was leased.
        first_at: When the first call was published whose place it has, in Unix seconds.
        losses: Where the loss of its lease is reported to its holder. None: it is not leased.
    """

    message: Message
    state: State
    order: int
    token: int = 0
    at: float = 0.0
    holder: str | None = None
    error: str | None = None
    held_until: float = 0.0
    first_at: float = 0.0
    losses: list[LostLease] | None = None
    # Whether it does not have its unique key any more, because it has started.
    is_key_free: bool = False

    def row(self) -> _Row:
        """Return its row in the heap of its state."""
        first = -self.message.priority if self.state is State.READY else self.at
        return first, self.order, self.message.id

    def place(self) -> Place:
        """Return its place in the order of its state, as `browse` compares places."""
        first, order, _ = self.row()
        return first, f"{order:020}"

    def to_stored(self) -> StoredMessage:
        """Return the message in the form of `browse` and `find`."""
        return StoredMessage(
            message=self.message,
            state=self.state,
            due_at=self.at if self.state is State.DELAYED else None,
            expires_at=self.at if self.state is State.LEASED else None,
            finished_at=self.at if self.state in {State.DONE, State.FAILED} else None,
            holder=self.holder,
            error=self.error,
        )

    def count_try(self, error: str | None, *, died: bool) -> None:
        """Count a failed attempt."""
        self.error = error
        deaths = self.message.deaths + 1 if died else 0
        self.message = msgspec.structs.replace(self.message, tries=self.message.tries + 1, deaths=deaths)


class MemoryQueue:
    """The messages of one queue: all of them by id, and a heap for each state whose first message is needed.

    An entry that leaves a state leaves its row in the heap. A row counts only if the entry still has that row.
    """

    def __init__(self, name: str, app_keys: dict[str, tuple[str, str]] | None = None) -> None:
        self.name = name
        self.entries: dict[str, MemoryEntry] = {}
        # The queue and the id of each ready, delayed or leased message that has a unique key, by the key: of the keys
        # that count in this queue, and of those that count in all queues of the store.
        self.pending_keys: dict[str, tuple[str, str]] = {}
        self.app_keys = {} if app_keys is None else app_keys
        self.heaps: dict[State, list[_Row]] = {State.READY: [], State.DELAYED: [], State.LEASED: []}
        # The ends of holds by id, in Unix seconds. As in a directory, the first lease makes a hold.
        self.holds: dict[str, float] = {}
        self.cells = MemoryCells()
        self.paused = False
        self.next_order = 0

    def put(self, entry: MemoryEntry, state: State, at: float = 0.0) -> None:
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
        key = entry.message.unique_key
        if key is not None and not entry.is_key_free:
            self._keys(entry.message.unique).setdefault(key, (self.name, entry.message.id))

    def _keys(self, unique: Unique | None) -> dict[str, tuple[str, str]]:
        return self.app_keys if unique is not None and unique.scope == "app" else self.pending_keys

    def remove(self, entry: MemoryEntry) -> None:
        """Delete an entry."""
        if entry.losses is not None:
            self.lose(entry)
        del self.entries[entry.message.id]
        if entry.message.unique_key is not None:
            self._free_key(entry)

    @staticmethod
    def lose(entry: MemoryEntry, *, cancelled: bool = False) -> None:
        """Report the loss of an entry's lease, if it has one."""
        losses, entry.losses = entry.losses, None
        if losses is not None:
            losses.append(LostLease(entry.message.id, entry.token, cancelled))

    def free_keys(self) -> None:
        """Free the keys of all messages: the queue is deleted."""
        for entry in self.entries.values():
            self._free_key(entry)

    def _free_key(self, entry: MemoryEntry) -> None:
        key = entry.message.unique_key
        keys = self._keys(entry.message.unique)
        if key is not None and keys.get(key) == (self.name, entry.message.id):
            del keys[key]

    def first(self, state: State) -> MemoryEntry | None:
        """Return the first entry of a state; None if there is none."""
        heap = self.heaps[state]
        while heap:
            entry = self.entries.get(heap[0][2])
            if entry is not None and entry.state is state and entry.row() == heap[0]:
                return entry
            heapq.heappop(heap)
        return None

    def make_ready(self, state: State, now: float) -> list[MemoryEntry]:
        """Move the delayed messages that are due, or the leased ones that have expired, to ready; return them."""
        moved: list[MemoryEntry] = []
        while (entry := self.first(state)) is not None and entry.at <= now:
            self.put(entry, State.READY)
            moved.append(entry)
        return moved

    def in_state(self, state: State) -> list[MemoryEntry]:
        """Return the entries of a state, in no order."""
        return [entry for entry in self.entries.values() if entry.state is state]

    def select(self, selection: Selection) -> list[MemoryEntry]:
        """Return the entries that a selection names."""
        if selection.state is not None:
            return self.in_state(selection.state)
        if selection.ids is not None:
            return [self.entries[i] for i in dict.fromkeys(selection.ids) if i in self.entries]
        unchanged = {one.id: one for one in selection.unchanged or ()}
        selected = [self.entries[i] for i in unchanged if i in self.entries]
        return [entry for entry in selected if unchanged[entry.message.id].matches(entry.to_stored())]

    # -- the steps of the contract -----------------------------------------------------------------------------------

    def publish(self, draft: Draft, now: float) -> str:
        """Store a message and return its id."""
        message_id = new_id() if draft.id is None else to_message_id(draft.id)
        if message_id in self.entries or self.holds.get(message_id, 0.0) > now:
            return message_id
        if draft.unique_key is not None:
            holder = self._keys(draft.unique).get(draft.unique_key)
            if holder is not None:
                stored = self._meet(draft, holder, now)
                if stored is not None:
                    return stored
        return self._store(draft, message_id, now)

    def _meet(self, draft: Draft, holder: tuple[str, str], now: float) -> str | None:
        """Do what a draft wants with the message that has its key. None: it is stored, and has the key from now on."""
        queue, message_id = holder
        if draft.unique is None or not draft.unique.replaces:
            return message_id if queue == self.name else KeyHolder(message_id, queue)
        entry = self.entries[message_id]
        if entry.state is State.LEASED:
            self._free_key(entry)
            # It does not take the key again, whatever becomes of it.
            entry.is_key_free = True
            return None
        self._replace(entry, draft, draft.unique, now)
        return message_id

    def _replace(self, entry: MemoryEntry, draft: Draft, unique: Unique, now: float) -> None:
        entry.message = msgspec.structs.replace(
            entry.message,
            body=draft.body,
            enqueued_at=now if draft.enqueued_at is None else draft.enqueued_at,
            priority=draft.priority,
            unique=unique.stored(),
            argv=draft.argv,
            fields=draft.fields,
            tries=0,
            deaths=0,
        )
        entry.error = None
        if draft.hold > 0:
            entry.held_until = max(entry.held_until, now + draft.hold)
        due = due_of(draft, now, entry.first_at)
        if due > now:
            self.put(entry, State.DELAYED, due)
        else:
            self.put(entry, State.READY)

    def _store(self, draft: Draft, message_id: str, now: float) -> str:
        message = Message(
            id=message_id,
            queue=self.name,
            body=draft.body,
            tries=draft.tries,
            enqueued_at=now if draft.enqueued_at is None else draft.enqueued_at,
            priority=draft.priority,
            unique_key=draft.unique_key,
            unique=None if draft.unique is None else draft.unique.stored(),
            argv=draft.argv,
            fields=draft.fields,
        )
        entry = self.entries[message_id] = MemoryEntry(message=message, state=State.READY, order=self.next_order)
        entry.held_until = now + draft.hold
        entry.first_at = message.enqueued_at
        self.next_order += 1
        due = due_of(draft, now, now)
        if due > now:
            self.put(entry, State.DELAYED, due)
        else:
            self.put(entry, State.READY)
        return message_id

    def lease(
        self,
        limit: int,
        holder: str,
        losses: list[LostLease],
        now: float,
        expires_at: float,
        max_body: int | None = None,
    ) -> list[Lease]:
        """Lease up to `limit` ready messages. Those that are larger than `max_body` are delayed."""
        self.make_ready(State.DELAYED, now)
        leases: list[Lease] = []
        while len(leases) < limit and (entry := self.first(State.READY)) is not None:
            if max_body is not None and len(entry.message.body) > max_body:
                self._delay_large(entry, max_body, now)
                continue
            entry.token += 1
            entry.holder = holder
            entry.losses = losses
            if entry.held_until > now:
                self.holds[entry.message.id] = entry.held_until
            if entry.message.unique is not None and entry.message.unique.until == "started":
                self._free_key(entry)
                entry.is_key_free = True
            self.put(entry, State.LEASED, expires_at)
            leases.append(Lease(message=entry.message, token=entry.token, expires_at=expires_at))
        return leases

    def _delay_large(self, entry: MemoryEntry, max_body: int, now: float) -> None:
        """Delay a message for as long as it has waited, so that its pauses grow. Report it once."""
        first = entry.error
        entry.error = describe_too_large(len(entry.message.body), max_body)
        if entry.error != first:
            _log.error(events.MESSAGE_TOO_LARGE, queue=self.name, message_id=entry.message.id, reason=entry.error)
        pause = max(_SHORTEST_PAUSE, min(now - entry.message.enqueued_at, _LONGEST_PAUSE))
        self.put(entry, State.DELAYED, now + pause)

    def count_too_large(self, max_body: int | None) -> int:
        """Return how many delayed messages are larger than `max_body`."""
        entries = self.entries.values() if max_body is not None else ()
        return sum([entry.state is State.DELAYED and len(entry.message.body) > (max_body or 0) for entry in entries])

    def settle(self, entry: MemoryEntry, settlement: Settlement, now: float, *, keep_done: bool) -> None:
        """End the lease of an entry."""
        entry.holder = entry.losses = None
        if settlement.action is SettleAction.ACK:
            if keep_done:
                self.put(entry, State.DONE, now)
            else:
                self.remove(entry)
        elif settlement.action is SettleAction.FAIL_PERM:
            entry.error = settlement.error
            self.put(entry, State.FAILED, now)
        else:
            if settlement.action is SettleAction.FAIL_TMP:
                entry.count_try(settlement.error, died=settlement.died)
            elif settlement.survived:
                entry.message = msgspec.structs.replace(entry.message, deaths=0)
            if settlement.delay > 0:
                self.put(entry, State.DELAYED, now + settlement.delay)
            else:
                self.put(entry, State.READY)

    def reap(self, now: float) -> int:
        """Make expired and due messages ready and return their number."""
        due = self.make_ready(State.DELAYED, now)
        expired = self.make_ready(State.LEASED, now)
        self.holds = {message_id: end for message_id, end in self.holds.items() if end > now}
        self.cells.sweep(now)
        for entry in expired:
            self.lose(entry)
            entry.holder = None
            entry.count_try("the lease expired", died=True)
        return len(due) + len(expired)

    def stats(self, now: float, retention: Mapping[str, str]) -> QueueStats:
        """Count the messages."""
        counts = Counter(entry.state for entry in self.entries.values())
        enqueued_at = [entry.message.enqueued_at for entry in self.entries.values() if entry.state is State.READY]
        return QueueStats(
            queue=self.name,
            ready=counts[State.READY],
            leased=counts[State.LEASED],
            delayed=counts[State.DELAYED],
            done=counts[State.DONE],
            failed=counts[State.FAILED],
            oldest_age_s=max(0.0, now - min(enqueued_at)) if enqueued_at else None,
            paused=self.paused,
            retention=retention,
        )

    def requeue(self, selection: Selection) -> tuple[list[str], AlreadyEnqueued | None]:
        """Make failed messages ready again and return their ids, and the refusal of one whose key is held."""
        moved: list[str] = []
        refused: AlreadyEnqueued | None = None
        for entry in self.select(selection):
            if entry.state is not State.FAILED:
                continue
            key = entry.message.unique_key
            holder = None if key is None else self._keys(entry.message.unique).get(key)
            if key is not None and holder is not None:
                queue, message_id = holder
                shown = message_id if queue == self.name else KeyHolder(message_id, queue)
                refused = refused or held_error(key, shown)
                continue
            entry.error = None
            entry.is_key_free = False
            entry.message = msgspec.structs.replace(entry.message, tries=0, deaths=0)
            self.put(entry, State.READY)
            moved.append(entry.message.id)
        return moved, refused

    def cancel(self, selection: Selection, reason: str, now: float, only: Mapping[str, Cell]) -> list[Cancelled]:
        """Move waiting and leased messages to failed, and return what was found."""
        found: list[Cancelled] = []
        for entry in self.select(selection):
            finished = entry.state in {State.DONE, State.FAILED}
            cell = only.get(entry.message.id)
            if cell is not None and not finished and self.cells.version(cell.group, cell.name, now) != cell.version:
                continue
            already = entry.state is State.FAILED and code_of(entry.error) == CANCELLED
            found.append(Cancelled(entry.message.id, entry.state, entry.token, already))
            if not finished:
                self.lose(entry, cancelled=True)
                entry.holder, entry.error = None, reason
                self.put(entry, State.FAILED, now)
        return found


class MemoryStore:
    """The queues of one name, and the calls of `wait` that wait for them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.queues: dict[str, MemoryQueue] = {}
        self.app_keys: dict[str, tuple[str, str]] = {}
        self.waiters: set[MemoryWaiter] = set()
        self.history = MemoryHistory()

    def publish(self, queue: str, drafts: Sequence[Draft], now: float) -> list[str]:
        """Store messages and wake the calls that wait for them."""
        with self.lock:
            content = self.get_or_create(queue)
            ids = [content.publish(draft, now) for draft in drafts]
        self.wake(queue)
        return ids

    def free_holds(self, ids: Sequence[str]) -> None:
        """End the holds of ids in every queue."""
        for content in self.queues.values():
            for message_id in ids:
                content.holds.pop(message_id, None)
                # Its first lease would make the hold again.
                waiting = content.entries.get(message_id)
                if waiting is not None:
                    waiting.held_until = 0.0

    def get_or_create(self, queue: str) -> MemoryQueue:
        """Return a queue. Create it if it does not exist."""
        content = self.queues.get(queue)
        if content is None:
            content = self.queues[queue] = MemoryQueue(queue, self.app_keys)
        return content

    def require(self, queue: str, now: float) -> MemoryQueue:
        """Return a queue, in which no message that is due is still delayed.

        Raises:
            QueueNotFound: The queue does not exist.
        """
        content = self.queues.get(queue)
        if content is None:
            raise QueueNotFound(queue)
        content.make_ready(State.DELAYED, now)
        return content

    def seconds_until_ready(self, queues: Sequence[str], now: float) -> float:
        """Return the seconds until one of the queues has a ready message, if nothing is published in the meantime."""
        soonest = float("inf")
        for queue in queues:
            content = self.queues.get(queue)
            if content is None or content.paused:
                continue
            content.make_ready(State.DELAYED, now)
            if content.first(State.READY) is not None:
                return 0.0
            delayed = content.first(State.DELAYED)
            if delayed is not None:
                soonest = min(soonest, delayed.at - now)
        return soonest

    def seconds_until_wake_up(self, queues: Sequence[str], watches: Sequence[CellWatch], now: float) -> float:
        """Return the seconds until a wait ends, if nothing is published or put in the meantime."""
        return min(self.seconds_until_ready(queues, now), self._seconds_until_change(watches, now))

    def _seconds_until_change(self, watches: Sequence[CellWatch], now: float) -> float:
        """Return the seconds until a watched cell has another version, if nothing is put in the meantime."""
        soonest = float("inf")
        for watch in watches:
            content = self.queues.get(watch.queue)
            version = "" if content is None else content.cells.version(watch.group, watch.name, now)
            if version != watch.version:
                return 0.0
            if content is not None and version:
                soonest = min(soonest, content.cells.expires_at(watch.group, watch.name) - now)
        return soonest

    def change_cells(self, queue: str, ops: Sequence[CellOp], now: float) -> list[CellReply]:
        """Carry out operations on cells. A put creates the queue."""
        content = self.queues.get(queue)
        if content is None:
            content = self.get_or_create(queue) if any(op.do == "put" for op in ops) else MemoryQueue(queue)
        replies = [content.cells.carry_out(op, now) for op in ops]
        changed = frozenset((op.cell.group, op.cell.name) for op in ops if op.do in {"put", "delete"})
        for waiter in tuple(self.waiters):
            if any(watch.queue == queue and (watch.group, watch.name) in changed for watch in waiter.cells):
                waiter.wake()
        return replies

    def get_leased(self, lease: Lease) -> tuple[MemoryQueue, MemoryEntry] | None:
        """Return the entry of a lease, with its queue; None if the lease is lost."""
        content = self.queues.get(lease.message.queue)
        entry = content.entries.get(lease.message.id) if content is not None else None
        if content is None or entry is None or entry.state is not State.LEASED or entry.token != lease.token:
            return None
        return content, entry

    def extend(self, lease: Lease, expires_at: float) -> bool:
        """Extend a lease; return False if it is lost."""
        found = self.get_leased(lease)
        if found is None:
            return False
        content, entry = found
        content.put(entry, State.LEASED, expires_at)
        lease.expires_at = expires_at
        return True

    def settle(self, settlement: Settlement, now: float, *, keep_done: bool) -> bool:
        """Settle a lease; return False if it is lost."""
        found = self.get_leased(settlement.lease)
        if found is None:
            return False
        content, entry = found
        content.settle(entry, settlement, now, keep_done=keep_done)
        if settlement.action in {SettleAction.RELEASE, SettleAction.FAIL_TMP}:
            self.wake(content.name)
        return True

    async def browse(self, content: MemoryQueue, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Yield the messages of a state, page by page. The lock is not held between two pages."""

        async def choose(after: Place | None, limit: int | None) -> list[MemoryEntry]:
            chosen = Chosen(MemoryEntry.place, after, limit, newest=query.newest)
            with self.lock:
                chosen.add(content.in_state(query.state))
                return chosen.rows()

        def read(entry: MemoryEntry) -> StoredMessage | None:
            with self.lock:
                there = content.entries.get(entry.message.id) is entry and entry.state is query.state
                return entry.to_stored() if there else None

        # A lease that is extended changes its place.
        identity = attrgetter("order") if query.state is State.LEASED else None
        async for page in browse_rows(query, choose, MemoryEntry.place, read, identity=identity):
            yield page

    def wake(self, queue: str) -> None:
        """Wake every call that waits for a queue."""
        for waiter in tuple(self.waiters):
            if queue in waiter.queues:
                waiter.wake()


class MemoryWaiter:
    """One call of `wait`. It may be woken from another thread."""

    __slots__ = ("_event", "_loop", "_thread", "cells", "queues")

    def __init__(self, queues: Sequence[str], cells: Sequence[CellWatch]) -> None:
        self.queues = frozenset(queues)
        self.cells = cells
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._event = asyncio.Event()

    def wake(self) -> None:
        """End the wait."""
        if threading.get_ident() == self._thread:
            self._event.set()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout: float) -> None:
        """Wait until `wake`, for up to `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            pass
