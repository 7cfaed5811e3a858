"""ScanItem from any backend: leased one by one, extended while the program runs, and settled as it says."""

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
from qworker.enqueue.portal import Portal
from qworker.errors import BackendUnavailable
from qworker.kit.directory.missing import require_directory
from qworker.message import Lease, SettleAction, Settlement

__all__ = ["LeasedSource"]

T = TypeVar("T")

# Seconds that a lease lasts, and after which it is extended.
_VISIBILITY, _RENEWED = 30.0, 10.0
_SETTLE = {
    ProgramOutcome.SUCCESS: SettleAction.ACK,
    ProgramOutcome.FAIL_TMP: SettleAction.FAIL_TMP,
    ProgramOutcome.FAIL_PERM: SettleAction.FAIL_PERM,
}


class LeasedSource:
    """A queue of a backend.

    Args:
        url: of the backend.
        queue: its name.
        options: of the scan.
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
        self._portal = Portal()
        self.backend: Backend = open_backend(url)
        require_directory(self.backend.directory, queue)

    @property
    def exits(self) -> ExitCodes:
        """The exit statuses."""
        return self._exits

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the backend."""
        return self._portal.run(coroutine, instead="the backend's own methods")

    def work(self, say: Callable[[str], None]) -> Iterator[ScanItem]:
        """What is ready; each message once, however soon it is ready again."""
        seen: set[str] = set()
        # Ready again already: kept from this scan until it has seen the others.
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
        """Why a message may not be worked on any more; None when it may."""
        if 0 < self._max_tries <= tries:
            return f"Max tries exceeded: {self._max_tries} ({tries})"
        if 0 < self._ttl < time.time() - lease.message.enqueued_at:
            return f"TTL Expired: {self._ttl:.10g}"
        return None

    def close(self) -> None:
        """Let go of the backend."""
        self.call(self.backend.aclose())


class LeasedWork:
    """One message; see `ScanItem`.

    Args:
        source: where it is from.
        lease: on it.
    """

    def __init__(self, source: LeasedSource, lease: Lease) -> None:
        self._source = source
        self._lease = lease
        self._file: IO[bytes] | None = None
        self._renewal = source.call(_begin(source.backend, lease))

    @property
    def name(self) -> str:
        """Its id."""
        return self._lease.message.id

    @property
    def arguments(self) -> tuple[str, ...]:
        """Its arguments."""
        return self._lease.message.argv

    def environment(self) -> Mapping[str, str]:
        """As fsq names them; what an id of another form does not tell is empty."""
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
        """A file that has the body."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_settle`
        self._file.write(self._lease.message.body)
        self._file.flush()
        os.lseek(self._file.fileno(), 0, os.SEEK_SET)
        return self._file.fileno()

    def end(self, how: ProgramOutcome, reason: str) -> str | None:
        """Settle it."""
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
        """Release it."""
        self._settle(Settlement(lease=self._lease, action=SettleAction.RELEASE))

    def _settle(self, settlement: Settlement) -> list[Settlement]:
        if self._file is not None:
            self._file.close()
        return self._source.call(_end(self._source.backend, self._renewal, settlement))


async def _begin(backend: Backend, lease: Lease) -> asyncio.Task[None]:
    return asyncio.create_task(_renew(backend, lease))


async def _renew(backend: Backend, lease: Lease) -> None:
    """Extend until the lease is lost. While the store cannot be reached, the next try may still come in time."""
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
