"""`mq:///root`: the directory of an mq server as a backend, live beside unmodified mq programs.

Options: `peers=N` (how many others fetch: take one of the N + 1 oldest), `sync=full|off`, `daemons=0` (leave new messages, and
those that others fetched, to another mover and reaper), `delay=30` (seconds after which what another program fetched returns).
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from qworker.backend import Backend
from qworker.backend.deviations import refuse_unsupported
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import BackendUnavailable
from qworker.history.directory import directory_history
from qworker.history.store import HISTORY_OPTIONS
from qworker.kit.directory.missing import is_missing, queue_not_found
from qworker.kit.doctor_check import Check
from qworker.kit.file_system import durability_at
from qworker.kit.files import check_writable
from qworker.kit.parts import make_shares
from qworker.kit.store_errors import store_errors
from qworker.kit.wait import wait_for_ready
from qworker.message import (
    Draft,
    Lease,
    Query,
    QueueStats,
    Selection,
    SettleAction,
    Settlement,
    State,
    StoredMessage,
)
from qworker.names import check_queue
from qworker.url import BackendURL
from qworker_mq.admin import Admin
from qworker_mq.claims import Busy, Claims, MqLease, RemoteMqLeases, Stranger
from qworker_mq.ids import is_uuid
from qworker_mq.mover import Mover, Trash, set_aside
from qworker_mq.publisher import Publisher
from qworker_mq.store import Held, Store

__all__ = ["MqBackend"]

T = TypeVar("T")

_SLICE = 0.002
# Seconds between looks that need no wake-up, and while a change may be too young to show.
_RESCAN = 1.0
_UNSETTLED = 0.05


class MqBackend(Backend):
    """Queues in an mq directory; see the module."""

    deviations: ClassVar[Mapping[str, str]] = {
        "priority": "mq has no priorities",
        "unique_key": "mq has no keys",
        "given_ids": "an mq id is a UUID; only such ids can be given",
        "fields": "a message is its contents alone",
        "retry_errors": "the record of a message has one line of the error: the history keeps all of it",
        "keep_done": "mq has no place for finished messages: its reaper unlinks what was acked",
        "argv": "a message is its contents alone",
    }

    # Found by name: the ids that can be given although they deviate.
    takes_id = staticmethod(is_uuid)

    def __init__(
        self,
        url: BackendURL,
        *,
        clock: Clock = SYSTEM_CLOCK,
        peers: int = 0,
        sync: bool = True,
        daemons: bool = True,
        delay: float = 30.0,
        remote_leases: bool = False,
    ) -> None:
        self._url = url
        self.directory = self._path = url.directory
        self.history = directory_history(url, self._path, default=False, clock=clock)
        self._doing = f"use {self._path}"
        self._clock = clock
        self._peers = peers
        self._sync = sync
        self._daemons = daemons
        self._delay = delay
        self.remote_leases = RemoteMqLeases(self._claims) if remote_leases else None
        self._store: Store | None = None
        self._running: set[asyncio.Task[Any]] = set()

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """`mq:///root[?peers=N&sync=full|off&daemons=0&delay=DURATION]`."""
        url.only({"peers", "sync", "daemons", "delay", *HISTORY_OPTIONS})
        return cls(
            url,
            clock=clock,
            peers=url.integer("peers", 0),
            sync=url.choice("sync", "full", ("full", "off")) == "full",
            daemons=url.boolean("daemons", True),
            delay=url.duration("delay", 30.0),
            remote_leases=remote_leases,
        )

    async def open(self) -> None:
        """Open, and if need be make, the directories."""
        with store_errors(self._doing):
            self._opened()

    def _existing(self, queue: str) -> None:
        """Open the directories to look at a queue; no root is made for it."""
        check_queue(queue)
        if self._is_missing():
            raise queue_not_found(queue, self.directory)
        self._opened()

    def _is_missing(self) -> bool:
        return self._store is None and is_missing(self.directory)

    def _opened(self) -> Store:
        if self._store is None:
            store = self._store = Store(self._path, self._clock, peers=self._peers, sync=self._sync, plain=self._delay)
            self._mover = Mover(store, foreign_delay=self._delay, daemons=self._daemons)
            self._trash = Trash(store, daemons=self._daemons)
            self._publisher = Publisher(store, direct=self._daemons)
            self._admin = Admin(store, self._mover, self._trash)
        return self._store

    async def aclose(self) -> None:
        """Finish what runs, and close the directories."""
        await self.history.aclose()
        while self._running:
            await asyncio.wait(self._running)
        store, self._store = self._store, None
        if store is not None:
            await self._trash.aclose()
            await store.aclose()

    def describe(self) -> str:
        """The URL."""
        return self._url.at(str(self._path))

    @property
    def durability(self) -> str:
        """`disk`; `process` with `sync=off`, and on a file system without a journal or barriers."""
        return durability_at(os.fspath(self._path), sync=self._sync)

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end what must not be cut in two by a cancellation."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages."""
        refuse_unsupported("mq", self.deviations, drafts, takes_id=is_uuid)
        with store_errors(self._doing):
            self._opened()
            return await self._whole(self._publisher.publish(queue, drafts))

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Claim messages."""
        await wait_for_ready(self, queue, limit, timeout)
        with store_errors(self._doing):
            store = self._opened()
            self._mover.sweep_new()
            held = store.held(check_queue(queue))
            if held is None:
                return []
            async with held.fetching:
                if store.is_down(queue):
                    return []
                self._mover.promote(held)
                return await self._fetch(store, held, limit, visibility)

    async def _fetch(self, store: Store, held: Held, limit: int, visibility: float) -> list[Lease]:
        leases: list[Lease] = []
        busy: list[str] = []
        holder = self._holder(store)
        until = time.monotonic() + _SLICE
        try:
            while len(leases) < limit:
                message_id = await held.window.take()
                if message_id is None:
                    break
                lease = self._claim(store, held, message_id, visibility, holder, busy)
                if lease is not None:
                    leases.append(lease)
                if time.monotonic() >= until:
                    await asyncio.sleep(0)
                    until = time.monotonic() + _SLICE
        except BaseException:
            # Cancelled, or the store failed: nobody will hear of these leases.
            self._give_back(store, held, leases)
            raise
        finally:
            for message_id in busy:
                held.window.add(message_id)
        return leases

    def _claim(
        self, store: Store, held: Held, message_id: str, visibility: float, holder: str, busy: list[str]
    ) -> MqLease | None:
        try:
            lease = store.claims.claim(held.name, held.dirs, message_id, visibility, holder)
        except Busy:
            busy.append(message_id)
            return None
        except Stranger:
            set_aside(store, message_id, held.dirs.ready, held, message_id)
            return None
        if lease is not None:
            self._mover.note(lease, visibility, holder)
        return lease

    def _give_back(self, store: Store, held: Held, leases: Sequence[Lease]) -> None:
        for lease in leases:
            try:
                if store.claims.settle(Settlement(lease=lease, action=SettleAction.RELEASE), held.dirs):
                    held.window.add(lease.message.id)
            except Busy:
                # It expires.
                continue

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Wait for a wake-up from this process or the directories, or for what is due."""
        with store_errors(self._doing):
            store = self._opened()
            store.watch(queues)
            deadline = time.monotonic() + timeout
            with store.listening(queues) as event:
                while True:
                    event.clear()
                    due, look = await self._until_work(store, queues)
                    left = min(deadline - time.monotonic(), due)
                    if left <= 0 or (left <= look and not await _set_within(event, left)):
                        return
                    await _set_within(event, min(left, look))

    async def _until_work(self, store: Store, queues: Sequence[str]) -> tuple[float, float]:
        """Seconds until a queue has something to lease, as far as is known now, and until another look is worth it."""
        self._mover.sweep_new()
        soonest = math.inf
        look = _RESCAN
        for queue in queues:
            held = store.held(check_queue(queue))
            if held is None or store.is_down(queue):
                continue
            self._mover.promote(held)
            await held.window.refresh()
            if len(held.window):
                return 0.0, 0.0
            due = held.due.next_due()
            if due is not None:
                soonest = min(soonest, max(0.001, due - self._clock.time()))
            if not held.window.settled:
                look = _UNSETTLED
        return soonest, look

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases, from any thread."""
        store = self._store
        if store is None:
            raise BackendUnavailable(f"{self.describe()} is closed")
        lost: list[Lease] = []
        with store_errors(self._doing), store.using:
            holder = self._holder(store)
            for lease in leases:
                if store.closed or not store.claims.extend(lease, visibility):
                    lost.append(lease)
                elif isinstance(lease, MqLease):
                    self._mover.note(lease, visibility, holder)
        return lost

    def _holder(self, store: Store) -> str:
        """The name that this process's leases carry; none: they end by time alone."""
        return store.holder() if self.remote_leases is None else ""

    def _claims(self) -> Claims:
        return self._opened().claims

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases."""
        with store_errors(self._doing):
            return await self._whole(self._settle(self._opened(), settlements))

    async def _settle(self, store: Store, settlements: Sequence[Settlement]) -> list[Settlement]:
        refused: list[Settlement] = []
        acked: list[str] = []
        touched: set[int] = set()
        until = time.monotonic() + _SLICE
        for settlement in settlements:
            # A queue that was deleted has no lease to end.
            held = store.held(settlement.lease.message.queue)
            if held is None or not await self._end(store, held, settlement):
                refused.append(settlement)
            else:
                touched |= self._ended(store, held, settlement, acked)
            if time.monotonic() >= until:
                await asyncio.sleep(0)
                until = time.monotonic() + _SLICE
        if touched:
            await store.sync_directories(store.root.delay, *touched)
        self._trash.unlink(acked)
        return refused

    @staticmethod
    async def _end(store: Store, held: Held, settlement: Settlement) -> bool:
        deadline = time.monotonic() + 5.0
        while True:
            try:
                return store.claims.settle(settlement, held.dirs)
            except Stranger:
                return False
            except Busy:
                if time.monotonic() >= deadline:
                    raise BackendUnavailable(
                        "another process holds a message lock and does not release it: check for a stopped process"
                    ) from None
                await asyncio.sleep(0.001)

    @staticmethod
    def _ended(store: Store, held: Held, settlement: Settlement, acked: list[str]) -> set[int]:
        """Note what a settlement did; the directories to sync."""
        message = settlement.lease.message
        if settlement.action is SettleAction.ACK:
            acked.append(f"{message.queue}:{message.id}")
            return {store.root.remove}
        if settlement.action is SettleAction.FAIL_PERM:
            return {held.dirs.fail, store.root.reason}
        if settlement.delay > 0:
            return {held.dirs.due}
        held.window.add(message.id)
        store.wake(message.queue)
        return {held.dirs.ready}

    async def reap(self, queue: str) -> int:
        """Return what expired or is due, and do the daemons' work."""
        with store_errors(self._doing):
            store = self._opened()
            self._mover.sweep_new()
            self._trash.sweep()
            held = store.held(check_queue(queue))
            if held is None:
                return 0
            return self._mover.promote(held) + self._mover.expire(held)

    # -- administering -----------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """The queues."""
        with store_errors(self._doing):
            if self._is_missing():
                return []
            self._opened()
            self._mover.sweep_new()
            return await self._admin.queues()

    async def create(self, queue: str) -> None:
        """Make a queue."""
        with store_errors(self._doing):
            store = self._opened()
            store.made(queue)
            check_writable(store.root.tmp)
            await self._whole(store.sync_directories(store.root.queues))

    async def delete(self, queue: str) -> None:
        """Remove a queue."""
        with store_errors(self._doing):
            check_queue(queue)
            if not self._is_missing():
                self._opened()
                await self._whole(self._admin.delete(queue))

    async def stats(self, queue: str) -> QueueStats:
        """Count."""
        with store_errors(self._doing):
            self._existing(queue)
            found = await self._admin.stats(queue)
        return msgspec.structs.replace(found, retention=self.history.retention)

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Look at messages."""
        with store_errors(self._doing):
            self._existing(queue)
            async for page in self._admin.browse(queue, query):
                yield page

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Look at messages."""
        with store_errors(self._doing):
            self._existing(queue)
            return await self._admin.find(queue, ids)

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Shares of the ids."""
        with store_errors(self._doing):
            self._existing(queue)
            self._admin.check(queue)
        return make_shares(count)

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready."""
        selection.require_failed()
        with store_errors(self._doing):
            self._existing(queue)
            return await self._whole(self._admin.requeue(queue, selection))

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages."""
        with store_errors(self._doing):
            self._existing(queue)
            return await self._whole(self._admin.remove(queue, selection))

    async def pause(self, queue: str) -> None:
        """Pause."""
        with store_errors(self._doing):
            self._existing(queue)
            await self._admin.pause(queue)

    async def resume(self, queue: str) -> None:
        """Resume."""
        with store_errors(self._doing):
            self._existing(queue)
            await self._admin.resume(queue)

    # -- besides the contract (qworker/backend/offers.py) ----------------------------------------------------------------------

    @classmethod
    async def doctor(cls, url: BackendURL) -> list[Check]:
        """Try the directory."""
        from qworker.kit.directory.doctor import examine_directory

        return await examine_directory(url.directory)


async def _set_within(event: asyncio.Event, timeout: float) -> bool:
    """Wait for an event; False when it did not come."""
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return False
    return True
