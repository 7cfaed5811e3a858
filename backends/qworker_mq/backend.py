"""`mq:///root`: the directory of an mq server as a backend, shared with other implementations of mq.

Options: `peers=N` (number of other processes that fetch: take one of the N + 1 oldest), `sync=full|off`, `daemons=0`
(leave new messages, and those that other programs fetched, to another mover and reaper), `delay=30` (seconds after
which a message returns that another program fetched).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from qworker.backend import Backend
from qworker.backend.deviations import no_cells, refuse_cancel, refuse_unsupported, refuse_watches
from qworker.cell import Cell, CellOp, CellReply, CellWatch
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import BackendUnavailable
from qworker.history.directory import directory_history
from qworker.kit.directory.in_use import QueuesInUse
from qworker.kit.directory.opener import Opener
from qworker.kit.directory.publish import publish_error
from qworker.kit.directory.queue_files import is_queue
from qworker.kit.doctor_check import Check
from qworker.kit.file_system import durability_at
from qworker.kit.files import check_writable
from qworker.kit.max_body import check_bodies
from qworker.kit.opening import open_directory
from qworker.kit.parts import make_shares
from qworker.kit.store_errors import store_errors
from qworker.kit.wait import wait_for_ready
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
from qworker.names import check_queue, is_queue_name
from qworker.url import BackendURL
from qworker_mq.ids import is_uuid
from qworker_mq.lease import RemoteMqLeases, extend_leases, lease_messages
from qworker_mq.opened import OpenedRoot
from qworker_mq.options import MqOptions
from qworker_mq.settle import settle_messages
from qworker_mq.wait import wait_for_work

__all__ = ["MqBackend"]

T = TypeVar("T")


class MqBackend(Backend):
    """Queues in an mq directory.

    Args:
        url: The root.
        clock: The source of the time.
        remote_leases: See `Backend.from_url`.
    """

    deviations: ClassVar[Mapping[str, str]] = {
        "priority": "mq has no priorities",
        "unique_key": "mq has no keys",
        "cells": "mq has messages only",
        "cancel": "another program that holds a message expects it in its place",
        "lost_leases": "a holder sees the end of its lease when it extends or ends it",
        "hold": "mq keeps no ids of messages that are gone",
        "given_ids": "an mq id is a UUID; only such ids can be given",
        "fields": "a message consists of its contents only",
        "retry_errors": "the record of a message has one line of the error: the history keeps all of it",
        "keep_done": "mq cannot keep finished messages: its reaper unlinks acked ones",
        "deaths": "the record of a message counts its tries only",
        "argv": "a message consists of its contents only",
    }

    # It is found by its name: the ids that can be given although given ids are a deviation.
    takes_id = staticmethod(is_uuid)

    def __init__(self, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> None:
        self._url = url
        self._options = MqOptions.from_url(url)
        self.max_body = self._options.max_body
        self._clock = clock
        self.directory = self._path = url.directory
        self.history = directory_history(url, self._path, default=False, clock=clock)
        self.remote_leases = RemoteMqLeases(lambda: self._roots.open().store) if remote_leases else None
        self._doing = f"use {self._path}"
        # An open queue has three descriptors.
        self._in_use = QueuesInUse(3)
        self._roots = Opener(self._path, lambda: self._open_root(has_remote_holders=remote_leases))
        self._running: set[asyncio.Task[Any]] = set()

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """Create an instance for `mq:///root`, with the options of `MqOptions`."""
        return cls(url, clock=clock, remote_leases=remote_leases)

    async def open(self) -> None:
        """Open the directories, and create them if they do not exist."""
        self._roots.open()

    def _open_root(self, *, has_remote_holders: bool) -> OpenedRoot:
        return OpenedRoot(self._path, self._clock, self._options, self._in_use, has_remote_holders=has_remote_holders)

    def _open_existing(self, queue: str) -> OpenedRoot:
        """Open the directories to read or change a queue. A root that does not exist is not created."""
        return self._roots.require(check_queue(queue))

    async def aclose(self) -> None:
        """Finish what runs, and close the directories."""
        await self.history.aclose()
        while self._running:
            await asyncio.wait(self._running)
        await self._roots.aclose()

    def describe(self) -> str:
        """Return the URL."""
        return self._url.at(str(self._path))

    @property
    def durability(self) -> str:
        """`disk`. `process` with `sync=off`, and on a file system without a journal or barriers."""
        return durability_at(os.fspath(self._path), sync=self._options.sync)

    @contextmanager
    def _using(self, *queues: str) -> Generator[None]:
        """Keep queues open until the end of the block, and raise each `OSError` as a `BackendError`."""
        doing = f"use the queue {queues[0]!r} in {self._path}" if len(queues) == 1 else self._doing
        with store_errors(doing), self._in_use.using(*queues):
            yield

    async def _shield(self, work: Coroutine[Any, Any, T], *queues: str) -> T:
        """Run to the end an operation that a cancellation must not interrupt. Its queues stay open so long."""
        task = asyncio.ensure_future(self._run(work, queues))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _run(self, work: Coroutine[Any, Any, T], queues: Sequence[str]) -> T:
        with self._in_use.using(*queues):
            return await work

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages."""
        refuse_unsupported("mq", self.deviations, drafts, takes_id=is_uuid)
        check_bodies(drafts, self.max_body)
        with self._using(queue):
            try:
                return await self._shield(self._roots.call(lambda root: root.publisher.publish(queue, drafts)), queue)
            except FileNotFoundError as error:
                raise publish_error(error) from error

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Lease messages."""
        await wait_for_ready(self, queue, limit, timeout)
        with self._using(queue):
            return await self._roots.call(lambda root: self._lease(root, check_queue(queue), limit, visibility))

    async def _lease(self, root: OpenedRoot, queue: str, limit: int, visibility: float) -> list[Lease]:
        root.mover.sweep()
        return await lease_messages(root.store, root.reaper, queue, limit, visibility)

    async def wait(self, queues: Sequence[str], timeout: float, cells: Sequence[CellWatch] = ()) -> None:
        """Wait for a wake-up from this process or the directories, or until a message is due."""
        refuse_watches("mq", self.deviations, cells)
        with store_errors(self._doing):
            # A wait uses its queues one after another.
            root = self._roots.open()
            await wait_for_work(root.store, root.mover, root.reaper, queues, timeout)

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases."""
        root = self._roots.store
        if root is None:
            raise BackendUnavailable(f"{self.describe()} is closed")
        with store_errors(self._doing):
            return extend_leases(root.store, root.reaper, leases, visibility)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases."""
        queues = {settlement.lease.message.queue for settlement in settlements}
        with self._using(*queues):
            root = self._roots.open()
            return await self._shield(settle_messages(root.store, root.trash, settlements), *queues)

    async def reap(self, queue: str) -> ReapResult:
        """Return expired and due messages, and do the daemons' work."""
        with self._using(queue):
            root = self._roots.open()
            count = root.reaper.reap(check_queue(queue))
            await root.store.clean_up_records(queue)
            return ReapResult(count, now=self._clock.time())

    # -- cells ---------------------------------------------------------------------------------------------------------

    async def cells(self, queue: str, ops: Sequence[CellOp]) -> list[CellReply]:
        """Refuse: mq has messages only."""
        raise no_cells("mq", self.deviations)

    # -- queues --------------------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """Return the names of the queues."""
        with store_errors(self._doing):
            root = self._roots.open_existing()
            if root is None:
                return []
            root.mover.sweep()
            return await root.admin.queues()

    async def create(self, queue: str) -> None:
        """Create a queue."""
        with self._using(queue):
            store = self._roots.open().store
            store.get_or_create(queue)
            check_writable(store.root.tmp)
            await self._shield(store.sync_directories(store.root.queues))

    async def delete(self, queue: str) -> None:
        """Delete a queue."""
        with self._using(queue):
            check_queue(queue)
            root = self._roots.open_existing()
            if root is not None:
                await self._shield(root.admin.delete(queue))

    async def stats(self, queue: str) -> QueueStats:
        """Count the messages of a queue."""
        with self._using(queue):
            stats = await self._open_existing(queue).admin.stats(queue)
        return msgspec.structs.replace(stats, retention=self.history.retention)

    async def pause(self, queue: str) -> None:
        """Pause a queue."""
        with self._using(queue):
            await self._open_existing(queue).admin.pause(queue)

    async def resume(self, queue: str) -> None:
        """Resume a queue."""
        with self._using(queue):
            await self._open_existing(queue).admin.resume(queue)

    # -- messages ------------------------------------------------------------------------------------------------------

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Yield the messages in a state."""
        with self._using(queue):
            async for page in self._open_existing(queue).browser.browse(queue, query):
                yield page

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Divide the messages by their ids."""
        with self._using(queue):
            self._open_existing(queue).store.require(queue)
        return make_shares(count)

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Find messages by their ids."""
        with self._using(queue):
            return await self._open_existing(queue).browser.find(queue, ids)

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready."""
        selection.require_failed()
        with self._using(queue):
            return await self._shield(self._open_existing(queue).admin.requeue(queue, selection), queue)

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages."""
        with self._using(queue):
            return await self._shield(self._open_existing(queue).admin.remove(queue, selection), queue)

    async def cancel(
        self, queue: str, selection: Selection, by: str = "", only: Mapping[str, Cell] | None = None
    ) -> list[Cancelled]:
        """Refuse: a message that another holds cannot be moved."""
        refuse_cancel("mq", self.deviations)

    # -- not in the contract (qworker/backend/offers.py) ---------------------------------------------------------------

    @classmethod
    async def doctor(cls, url: BackendURL) -> list[Check]:
        """Check the directory."""
        from qworker.kit.directory.body_sizes import examine_bodies
        from qworker.kit.directory.doctor import examine_directory, find_blocked

        def bases(root: int) -> list[tuple[str, str]]:
            if not is_queue(root, ".qworker", "fail"):
                return []
            fd = open_directory(".qworker/fail", root)
            try:
                return [(name, f".qworker/fail/{name}") for name in os.listdir(fd) if is_queue_name(name)]
            finally:
                os.close(fd)

        checks = await examine_directory(url.directory) + await find_blocked(url.directory, bases)
        return checks + await examine_bodies(url.directory, ("queues/*",), MqOptions.from_url(url).max_body)
