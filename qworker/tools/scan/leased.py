"""Scan items from any backend: leased one by one, extended while the program runs, and settled by its exit status."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import IO, Any, TypeVar

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.backend.scan_source import ExitCodes, ProgramOutcome, QueuePaused, ScanError, ScanItem, ScanOptions
from qworker.enqueue.portal import run_blocking
from qworker.errors import BackendUnavailable
from qworker.kit.directory.missing import require_directory
from qworker.message import Lease, SettleAction, Settlement

__all__ = ["LeasedSource"]

T = TypeVar("T")

# The length of a lease, and the time between two extensions, in seconds.
_VISIBILITY, _RENEWED = 30.0, 10.0
_SETTLE = {
    ProgramOutcome.SUCCESS: SettleAction.ACK,
    ProgramOutcome.FAIL_TMP: SettleAction.FAIL_TMP,
    ProgramOutcome.FAIL_PERM: SettleAction.FAIL_PERM,
}


class LeasedSource:
    """A queue of a backend.

    Args:
        url: The URL of the backend.
        queue: The queue's name.
        options: The options of the scan.
    """

    def __init__(self, url: str, queue: str, options: ScanOptions) -> None:
        self._queue = queue
        self._max_tries = 1 if options.max_tries is None else options.max_tries
        self._ttl = options.ttl or 0
        self._exits = ExitCodes(
            success=0 if options.success is None else options.success,
            fail_tmp=111 if options.fail_tmp is None else options.fail_tmp,
            fail_perm=100 if options.fail_perm is None else options.fail_perm,
        )
        self.backend: Backend = open_backend(url)
        require_directory(self.backend.directory, queue)

    @property
    def exits(self) -> ExitCodes:
        """The exit statuses."""
        return self._exits

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the backend."""
        return run_blocking(coroutine, instead="the backend's own methods")

    def work(self, say: Callable[[str], None]) -> Iterator[ScanItem]:
        """Yield the ready messages. Each is yielded once, however soon it is ready again."""
        seen: set[str] = set()
        # These are ready again already. The scan keeps them leased until it has seen the others.
        again: list[LeasedWork] = []
        try:
            yield from self._work(seen, again, say)
        finally:
            for work in again:
                work.leave()

    def _work(self, seen: set[str], again: list[LeasedWork], say: Callable[[str], None]) -> Iterator[ScanItem]:
        while leases := self.call(self.backend.lease(self._queue, 1, _VISIBILITY)):
            (lease,) = leases
            work = LeasedWork(self, lease)
            if lease.message.id in seen:
                again.append(work)
                continue
            seen.add(lease.message.id)
            why = self.exhausted(lease, lease.message.tries)
            if why is None:
                yield work
            else:
                say(work.end(ProgramOutcome.FAIL_PERM, why) or f"{why} for item {work.name}; failed permanently")
        if not seen:
            self._check_down()

    def _check_down(self) -> None:
        if self._queue not in self.call(self.backend.queues()):
            raise ScanError(f"unknown queue: {self._queue}")
        if self.call(self.backend.stats(self._queue)).paused:
            raise QueuePaused(f"{self._queue} is paused")

    def exhausted(self, lease: Lease, tries: int) -> str | None:
        """Return why a message must not run any more, or None if it can run."""
        if 0 < self._max_tries <= tries:
            return f"Max tries exceeded: {self._max_tries} ({tries})"
        if 0 < self._ttl < time.time() - lease.message.enqueued_at:
            return f"TTL Expired: {self._ttl:.10g}"
        return None

    def close(self) -> None:
        """Close the backend."""
        self.call(self.backend.aclose())


class LeasedWork:
    """One message, as a `ScanItem`.

    Args:
        source: The source of the message.
        lease: Its lease.
    """

    def __init__(self, source: LeasedSource, lease: Lease) -> None:
        self._source = source
        self._lease = lease
        self._file: IO[bytes] | None = None
        self._renewal = source.call(_begin(source.backend, lease))

    @property
    def name(self) -> str:
        """The id of the message."""
        return self._lease.message.id

    @property
    def arguments(self) -> tuple[str, ...]:
        """The argv of the message."""
        return self._lease.message.argv

    def environment(self) -> Mapping[str, str]:
        """Return the variables with the names of fsq. Those that an id of another form does not contain are empty."""
        message = self._lease.message
        fields = message.id.split("_")
        _, entropy, pid, host = fields if len(fields) == 4 else ("", "", "", "")
        return {
            "FSQ_ITEM_ID": message.id,
            "FSQ_ITEM_ENTROPY": entropy,
            "FSQ_ITEM_PID": pid,
            "FSQ_ITEM_HOSTNAME": host,
            "FSQ_ITEM_TRIES": str(message.tries),
            "FSQ_ITEM_ENQUEUED_AT": time.strftime("%Y%m%d%H%M%S", time.localtime(message.enqueued_at)),
        }

    def contents(self) -> int:
        """Return the descriptor of a file with the body."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_settle`
        self._file.write(self._lease.message.body)
        self._file.flush()
        os.lseek(self._file.fileno(), 0, os.SEEK_SET)
        return self._file.fileno()

    def end(self, how: ProgramOutcome, reason: str) -> str | None:
        """Settle the message."""
        why = (
            self._source.exhausted(self._lease, self._lease.message.tries + 1)
            if how is ProgramOutcome.FAIL_TMP
            else None
        )
        if why is not None:
            how, reason = ProgramOutcome.FAIL_PERM, f"{why}\n{reason}"
        error = None if how is ProgramOutcome.SUCCESS else reason
        settlement = Settlement(lease=self._lease, action=_SETTLE[how], error=error)
        if self._settle(settlement):
            return f"{self.name}: its lease was lost: another process may run it"
        return None if why is None else f"{why} for item {self.name}; failed permanently"

    def leave(self) -> None:
        """Release the message."""
        self._settle(Settlement(lease=self._lease, action=SettleAction.RELEASE))

    def _settle(self, settlement: Settlement) -> list[Settlement]:
        if self._file is not None:
            self._file.close()
        return self._source.call(_end(self._source.backend, self._renewal, settlement))


async def _begin(backend: Backend, lease: Lease) -> asyncio.Task[None]:
    return asyncio.create_task(_renew(backend, lease))


async def _renew(backend: Backend, lease: Lease) -> None:
    """Extend a lease until it is lost. If the store cannot be reached, the next try may still be in time."""
    while True:
        await asyncio.sleep(_RENEWED)
        try:
            lost = backend.extend([lease], _VISIBILITY)
        except BackendUnavailable:
            continue
        if lost:
            return


async def _end(backend: Backend, extension: asyncio.Task[None], settlement: Settlement) -> list[Settlement]:
    # A lease is never extended while it is being settled.
    extension.cancel()
    await asyncio.wait([extension])
    return await backend.settle([settlement])
