"""`readStream`: follow a log by its positions, or consume any other queue with leases.

Following: Spark's offsets are the log's positions, so a batch that Spark repeats after a crash has the same rows. The
channel moves, and lets the log be deleted, only up to what Spark has committed.

Consuming: the driver's reader leases a batch when Spark asks for the newest offset, passes the messages to the tasks,
extends the leases while the batch runs, and acks them when Spark has committed it. After a crash between a batch and
its commit, the messages stay leased until their leases expire, and are in a later batch. So every message is processed
at least once, and a batch that Spark repeats after a crash is empty.
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

from qworker.backend import Backend
from qworker.backend.offers import Follower, follower_of
from qworker.backend.registry import open_backend
from qworker.enqueue.portal import run_blocking
from qworker.errors import BackendError, NotSupported, QworkerError
from qworker.message import OUTCOMES, Lease, SettleAction, Settlement, State, StoredMessage
from qworker.pipeline.source.options import ReadOptions
from qworker.pipeline.source.reader import batches
from qworker.pipeline.source.rows import messages_batch
from qworker.pipeline.spark.compat import SupportsTriggerAvailableNow
from qworker.pipeline.spark.one_line import one_line_errors

__all__ = ["ConsumingReader", "FollowingReader", "stream_reader"]

T = TypeVar("T")
_log = structlog.get_logger("qworker.pipeline")

_INSTEAD = "Spark calls this from a process of its own"
# Seconds for which an idle stream waits for messages.
_IDLE = 0.2
# Messages that are leased in one call.
_AT_ONCE = 1000


def stream_reader(options: ReadOptions, names: Sequence[str]) -> DataSourceStreamReader:
    """Make the reader of a stream.

    Raises:
        NotSupported: The options name the table of events.
        UsageError: They do not name one queue.
    """
    if options.table != "messages":
        raise NotSupported("events cannot be streamed: use spark.read")
    if not options.consume and follower_of(options.scheme) is not None:
        return FollowingReader(options, names)
    return ConsumingReader(options, names)


class _BatchRows(InputPartition):
    """Messages that the driver has leased, of bounded size."""

    def __init__(self, found: list[StoredMessage]) -> None:
        super().__init__(len(found))
        self.found = found


class _LogRange(InputPartition):
    """A range of a log."""


# -- following -------------------------------------------------------------------------------------------------------


@one_line_errors
class FollowingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A reader that follows a log.

    Args:
        options: The options of the stream.
        names: The columns, in order.
    """

    def __init__(self, options: ReadOptions, names: Sequence[str]) -> None:
        self._options = options
        self._names = tuple(names)
        self._queue = options.queue
        self._last: str | None = None
        # Only on the driver, after the first call. It is never pickled for the tasks.
        self._opened: Follower | None = None
        # With availableNow: the end of the log when the query started.
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

        return run_blocking(asked(), instead=_INSTEAD)

    def initialOffset(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        """Return where a new query starts."""
        return {self._queue: self._ask(lambda follower: follower.begin(self._options.starting_position))}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Leave the records that follow to another query."""
        self._target = self._ask(lambda follower: follower.end())

    def latestOffset(self, start: Mapping[str, str] | None = None, limit: object = None) -> dict[str, str]:  # noqa: N802
        """Return where the next batch ends: `max_messages` after the last one, or at the end of the log."""
        del limit
        begin = self._last if start is None else start[self._queue]

        async def next_end(follower: Follower) -> str:
            first = begin or await follower.begin(self._options.starting_position)
            first = await self._kept(follower, first)
            return await follower.ahead(first, self._options.max_messages, self._target or await follower.end())

        self._last = self._ask(next_end)
        return {self._queue: self._last}

    def partitions(self, start: Mapping[str, str], end: Mapping[str, str]) -> list[InputPartition]:
        """Divide the log between two offsets."""
        begin, stop = start[self._queue], end[self._queue]
        self._last = stop
        if begin == stop:
            return []

        async def divide(follower: Follower) -> list[str]:
            return await follower.divide(await self._kept(follower, begin), stop, self._options.partitions)

        return [_LogRange(part) for part in self._ask(divide)]

    async def _kept(self, follower: Follower, begin: str) -> str:
        """Return a position, or the first one that is kept.

        Raises:
            BackendError: Records after it are gone, and the query must fail then.
        """
        kept = await follower.kept(begin)
        if kept != begin:
            lost = f"the records of the queue {self._queue!r} from {begin} to {kept} are gone"
            if self._options.fail_on_data_loss:
                raise BackendError(
                    f'{lost}: start the query with a new checkpoint, or pass .option("failOnDataLoss", "false")'
                )
            _log.warning("stream_records_lost", queue=self._queue, begin=begin, kept=kept)
        return kept

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one range, in a task."""
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
        """Move the channel, because Spark does not ask for earlier records again."""
        self._ask(lambda follower: follower.commit(end[self._queue]))

    def stop(self) -> None:
        """Close the log at the end of the query."""
        if self._opened is not None:
            self._ask(lambda follower: follower.aclose())
            self._opened = None


# -- consuming -------------------------------------------------------------------------------------------------------


@one_line_errors
class ConsumingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A reader that leases batches, and acks them when they are committed.

    It lives on the driver, as long as the query.

    Spark calls one method at a time. Batches follow one another, and a failed batch ends the query. So the call for the
    offset after a batch also means that the batch is finished. `commit` means it too, but Spark calls it only when the
    next batch starts.

    Args:
        options: The options of the stream.
        names: The columns, in order.
    """

    def __init__(self, options: ReadOptions, names: Sequence[str]) -> None:
        self._options = options
        self._names = tuple(names)
        self._queue = options.queue
        self._batch = 0
        # The last batch that Spark has planned: only such a batch can be finished.
        self._planned = 0
        self._leases: _BatchLeases | None = None

    def _held(self) -> _BatchLeases:
        if self._leases is None:
            self._leases = _BatchLeases(self._options)
            _exit_on_termination()
        return self._leases

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Return the offset before the first batch."""
        return {"batch": 0}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Lease only messages that are ready now."""
        self._held().drop_unstored()

    def latestOffset(self, start: Mapping[str, int] | None = None, limit: object = None) -> dict[str, int]:  # noqa: N802
        """Ack the last batch, and lease the next. If nothing is ready, the offset is unchanged."""
        del limit
        if start is not None:
            # The next batch starts after this one, so Spark has finished it.
            self._planned = max(self._planned, start["batch"])
            self._batch = max(self._batch, start["batch"])
        held = self._held()
        if held.has(self._batch) and self._planned < self._batch:
            # Before Spark 4.2, a query with availableNow asks more than once.
            return {"batch": self._batch}
        held.ack(self._batch)
        if held.lease(self._batch + 1):
            self._batch += 1
        return {"batch": self._batch}

    def partitions(self, start: Mapping[str, int], end: Mapping[str, int]) -> list[InputPartition]:
        """Divide the messages of a batch. A batch that another process had leased has none."""
        self._batch = max(self._batch, end["batch"])
        self._planned = max(self._planned, end["batch"])
        if start["batch"] == end["batch"]:
            return []
        found = self._held().messages(end["batch"])
        size = -(-len(found) // max(1, self._options.partitions))
        return [_BatchRows(found[at : at + size]) for at in range(0, len(found), size)] if size else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return some of the messages, in a task."""
        if isinstance(partition, _BatchRows):
            yield messages_batch(partition.found, self._names)

    def commit(self, end: Mapping[str, int]) -> None:
        """Ack the batches up to this one."""
        self._held().ack(end["batch"])

    def stop(self) -> None:
        """Release what is not acked, with unchanged tries, at the end of the query."""
        if self._leases is not None:
            self._leases.close()
            self._leases = None


def _exit_on_termination() -> None:
    """Exit on SIGTERM, with which Spark ends the process of a reader, so that `stop` is called."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _frame: object) -> None:
    # Spark sends it twice. The second one must not interrupt the exit.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


class _BatchLeases:
    """The leases of the batches that are not committed, extended by a thread."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._backend: Backend = open_backend(options.url)
        self._batches: dict[int, list[Lease]] = {}
        # It prevents a lease from being settled and extended at the same time.
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="qworker-stream-keeper", daemon=True)
        self._keeper.start()
        # With availableNow: the number of messages that may still be leased.
        self._left: int | None = None

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return run_blocking(coroutine, instead=_INSTEAD)

    def _keep(self) -> None:
        while not self._ended.wait(self._options.visibility / 3):
            with self._lock:
                leases = [lease for batch in self._batches.values() for lease in batch]
                if leases:
                    try:
                        # A lost lease stays in the list. Its ack is refused, because another process has the message.
                        self._backend.extend(leases, self._options.visibility)
                    except QworkerError:
                        # It is tried again after a third of the visibility timeout. The leases outlast one missed
                        # extension.
                        continue

    def drop_unstored(self) -> None:
        """Lease no more messages than are ready now."""

        async def count() -> int:
            stats = await self._backend.stats(self._options.queue)
            return stats.ready

        self._left = self._run(count())

    def lease(self, batch: int) -> int:
        """Lease the messages of a batch. Return their number."""
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
            # Spark asks again at once. So an idle stream waits here, for a short time because a query must end quickly.
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

    def has(self, batch: int) -> bool:
        """Return whether the messages of a batch are leased."""
        return batch in self._batches

    def messages(self, batch: int) -> list[StoredMessage]:
        """Return the messages of a batch."""
        return [
            StoredMessage(message=lease.message, state=State.LEASED, expires_at=lease.expires_at)
            for lease in self._batches.get(batch, ())
        ]

    def ack(self, last: int) -> None:
        """Ack the batches up to `last`."""
        self._settle([batch for batch in self._batches if batch <= last], SettleAction.ACK)

    def _settle(self, ended: list[int], action: SettleAction) -> None:
        with self._lock:
            leases = [lease for batch in ended for lease in self._batches[batch]]
            if leases:
                refused = self._run(self._backend.settle([Settlement(lease=lease, action=action) for lease in leases]))
                if refused:
                    # These leases expired, and other processes have the messages: processed twice, and not lost.
                    _log.warning(
                        "stream_leases_lost",
                        queue=self._options.queue,
                        messages=len(refused),
                        outcome=OUTCOMES[action],
                    )
            for batch in ended:
                del self._batches[batch]

    def close(self) -> None:
        """Release all messages, and close the store."""
        self._ended.set()
        self._keeper.join()
        try:
            self._settle(list(self._batches), SettleAction.RELEASE)
        finally:
            self._run(self._backend.aclose())
