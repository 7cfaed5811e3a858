"""The backend contract: what a store of queues must do.

No member is optional. `qworker.testing` proves that a backend keeps the contract.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, Self

from qworker.cell import Cell, CellOp, CellReply, CellWatch
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.history.store import NO_HISTORY, HistoryStore
from qworker.message import (
    Cancelled,
    Draft,
    Lease,
    Query,
    QueueStats,
    ReapResult,
    Selection,
    Settlement,
    State,
    StoredMessage,
)
from qworker.url import BackendURL

__all__ = ["Backend", "RemoteLeases"]


class RemoteLeases(Protocol):
    """The leases that this process or another one took with `remote_leases=True`."""

    async def find(self, queue: str, message_id: str, token: int) -> Lease | None:
        """Find the lease of a message by its fencing token.

        Returns:
            The lease, or None if it is lost. If a store cannot check the token here, `extend` and `settle` refuse the
            lease.
        """


class Backend(abc.ABC):
    """A store of queues, opened from a URL.

    An instance belongs to one event loop. All coroutines are called there. `extend` is not a coroutine: it blocks, and
    any thread can call it. Creating an instance does not touch the store. `open` does, and every other method opens the
    store if needed.

    Cancellation: a cancelled `lease` holds no message. Any other cancelled call has either happened or not. It can be
    repeated.

    Errors: an error of the store is raised as a `BackendError` with its cause. After `BackendUnavailable` the call can
    be repeated later. If a method raises, it has changed nothing, or a repetition completes what it has changed.

    Attributes:
        deviations: The rules of the contract that this backend does not keep, each with the reason. The names are those
            of `qworker.testing.rules.RULES`. The suite proves each deviation.
        shared: Whether messages outlive the process. The worker of a store that is not shared is the process that
            publishes.
        directory: The store's directory, whether it exists or not. None: the store is not a directory. Reading does not
            create it: a store without its directory has no queues, and a call for one of them raises `StoreNotFound`
            (see `qworker.kit.directory.missing`).
        max_body: The largest body in bytes that `publish` stores and `lease` reads. None: any size. A larger message
            that is stored is not leased: it stays, and all other messages run.
        remote_leases: Finds leases that outlive the process that took them. None: `from_url` was not asked for them, or
            the store cannot keep them.
        history: The store of events. Callers use its methods directly. A backend adds its `retention` to
            `QueueStats.retention` and closes it in `aclose`.
    """

    deviations: ClassVar[Mapping[str, str]] = {}
    shared: ClassVar[bool] = True
    directory: Path | None = None
    max_body: int | None = None
    remote_leases: RemoteLeases | None = None
    history: HistoryStore = NO_HISTORY

    # -- the store -----------------------------------------------------------------------------------------------------

    @classmethod
    @abc.abstractmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """Create an instance for a parsed URL, without touching the store.

        Args:
            url: The place of the store, and its options.
            clock: The source of the time.
            remote_leases: Whether the holders of leases are outside this process, such as the clients of a server. A
                lease then ends at its expiry, or when its holder ends it. If the store can, it also keeps the lease
                when this process ends, and the attribute `remote_leases` is set. Without this option, a store that
                detects a dead process makes the messages that it held ready at once.

        Raises:
            InvalidURL: An option or a part of the URL is unknown. The error names the known ones.
            MissingExtra: The driver is not installed.
        """

    @abc.abstractmethod
    async def open(self) -> None:
        """Open the store now. Idempotent.

        If the store's directory does not exist, it is created. `publish`, `lease` and `create` create it too. Methods
        that only read do not (see `directory`).

        Raises:
            BackendUnavailable: The store does not answer.
            PermissionDenied: The store refuses this user.
            FormatTooNew: A newer release has written the store.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close the store. Leases that are still held end as if the process had died. Idempotent."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Return the URL with its password masked."""

    @property
    @abc.abstractmethod
    def durability(self) -> str:
        """The failures that a successful `publish` or `settle` survives.

        `none`: nothing. `process`: the end of this process. `disk`: a crash of the machine. `replicated`: the loss of
        one server.
        """

    # -- producing ---------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages and return their ids in the same order.

        The messages are stored durably when the call returns (see `durability`). A queue that does not exist is
        created. The messages of one publisher keep their order. A draft is not stored if a message with its id is
        stored in any state, or if a ready, delayed or leased message has its unique key. The id of that message is
        returned. The id of a draft can be any text: the message has the id `qworker.names.to_message_id` of it.

        The batch is not atomic. After an error, an arbitrary subset may be stored. If the call is repeated with the
        same ids, it stores the rest.

        Raises:
            QueueFull: The queue has reached its capacity.
            StorageFull: The disk or the memory is full. No message is visible in part.
            PublishUncertain: It is unknown whether the messages are stored.
            MessageTooLarge: A body is larger than `max_body`. No message of the batch is stored.
            InvalidName: The id of a draft is empty, or has a lone surrogate.
            NotSupported: A draft has a property that the protocol does not support (see `qworker.backend.deviations`).
        """

    # -- consuming ---------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Lease up to `limit` ready messages for `visibility` seconds, the oldest first.

        A delayed message that is due is ready. Only one of several concurrent calls gets a message. A call may return
        fewer messages than are ready if other workers use the queue. A paused queue and a queue that does not exist
        give none.

        If no message is ready, the call waits for one, up to `timeout` seconds. It may return earlier with nothing. A
        caller that repeats the call in a loop does not spin, even if this process cannot hold another lease. A
        cancelled call holds no message, also if a cancelled scope of anyio cancels it again while it cleans up.

        Args:
            queue: Name of the queue.
            limit: Number of messages, at least 1.
            visibility: Seconds that the leases last unless they are extended.
            timeout: Seconds to wait. 0: the call does not wait.

        Raises:
            UsageError: `limit` is less than 1.
        """

    @abc.abstractmethod
    async def wait(self, queues: Sequence[str], timeout: float, cells: Sequence[CellWatch] = ()) -> None:
        """Wait until one of `queues` may have a message to lease, or a cell has changed, for up to `timeout` seconds.

        The wake-up is a hint. The call may return early although nothing is ready, and it may miss a message of another
        process until the timeout. It does not miss a message that was published after the last `lease` of this instance
        that gave nothing. If this process cannot hold another lease, the call waits until one ends.

        The call returns at once if a cell has another version than its watch says. It subscribes, then looks, then
        sleeps, and looks again about once per second. So it misses no change, whenever the caller has read the cell.

        Args:
            queues: Names of the queues. They can be none if there are cells.
            timeout: Seconds to wait.
            cells: The cells, each with the version that the caller has seen.

        Raises:
            NotSupported: There are cells, and the backend deviates from the rule `cells`.
        """

    @abc.abstractmethod
    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases and return the lost ones.

        The call blocks. Any thread can call it, also while the event loop is blocked. A lease is extended only if its
        fencing token is still valid. `expires_at` of each extended lease is set. The caller must not extend a lease
        while it settles it.

        Args:
            leases: Leases of this instance, or of `remote_leases`.
            visibility: Seconds from now until the leases expire.

        Raises:
            BackendUnavailable: It is unknown which leases are lost. Repeat the call until they expire.
        """

    @abc.abstractmethod
    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases and return the refused settlements.

        `ack` finishes the message. `fail_perm` keeps it as failed, with its error. `fail_tmp` (tries + 1) and `release`
        (tries unchanged) make it ready again after their delay. A release without a delay returns it to its place
        in the order.

        Each settlement is one atomic step. It is refused if the lease is lost, which the fencing token shows. The
        settlements are durable when the call returns. If the store can detect that a settlement has happened already,
        repeating it is not an error.

        Raises:
            BackendError: Some are not stored. If its cause is a `SettledInPart`, all others are.
        """

    @abc.abstractmethod
    async def reap(self, queue: str) -> ReapResult:
        """Make messages ready whose lease is over or which are due, and name the lost leases of this instance.

        A lease is over if it has expired, or if its holder has died and the store can detect it. Its tries rise by 1.
        There is no limit of tries here: a worker fails a message that has no tries left without running it.

        The holder of a lease learns from the answer that its message was cancelled, removed, or leased to another
        worker. An extension that is under way is not a loss, and a settlement is not one either.

        Every worker calls it about once per second. It must cost little if there is nothing to do.
        """

    # -- cells ---------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def cells(self, queue: str, ops: Sequence[CellOp]) -> list[CellReply]:
        """Carry out operations on the cells of a queue, in their order, and return their replies in the same order.

        Each operation is one atomic step. The batch is not: after an error, the first operations may have happened. A
        refused operation does not stop those after it. Everything is durable when the call returns (see `durability`).

        A put is refused if its condition does not hold, or if the stored cell has a higher rank. An expired cell is
        absent: it is not returned, it has no rank, and a put "only if absent" replaces it. A queue that does not exist
        has no cells. A put creates it. Cells do not depend on the messages: a paused queue has them too, and `delete`
        deletes them.

        If an error leaves the outcome unknown, the call can be repeated. Operations with a condition that had happened
        are then refused, and the reply has the stored cell.

        Raises:
            UsageError: A name, a value, a rank or a lifetime is out of its range (`qworker.cell.check_cell_ops`).
                Nothing has changed.
            StorageFull: The disk or the memory is full.
            NotSupported: The backend deviates from the rule `cells`.
        """

    # -- queues --------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def queues(self) -> list[str]:
        """Return the names of all queues, sorted."""

    @abc.abstractmethod
    async def create(self, queue: str) -> None:
        """Create a queue. A queue that exists is not changed. Idempotent.

        A worker calls it for each of its queues when it starts. If the store can check it, the call also checks that
        messages can be leased and settled in the queue.

        Raises:
            PermissionDenied: The queue cannot be created, or its messages cannot be leased and settled.
        """

    @abc.abstractmethod
    async def delete(self, queue: str) -> None:
        """Delete a queue with all of its messages and cells. Idempotent."""

    @abc.abstractmethod
    async def stats(self, queue: str) -> QueueStats:
        """Count the messages of a queue by state.

        Raises:
            QueueNotFound: The queue does not exist.
        """

    @abc.abstractmethod
    async def pause(self, queue: str) -> None:
        """Pause a queue: no worker leases from it until it is resumed. Idempotent.

        Raises:
            QueueNotFound: The queue does not exist.
        """

    @abc.abstractmethod
    async def resume(self, queue: str) -> None:
        """Resume a paused queue. Idempotent.

        Raises:
            QueueNotFound: The queue does not exist.
        """

    # -- messages ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Yield the messages in one state, page by page.

        Without a part, messages come in the order in which they are leased (ready), become due (delayed), expire
        (leased) or finished (done, failed). A message that stays in the state is given exactly once. A message that
        enters or leaves the state during the call, or changes its place in the order, may be given or not, but never
        twice.

        With a part, all messages of that part come, in any order. A message that stays in the state while all parts are
        read is in exactly one of them, once.

        Only the messages that the query asks for are read. To list what is in the state may cost more.
        `qworker.backend.listing.list_messages` returns one list.

        Args:
            queue: Name of the queue.
            query: What to yield. `after` is a `position` in this queue and state. The message that had it may be gone.

        Yields:
            Lists of bounded size, each with at least one message. Without a part, every message has a `position`.

        Raises:
            QueueNotFound: The queue does not exist.
            UsageError: `after` is not a position, or `part` is not a part of this store.
        """

    @abc.abstractmethod
    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Divide the messages of a state into parts, which several processes read side by side with `browse`.

        The caller gets neither ids nor bodies, however many messages there are.

        Args:
            queue: Name of the queue.
            state: The state.
            count: About how many parts to return, at least 1. A store that cannot divide returns one.

        Returns:
            The parts. Each is a short plain text, valid for one reading.

        Raises:
            QueueNotFound: The queue does not exist.
        """

    @abc.abstractmethod
    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Return messages by their ids, whatever state they are in.

        An id that is not in the answer is not stored: a message that changes its state during the call is found. If a
        store has to list its messages, one call for many ids costs one listing.

        Args:
            queue: Name of the queue.
            ids: Any texts. A text that cannot be an id is not stored. With a `MessageRef`, the cost does not depend on
                how many messages are ready.

        Returns:
            The messages that are stored, in the order of `ids`, each once.

        Raises:
            QueueNotFound: The queue does not exist.
        """

    @abc.abstractmethod
    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready again and return their number.

        A requeued message has tries 0 and no error. A message that is not failed is not changed, even if its id is
        selected. For this reason a repeated call does no harm. The check that a message is unchanged and the requeue
        are one atomic step.

        Args:
            queue: Name of the queue.
            selection: The failed messages: by their ids, all of them (`state=State.FAILED`), or only those that are
                unchanged. An empty list of ids selects none.

        Raises:
            QueueNotFound: The queue does not exist.
            UsageError: The selection has a state other than failed.
            NotSupported: The backend deviates from the rule `requeue`.
        """

    @abc.abstractmethod
    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages and return their number.

        If a leased message is removed, its worker runs it to the end, and the settlement is refused. The check that a
        message is unchanged and the removal are one atomic step. A message that enters the selected state during the
        call may stay.

        Args:
            queue: Name of the queue.
            selection: The messages: by their ids in any state, all messages in one state, or only those done and failed
                messages that are unchanged. An empty list of ids selects none.

        Raises:
            QueueNotFound: The queue does not exist.
            NotSupported: The backend deviates from the rule `remove`, `remove_leased` or `remove_by_state`.
        """

    @abc.abstractmethod
    async def cancel(
        self, queue: str, selection: Selection, by: str = "", only: Mapping[str, Cell] | None = None
    ) -> list[Cancelled]:
        """Move messages to failed with the code `cancelled`, whether they are ready, delayed or leased by any worker.

        Each move is one atomic step: a message that is settled at the same moment is either settled or cancelled. The
        holder of a lease that ended in this way learns it from `reap`, and its settlement is refused. A finished
        message is not changed. The moves are durable when the call returns. A repeated call does no harm. With a state,
        each cancelled message was in that state at its step.

        Args:
            queue: Name of the queue.
            selection: The messages: by their ids, or all that are ready, delayed or leased. A message that enters the
                selected state during the call may stay.
            by: The user or program that cancels them, for the reason that is kept with the message.
            only: Cells of the queue, by message id. Such a message is cancelled only if the stored cell still has this
                version. The comparison is part of the atomic step: a message is not cancelled once a `cells` call that
                deletes or replaces its cell has returned.

        Returns:
            One entry for each message that was found, also for the finished ones. A message that is not in the list is
            not stored, or its cell has changed. With a state, messages in other states are not in it.

        Raises:
            QueueNotFound: The queue does not exist.
            UsageError: The selection is of finished messages.
            NotSupported: The backend deviates from the rule `cancel`.
        """
