"""`readStream`: a log is followed by its positions; any other queue is consumed with leases.

Following: Spark's offsets are the log's positions, so that a batch that is planned again after a crash has the same
rows. The channel moves, and lets the log be deleted, only up to what Spark has committed.

Consuming: the driver's reader leases a batch when Spark asks for the newest offset, hands the messages to the tasks,
extends the leases while the batch runs, and acks them when Spark has committed it. A crash between a batch and its
commit, on whichever side of it, leaves the messages leased: they expire, and come again in a later batch. So every
message is processed at least once, and a batch that is planned again after a crash is empty.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa
import structlog
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

from qworker.backend import Backend
from qworker.errors import NotSupported, QworkerError
from qworker.message import Lease, SettleAction, Settlement, State, StoredMessage
from qworker.offers import Follower, follower_of
from qworker.pipeline.options import ReadOptions
from qworker.pipeline.reading import batches
from qworker.pipeline.rows import messages_batch
from qworker.portal import Portal
from qworker.registry import open_backend

__all__ = ["ConsumingReader", "FollowingReader", "stream_reader"]

T = TypeVar("T")
_log = structlog.get_logger("qworker.pipeline")

_INSTEAD = "Spark calls this from a process of its own"
# Seconds for which an idle stream waits for messages.
_IDLE = 0.2
# Messages that are leased in one call.
_AT_ONCE = 1000


def stream_reader(options: ReadOptions, names: Sequence[str]) -> DataSourceStreamReader:
    """The reader for a stream's options.

    Raises:
        UsageError: it names no queue, or another table than messages.
    """
    if options.table != "messages":
        raise NotSupported("events cannot be streamed: use spark.read")
    if not options.consume and follower_of(options.scheme) is not None:
        return FollowingReader(options, names)
    return ConsumingReader(options, names)


class _Page(InputPartition):
    """Rows that the driver has read: a batch of leases, of bounded size."""

    def __init__(self, found: list[StoredMessage]) -> None:
        super().__init__(len(found))
        self.found = found


class _Stretch(InputPartition):
    """A part of a log, as its follower named it."""


# -- following -------------------------------------------------------------------------------------------------------


class FollowingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows a log; see the module.

    Args:
        options: the stream's.
        names: the columns to give, in order.
    """

    def __init__(self, options: ReadOptions, names: Sequence[str]) -> None:
        self._options = options
        self._names = tuple(names)
        self._queue = options.queue
        self._last: str | None = None
        # On the driver, once it is asked anything; never in what is pickled for the tasks.
        self._portal: Portal | None = None
        self._opened: Follower | None = None
        # With availableNow: where the log ended when the query began.
        self._target: str | None = None

    def _follower(self) -> Follower:
        found = follower_of(self._options.scheme)
        assert found is not None
        return found.follower(self._options.parsed, self._queue)

    def _ask(self, question: Callable[[Follower], Awaitable[T]]) -> T:
        async def asked() -> T:
            if self._opened is None:
                follower = self._follower()
                await follower.open()
                self._opened = follower
            return await question(self._opened)

        if self._portal is None:
            self._portal = Portal()
        return self._portal.run(asked(), instead=_INSTEAD)

    def initialOffset(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        """Where a new query begins."""
        return {self._queue: self._ask(lambda follower: follower.begin(self._options.starting_position))}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """What comes from now on is for another query."""
        self._target = self._ask(lambda follower: follower.end())

    def latestOffset(self, start: Mapping[str, str] | None = None, limit: object = None) -> dict[str, str]:  # noqa: N802
        """Where the next batch ends: `max_messages` behind the last one, or at the end of the log."""
        del limit
        begin = self._last if start is None else start[self._queue]

        async def next_end(follower: Follower) -> str:
            first = begin or await follower.begin(self._options.starting_position)
            return await follower.ahead(first, self._options.max_messages, self._target or await follower.end())

        self._last = self._ask(next_end)
        return {self._queue: self._last}

    def partitions(self, start: Mapping[str, str], end: Mapping[str, str]) -> list[InputPartition]:
        """Stretches of the log."""
        begin, stop = start[self._queue], end[self._queue]
        self._last = stop
        if begin == stop:
            return []
        parts = self._ask(lambda follower: follower.divide(begin, stop, self._options.partitions))
        return [_Stretch(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: one stretch."""
        yield from batches(lambda: self._pages(partition.value))

    async def _pages(self, part: str) -> AsyncIterator[pa.RecordBatch]:
        follower = self._follower()
        try:
            await follower.open()
            async for page in follower.read(part):
                yield messages_batch(page, self._names)
        finally:
            await follower.aclose()

    def commit(self, end: Mapping[str, str]) -> None:
        """Spark will not ask for anything before this again: the channel moves there."""
        self._ask(lambda follower: follower.commit(end[self._queue]))

    def stop(self) -> None:
        """The query ends."""
        if self._opened is not None:
            self._ask(lambda follower: follower.aclose())
            self._opened = None


# -- consuming -------------------------------------------------------------------------------------------------------


class ConsumingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Leases batches, and acks them when they are committed; see the module. Lives as long as the query, on the driver.

    Spark calls one method at a time: batches follow one another, and a batch that failed ends the query. So the call
    for the offset behind a batch says that it is finished, as `commit` does (which Spark calls only when a next batch
    begins).

    Args:
        options: the stream's.
        names: the columns to give, in order.
    """

    def __init__(self, options: ReadOptions, names: Sequence[str]) -> None:
        self._options = options
        self._names = tuple(names)
        self._queue = options.queue
        self._batch = 0
        self._leases: _Leases | None = None

    def _held(self) -> _Leases:
        if self._leases is None:
            self._leases = _Leases(self._options)
            _exit_on_termination()
        return self._leases

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Before the first batch."""
        return {"batch": 0}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Only what is stored by now is leased from now on."""
        self._held().only_what_is_stored()

    def latestOffset(self, start: Mapping[str, int] | None = None, limit: object = None) -> dict[str, int]:  # noqa: N802
        """Ack what the last batch had, and lease the next: the same offset as before where nothing is ready."""
        del limit
        if start is not None:
            self._batch = max(self._batch, start["batch"])
        held = self._held()
        held.ack(self._batch)
        if held.lease(self._batch + 1):
            self._batch += 1
        return {"batch": self._batch}

    def partitions(self, start: Mapping[str, int], end: Mapping[str, int]) -> list[InputPartition]:
        """The messages of a batch; none of one that another process had leased: they come again when their leases expire."""
        self._batch = max(self._batch, end["batch"])
        if start["batch"] == end["batch"]:
            return []
        found = self._held().messages(end["batch"])
        size = -(-len(found) // max(1, self._options.partitions))
        return [_Page(found[at : at + size]) for at in range(0, len(found), size)] if size else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: some of the messages."""
        if isinstance(partition, _Page):
            yield messages_batch(partition.found, self._names)

    def commit(self, end: Mapping[str, int]) -> None:
        """The batches up to this one are finished."""
        self._held().ack(end["batch"])

    def stop(self) -> None:
        """The query ends: what is not acked is given back, with its tries unchanged."""
        if self._leases is not None:
            self._leases.close()
            self._leases = None


def _exit_on_termination() -> None:
    """Let SIGTERM, with which Spark ends the process of a reader, end it as an exit does: `stop` is called then."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _frame: object) -> None:
    # It comes twice, and the second must not end what the first has begun.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


class _Leases:
    """The leases of the batches that are not committed, extended by a thread."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._portal = Portal()
        self._backend: Backend = open_backend(options.url)
        self._batches: dict[int, list[Lease]] = {}
        # Guards the leases against being settled and extended at once.
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="qworker-stream-keeper", daemon=True)
        self._keeper.start()
        # With availableNow: how many messages may still be leased.
        self._left: int | None = None

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._portal.run(coroutine, instead=_INSTEAD)

    def _keep(self) -> None:
        while not self._ended.wait(self._options.visibility / 3):
            with self._lock:
                leases = [lease for batch in self._batches.values() for lease in batch]
                if leases:
                    try:
                        # A lost one stays listed: its ack is refused, and somebody else has the message.
                        self._backend.extend(leases, self._options.visibility)
                    except QworkerError:
                        # Tried again in a third of the visibility; the leases outlast one missed extension.
                        continue

    def only_what_is_stored(self) -> None:
        """Lease no more messages than are ready now."""

        async def count() -> int:
            stats = await self._backend.stats(self._options.queue)
            return stats.ready

        self._left = self._run(count())

    def lease(self, batch: int) -> int:
        """Lease the messages of a batch; how many."""
        leases = self._run(self._lease())
        with self._lock:
            if leases:
                self._batches[batch] = leases
        return len(leases)

    async def _lease(self) -> list[Lease]:
        options = self._options
        await self._backend.reap(options.queue)
        leases = await self._take()
        if not leases and self._left is None:
            # Spark asks again at once: an idle stream waits here, for no longer than its end may take.
            await self._backend.wait([options.queue], _IDLE)
            leases = await self._take()
        return leases

    async def _take(self) -> list[Lease]:
        options = self._options
        leases: list[Lease] = []
        size = 0
        limit = options.max_messages if self._left is None else min(self._left, options.max_messages)
        while len(leases) < limit and size < options.max_bytes:
            more = await self._backend.lease(options.queue, min(_AT_ONCE, limit - len(leases)), options.visibility)
            if not more:
                break
            leases += more
            size += sum(len(lease.message.body) for lease in more)
        if self._left is not None:
            self._left -= len(leases)
        return leases

    def messages(self, batch: int) -> list[StoredMessage]:
        """What a batch has leased."""
        return [
            StoredMessage(message=lease.message, state=State.LEASED, expires_at=lease.expires_at)
            for lease in self._batches.get(batch, ())
        ]

    def ack(self, last: int) -> None:
        """End the batches up to `last`."""
        self._settle([batch for batch in self._batches if batch <= last], SettleAction.ACK)

    def _settle(self, ended: list[int], action: SettleAction) -> None:
        with self._lock:
            leases = [lease for batch in ended for lease in self._batches[batch]]
            if leases:
                refused = self._run(self._backend.settle([Settlement(lease=lease, action=action) for lease in leases]))
                if refused:
                    # They ran into their expiry, and are somebody else's: processed twice, and not lost.
                    _log.warning(
                        "stream_leases_lost", queue=self._options.queue, messages=len(refused), outcome=action.value
                    )
            for batch in ended:
                del self._batches[batch]

    def close(self) -> None:
        """Give everything back, and let go of the store."""
        self._ended.set()
        self._keeper.join()
        try:
            self._settle(list(self._batches), SettleAction.RELEASE)
        finally:
            self._run(self._backend.aclose())
