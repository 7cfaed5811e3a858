"""The backend contract: what a store of queues must do, and nothing of how.

Every method is batch first, and there are no optional ones. `qworker.testing` proves an implementation against this page.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, Self

from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import NotSupported
from qworker.history.store import NO_HISTORY, HistoryStore
from qworker.message import Draft, Lease, QueueStats, Selection, Settlement, State, StoredMessage
from qworker.parts import pages
from qworker.url import BackendURL

__all__ = ["Backend", "RemoteLeases"]


class RemoteLeases(Protocol):
    """Leases that were taken with `remote_leases=True`, by this process or by another one."""

    async def find(self, queue: str, message_id: str, token: int) -> Lease | None:
        """Find the lease of a message by its fencing token; None when the lease is lost.

        A store that cannot check the token gives a lease that `extend` and `settle` refuse.
        """


class Backend(abc.ABC):
    """A store of queues, opened from a URL.

    An instance belongs to one event loop: its coroutines are called there, except `extend`, which blocks and is called from
    any thread. Making an instance touches nothing; `open` does, and every other method opens the store by itself.

    Cancellation: a cancelled `lease` holds no message. Any other cancelled call has either happened or not, and may be repeated.

    Errors: the store's own errors arrive as `BackendError`s with the cause attached. `BackendUnavailable` means that the
    call may be repeated later; a method that raises has changed nothing, or something that a repetition completes.
    """

    # What this protocol does otherwise than the contract, by the name of the rule that `qworker.testing` gives it, with the
    # reason. The suite asserts each deviation, and the docs print them.
    deviations: ClassVar[Mapping[str, str]] = {}

    # True: messages outlive every process (`memory:` does not; its worker must be the process that publishes).
    shared: ClassVar[bool] = True

    # The store's directory, also while it is not there; None: the store is not a directory. What only looks makes none: a store that is
    # not there has no queues, and looking into one of them raises `StoreNotFound` (`qworker.directory` makes it).
    directory: Path | None = None

    # Leases that outlive the process that took them, and how they are found again; None: not asked for, or the store has none.
    remote_leases: RemoteLeases | None = None

    # Where events are kept. Callers use its methods directly. A backend sets its own (`qworker.history` has one for a directory and
    # one for memory), adds its `retention` to `QueueStats.retention`, and closes it in `aclose`.
    history: HistoryStore = NO_HISTORY

    @classmethod
    @abc.abstractmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """Make an instance for a parsed URL, without touching the store.

        Args:
            url: where the store is, and its options.
            clock: the time.
            remote_leases: the holders of leases are not in this process: they are the clients of a server. A lease then ends by
                time or by its holder. Where the store can, it also outlives this process, and `remote_leases` is set. Otherwise
                a store that can detect a dead process returns its leases at once.

        Raises:
            InvalidURL: an option or a part that this backend does not know; says which ones it knows.
            MissingExtra: its driver is not installed.
        """

    @abc.abstractmethod
    async def open(self) -> None:
        """Reach the store now. Idempotent.

        A directory that is not there is made, as it is by what publishes and consumes; what only looks makes none (see `directory`).

        Raises:
            BackendUnavailable: it does not answer.
            PermissionDenied: it refuses this user.
            FormatTooNew: a newer release wrote it.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Let go of everything; leases that are still held expire as if the process had died. Idempotent."""

    @abc.abstractmethod
    def describe(self) -> str:
        """The URL with any password masked, for people and logs."""

    @property
    @abc.abstractmethod
    def durability(self) -> str:
        """`none`, `process`, `disk` or `replicated`: what a successful publish or settle survives."""

    # -- producing ---------------------------------------------------------------------------------------------------

    def check(self, draft: Draft) -> None:
        """Refuse what the protocol has no place for, as `publish` does; touches nothing, and the backend need not be open.

        By the deviations, unless a backend says more.

        Raises:
            NotSupported: says what.
        """
        given = {
            "priority": draft.priority != 0,
            "unique_key": draft.unique_key is not None,
            "fields": bool(draft.fields),
            "argv": bool(draft.argv),
        }
        for rule, is_given in given.items():
            if is_given and rule in self.deviations:
                raise NotSupported(
                    f"{self.describe().partition(':')[0]}: has no place for {rule}: {self.deviations[rule]}"
                )

    @abc.abstractmethod
    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages and return their ids, in order.

        Durable (see `durability`) when it returns. One publisher's messages keep their order. A draft whose id is stored
        already in any state is not stored twice; nor is one whose key is pending (ready, delayed or leased): the id of the
        stored one is returned. A queue that does not exist is created. Not atomic as a batch: after an error any prefix-less
        subset may be stored, and repeating the call with the same ids completes it.

        Raises:
            QueueFull: the queue is at its capacity.
            StorageFull: nothing partial is visible.
            PublishUncertain: the outcome is unknown.
            NotSupported: priority, key, or an id that the protocol has no place for.
        """

    # -- consuming ---------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Lease up to `limit` ready messages for `visibility` seconds, the oldest first.

        Messages that are due are ready. Of concurrent calls one gets each message. A paused queue gives no messages, and neither
        does a queue that does not exist. A call may give fewer messages than are ready when other workers use the queue.

        If nothing is ready, the call waits up to `timeout` seconds for a message. It may return earlier with nothing, but a caller
        that repeats it does not spin: that also holds when the process has no room for another lease. A cancelled call holds no
        message.

        Args:
            queue: its name.
            limit: at least 1.
            visibility: seconds; how long the leases last unless they are extended.
            timeout: seconds; 0: the call does not wait.

        Raises:
            UsageError: `limit` is less than 1.
        """

    @abc.abstractmethod
    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Return when one of `queues` may have something to lease, or after `timeout` seconds.

        A hint: it may return early for nothing, and a wake-up of another process may be missed; `timeout` bounds how long
        that matters. A message that was published before the call and after this backend's last empty `lease` is not missed.
        """

    @abc.abstractmethod
    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Renew leases to `visibility` seconds from now; return the ones that are lost.

        Blocking, and called from any thread, also while the event loop is blocked; it sets `expires_at` of each lease that it
        renewed. Conditional on the token. A lease is never extended while it is being settled: callers see to that.

        Raises:
            BackendUnavailable: nothing is known to be lost; try again until the leases expire.
        """

    @abc.abstractmethod
    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases: ack, fail_tmp (tries + 1), fail_perm (kept with its error) or release (tries unchanged).

        fail_tmp and release make the message ready again after their delay; a release without one puts it where it was.
        Each is one atomic step, conditional on the token; returns the ones that were refused because the lease was lost.
        Durable when it returns. Repeating a settlement that has happened is not an error where the store can tell.
        """

    @abc.abstractmethod
    async def reap(self, queue: str) -> int:
        """Return expired leases and those of dead holders to ready with tries + 1, and due messages to ready; count them.

        Knows no limit of tries: the worker fails, unrun, what arrives with its tries used up. Every worker calls it about once a
        second; it must cost little when there is nothing to do.
        """

    # -- administering -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def queues(self) -> list[str]:
        """The names of all queues, sorted."""

    @abc.abstractmethod
    async def create(self, queue: str) -> None:
        """Create a queue; one that exists is left as it is. Idempotent.

        A worker calls it for each of its queues when it starts. A store that can check it makes sure that messages can be leased and
        settled there.

        Raises:
            PermissionDenied: the queue cannot be created, or messages cannot be leased and settled there.
        """

    @abc.abstractmethod
    async def delete(self, queue: str) -> None:
        """Remove a queue and every message in it. Idempotent."""

    @abc.abstractmethod
    async def stats(self, queue: str) -> QueueStats:
        """Count a queue.

        Raises:
            QueueNotFound: there is none.
        """

    @abc.abstractmethod
    async def browse(self, queue: str, state: State, limit: int = 100, offset: int = 0) -> list[StoredMessage]:
        """Look at up to `limit` messages in one state, after the first `offset`.

        In the order in which they would be leased (ready), become due (delayed), expire (leased) or were finished (done, fail).

        Raises:
            QueueNotFound: there is none.
        """

    @abc.abstractmethod
    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Look at messages by their ids, in whatever state they are.

        An id that is not in the answer is not stored: a message that moves from state to state meanwhile is found all the
        same. One call for many ids costs a store that lists its messages one listing.

        Args:
            queue: where they are.
            ids: any text; what cannot be an id is not stored.

        Returns:
            The messages that are stored, in the order of `ids`, each once.

        Raises:
            QueueNotFound: there is none.
        """

    @abc.abstractmethod
    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Divide what is in a state into parts, which other processes read side by side with `browse_part`.

        Neither names nor bodies pass through the caller, however many messages there are.

        Args:
            queue: where the messages are.
            state: whose messages are divided.
            count: about so many parts are wanted, at least 1. A store that cannot divide gives one.

        Returns:
            A short plain text for each part. It is valid as long as the queue stands as it is: for one reading, not for a later one.

        Raises:
            QueueNotFound: there is no such queue.
        """

    async def browse_part(self, queue: str, state: State, part: str) -> AsyncIterator[list[StoredMessage]]:
        """Look at the messages of one part, in lists of bounded size and in any order.

        A message that stays in the state while all parts are read is in exactly one of them, once; what comes or goes
        meanwhile may be in one or in none. Reads everything at once, unless a backend can do with less memory.

        Raises:
            QueueNotFound: there is none.
        """
        async for page in pages(await self.browse(queue, state, limit=sys.maxsize)):
            yield page

    @abc.abstractmethod
    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready again, with tries 0 and without their error, and count them.

        A message that is not failed any more is left alone, so that a repeated call does no harm.

        Args:
            queue: The queue's name.
            selection: The messages: those with the given ids (of these only failed ones are requeued), every failed
                message (`state=State.FAILED`), or failed messages that must be unchanged. Each check and its requeue are
                one step.

        Returns:
            The number of messages that were requeued.

        Raises:
            QueueNotFound: There is no such queue.
            UsageError: The selection has another state than failed.
            NotSupported: The deviation `requeue`.
        """

    @abc.abstractmethod
    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages in any state and count them.

        A leased message is removed like any other: its worker runs it to its end, and cannot settle it then.

        Args:
            queue: The queue's name.
            selection: The messages: those with the given ids, in whatever state; every message in one state; or done and
                failed messages that must be unchanged. Each check and its removal are one step: no requeue comes between.
                Messages that enter the state during the call may stay.

        Returns:
            The number of messages that were removed.

        Raises:
            QueueNotFound: There is no such queue.
            NotSupported: The deviations `remove`, `remove_leased` and `remove_by_state`.
        """

    @abc.abstractmethod
    async def pause(self, queue: str) -> None:
        """Pause a queue for all consumers, until `resume`. Idempotent.

        Raises:
            QueueNotFound: there is none.
        """

    @abc.abstractmethod
    async def resume(self, queue: str) -> None:
        """Resume a queue. Idempotent.

        Raises:
            QueueNotFound: there is none.
        """
