"""`memory:` and `memory://NAME`: queues in the memory of this process.

This is the reference implementation: the shortest code that keeps the contract. Each method is one step under one lock,
so that it happens completely or not at all. The docstrings of `qworker.backend.Backend` say what a method promises.

Backends with the same name share one store, across threads and event loops. The store lives as long as the process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import ClassVar, Self

from qworker.backend import Backend
from qworker.backend.deviations import check_draft
from qworker.backend.unique_keys import give_ids, refuse_pending
from qworker.cell import Cell, CellOp, CellReply, CellWatch, check_cell_ops
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.failure_text import cancelled_text
from qworker.history.store import NO_HISTORY
from qworker.kit.max_body import DEFAULT_MAX_BODY, MAX_BODY, check_bodies, max_body
from qworker.kit.parts import WHOLE, bad_part
from qworker.kit.retention import KEEP_ALL, KEEP_NONE, KEEP_OPTIONS, RetentionPolicy, keep_done, keep_failed
from qworker.kit.wait import wait_for_ready
from qworker.message import (
    Cancelled,
    Draft,
    Lease,
    LostLease,
    Query,
    QueueStats,
    ReapResult,
    Selection,
    Settlement,
    State,
    StoredMessage,
)
from qworker.names import check_queue, failure_id
from qworker.url import BackendURL
from qworker_memory.store import MemoryEntry, MemoryQueue, MemoryStore, MemoryWaiter

__all__ = ["MemoryBackend"]

# Seconds between two searches of a queue for finished messages that are too old or too many.
_PRUNING = 60.0

_stores: dict[str, MemoryStore] = {}


class MemoryBackend(Backend):
    """Queues in the memory of this process.

    Args:
        name: The name of the store.
        clock: The time.
        keep_done: How long acked messages are kept.
        keep_failed: How long failed messages are kept.
        history: Whether events are kept.
        max_body: The largest body in bytes. None: any size.
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
        max_body: int | None = DEFAULT_MAX_BODY,
    ) -> None:
        self._name = name
        self.max_body = max_body
        self._clock = clock
        self._kept = {State.DONE: keep_done, State.FAILED: keep_failed}
        # When each queue was last searched for finished messages to delete.
        self._pruned_at: dict[str, float] = {}
        # The lost leases of this instance that were not reported yet, by queue.
        self._losses: dict[str, list[LostLease]] = {}
        self._store = _stores.setdefault(name, MemoryStore())
        self.history = self._store.history if history else NO_HISTORY

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """Make an instance for `memory:` or `memory://NAME`, with `keep_done`, `keep_failed`, `history`, `max_body`."""
        url.only({*KEEP_OPTIONS, "history", MAX_BODY})
        return cls(
            url.authority + url.path,
            clock=clock,
            keep_done=keep_done(url),
            keep_failed=keep_failed(url),
            history=url.boolean("history", True),
            max_body=max_body(url, DEFAULT_MAX_BODY),
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
        check_bodies(drafts, self.max_body)
        identified = give_ids(drafts)
        for draft in identified:
            check_draft(draft)
        ids = self._store.publish(queue, identified, self._clock.time())
        if identified is not drafts:
            refuse_pending(identified, ids)
        return ids

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Lease ready messages."""
        await wait_for_ready(self, queue, limit, timeout)
        with self._store.lock:
            content = self._store.queues.get(queue)
            if content is None or content.paused:
                return []
            now = self._clock.time()
            losses = self._losses.setdefault(queue, [])
            return content.lease(limit, self._name or "memory", losses, now, now + visibility, self.max_body)

    async def wait(self, queues: Sequence[str], timeout: float, cells: Sequence[CellWatch] = ()) -> None:
        """Wait for a ready message or a cell. The wait also ends when a message becomes due, or a cell expires."""
        waiter = MemoryWaiter(queues, cells)
        with self._store.lock:
            self._store.waiters.add(waiter)
            seconds = self._store.seconds_until_wake_up(queues, cells, self._clock.time())
        try:
            if seconds > 0:
                await waiter.wait(min(timeout, seconds))
        finally:
            with self._store.lock:
                self._store.waiters.discard(waiter)

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases and return the lost ones."""
        with self._store.lock:
            expires_at = self._clock.time() + visibility
            return [lease for lease in leases if not self._store.extend(lease, expires_at)]

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """Settle leases and return the refused settlements."""
        with self._store.lock:
            now, keep_done = self._clock.time(), self._kept[State.DONE].keep
            return [one for one in settlements if not self._store.settle(one, now, keep_done=keep_done)]

    async def reap(self, queue: str) -> ReapResult:
        """Make expired and due messages ready; delete finished messages that are too old or too many."""
        with self._store.lock:
            content = self._store.queues.get(queue)
            now = self._clock.time()
            count = 0 if content is None else self._reap(content, now)
            lost = self._take_losses(queue)
        if count:
            self._store.wake(queue)
        return ReapResult(count, lost, now)

    def _reap(self, content: MemoryQueue, now: float) -> int:
        count = content.reap(now)
        self._prune(content, now)
        return count

    def _take_losses(self, queue: str) -> list[LostLease]:
        losses = self._losses.get(queue, [])
        lost = losses.copy()
        # The same list: leased messages refer to it.
        losses.clear()
        return lost

    def _prune(self, content: MemoryQueue, now: float) -> None:
        """Delete finished messages that are too old or too many. Each search reads all messages, so it is rare."""
        limited = {state: keep for state, keep in self._kept.items() if keep.limits}
        moment = self._clock.monotonic()
        if not limited or moment - self._pruned_at.get(content.name, float("-inf")) < _PRUNING:
            return
        self._pruned_at[content.name] = moment
        for state, keep in limited.items():
            oldest_first = sorted(content.in_state(state), key=MemoryEntry.row)
            for entry in keep.choose_old([(entry.at, entry) for entry in oldest_first], now):
                content.remove(entry)

    # -- cells ---------------------------------------------------------------------------------------------------------

    async def cells(self, queue: str, ops: Sequence[CellOp]) -> list[CellReply]:
        """Carry out operations on cells."""
        check_cell_ops(ops)
        check_queue(queue)
        with self._store.lock:
            return self._store.change_cells(queue, ops, self._clock.time())

    # -- queues ------------------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """Return the names of the queues, sorted."""
        with self._store.lock:
            return sorted(self._store.queues)

    async def create(self, queue: str) -> None:
        """Create a queue."""
        with self._store.lock:
            self._store.get_or_create(check_queue(queue))

    async def delete(self, queue: str) -> None:
        """Delete a queue with its messages."""
        with self._store.lock:
            content = self._store.queues.pop(queue, None)
            if content is not None:
                content.free_keys()
                for entry in content.in_state(State.LEASED):
                    content.lose(entry)

    async def stats(self, queue: str) -> QueueStats:
        """Count the messages of a queue."""
        kept = {state.word: keep.describe() for state, keep in self._kept.items()}
        with self._store.lock:
            return self._require(queue).stats(self._clock.time(), {**kept, **self.history.retention})

    async def pause(self, queue: str) -> None:
        """Pause a queue."""
        with self._store.lock:
            self._require(queue).paused = True

    async def resume(self, queue: str) -> None:
        """Resume a queue."""
        with self._store.lock:
            self._require(queue).paused = False
        self._store.wake(queue)

    def _require(self, queue: str) -> MemoryQueue:
        return self._store.require(queue, self._clock.time())

    # -- messages ----------------------------------------------------------------------------------------------------

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Yield the messages of a state, page after page."""
        if query.part not in {None, WHOLE}:
            raise bad_part(query.part or "")
        with self._store.lock:
            content = self._require(queue)
        async for page in self._store.browse(content, query):
            yield page

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Return one part: all readers are in this process."""
        with self._store.lock:
            self._require(queue)
        return [WHOLE]

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Return messages by their ids."""
        with self._store.lock:
            content = self._require(queue)
            return [content.entries[one].to_stored() for one in dict.fromkeys(ids) if one in content.entries]

    async def held_until(self, queue: str, message_id: str) -> float | None:
        """Return the end of the hold of an id. It is beyond the contract (qworker/backend/offers.py)."""
        now = self._clock.time()
        with self._store.lock:
            content = self._require(queue)
            entry = content.entries.get(message_id)
            end = max(content.holds.get(message_id, 0.0), 0.0 if entry is None else entry.held_until)
        return end if end > now else None

    async def make_due(self, queue: str, message_id: str) -> bool:
        """Make a delayed message due now."""
        with self._store.lock:
            content = self._require(queue)
            entry = content.entries.get(message_id)
            if entry is None or entry.state is not State.DELAYED:
                return False
            content.put(entry, State.DELAYED, self._clock.time())
        self._store.wake(queue)
        return True

    async def key_holder(self, queue: str, key: str) -> str | None:
        """Return the id of the message that has a key of the queue."""
        with self._store.lock:
            return self._require(queue).pending_keys.get(key, (queue, None))[1]

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready again."""
        selection.require_failed()
        with self._store.lock:
            requeued, refused = self._require(queue).requeue(selection)
            self._store.free_holds([failure_id(message_id) for message_id in requeued])
            count = len(requeued)
        if count:
            self._store.wake(queue)
        if refused is not None:
            raise refused
        return count

    async def remove(self, queue: str, selection: Selection) -> int:
        """Remove messages."""
        with self._store.lock:
            content = self._require(queue)
            selected = content.select(selection)
            for entry in selected:
                content.remove(entry)
            return len(selected)

    async def cancel(
        self, queue: str, selection: Selection, by: str = "", only: Mapping[str, Cell] | None = None
    ) -> list[Cancelled]:
        """Move messages to failed."""
        selection.require_unfinished()
        with self._store.lock:
            return self._require(queue).cancel(selection, cancelled_text(by), self._clock.time(), only or {})

    # -- beyond the contract (qworker/backend/offers.py) ---------------------------------------------------------------

    async def count_too_large(self, queue: str) -> int:
        """Return how many messages are delayed because they are larger than `max_body`."""
        with self._store.lock:
            return self._require(queue).count_too_large(self.max_body)
