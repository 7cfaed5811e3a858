"""`mq+http://host?standard_only=1`: a server of another implementation, with mq's six endpoints and nothing else.

It knows no tokens, no tries and no failures. Its mover's delay is the visibility timeout of every message, whatever the
caller requests. A message that failed temporarily is left to that mover. A message that failed permanently is put into
the queue `<queue>failed` before it is deleted, because nothing is deleted silently.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import ClassVar, NoReturn, Self
from urllib.parse import quote

from qworker.backend import Backend
from qworker.backend.deviations import no_cells, refuse_cancel, refuse_unsupported, refuse_watches
from qworker.cell import Cell, CellOp, CellReply, CellWatch
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import BackendUnavailable, NotSupported, PublishUncertain
from qworker.kit.wait import check_limit
from qworker.message import (
    Cancelled,
    Draft,
    Lease,
    Message,
    Query,
    QueueStats,
    ReapResult,
    Selection,
    SettleAction,
    Settlement,
    State,
    StoredMessage,
)
from qworker.names import check_queue
from qworker.url import BackendURL
from qworker_mq.client import Answer
from qworker_mq.server_client import ServerClient, keep_or_release

__all__ = ["StandardServerBackend"]

# Seconds between fetches while a queue is empty: there is no other way to wait.
_POLL = 0.5


class StandardServerBackend(Backend):
    """The queues of a standard mq server.

    Args:
        url: The server.
        clock: The source of the time.
    """

    deviations: ClassVar[Mapping[str, str]] = {
        "priority": "mq has no priorities",
        "unique_key": "mq has no keys",
        "cells": "mq has messages only",
        "hold": "mq keeps no ids of messages that are gone",
        "given_ids": "the server makes the ids",
        "fields": "a message consists of its contents only",
        "max_body": "the server decides how large a body can be",
        "max_body_stored": "the server decides which messages are leased",
        "keep_done": "mq cannot keep finished messages: its reaper unlinks acked ones",
        "argv": "a message consists of its contents only",
        "delay": "mq publishes at once",
        "cancel": "the server has no failed messages",
        "lost_leases": "mq has no tokens",
        "fifo": "a server with peers takes one of the first at random",
        "tries_carried": "mq counts no tries",
        "tries_counted": "mq counts no tries",
        "deaths": "mq counts no tries",
        "expiry": "the server's mover decides when a message returns",
        "extend": "the server's mover decides when a message returns",
        "fencing": "mq has no tokens",
        "retry_delay": "the server's mover decides when a message returns",
        "release_delay": "the server's mover decides when a message returns",
        "release_in_place": "the server's mover decides when a message returns",
        "fail_kept": "a failed message is put into the queue <queue>failed",
        "errors_kept": "mq has no failures",
        "retry_errors": "mq has no failures",
        "requeue": "mq has no failures",
        "pause": "mq cannot pause a queue",
        "remove_by_state": "mq deletes whole queues, or messages by id",
        "exact_counts": "mq counts nothing",
        "browse_delayed": "mq lists nothing",
        "browse_leased": "mq lists nothing",
    }

    def __init__(self, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._server = ServerClient(url)
        self._clock = clock

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """Create an instance for `mq+http://[:TOKEN@]host[:port]?standard_only=1`."""
        url.only({"standard_only", "history"})
        return cls(url, clock=clock)

    async def open(self) -> None:
        """Check that the server answers."""
        await self._server.get_unchecked("/")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._server.aclose()

    def describe(self) -> str:
        """Return the URL with its token masked."""
        return self._server.url

    @property
    def durability(self) -> str:
        """`disk`: mq answers after its fsync."""
        return "disk"

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages, one after the other to keep their order."""
        refuse_unsupported("mq+http", self.deviations, drafts, now=self._clock.time())
        ids: list[str] = []
        for draft in drafts:
            try:
                answer = await self._server.send("POST", f"/{check_queue(queue)}/messages", draft.body)
            except BackendUnavailable as error:
                raise PublishUncertain(f"the message may or may not be stored: {error}") from error
            ids.append(_message_id(answer))
        return ids

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Fetch messages before and after the wait, which cannot check whether there are any."""
        check_limit(limit)
        leases = await keep_or_release(self._fetch(queue, min(limit, 1000), visibility), self.settle)
        if leases or timeout <= 0:
            return leases
        await self.wait([queue], timeout)
        return await keep_or_release(self._fetch(queue, min(limit, 1000), visibility), self.settle)

    async def _fetch(self, queue: str, limit: int, visibility: float) -> list[Lease]:
        leases: list[Lease] = []
        while len(leases) < limit:
            answer = await self._server.send("GET", f"/{check_queue(queue)}/messages")
            if answer.status != 200:
                break
            message = Message(id=_message_id(answer), queue=queue, body=answer.body)
            now = self._clock.time()
            leases.append(Lease(message=message, token=int(now * 1e6), expires_at=now + visibility))
        return leases

    async def wait(self, queues: Sequence[str], timeout: float, cells: Sequence[CellWatch] = ()) -> None:
        """Wait a moment, because only a fetch shows whether there is a message."""
        refuse_watches("mq+http", self.deviations, cells)
        await asyncio.sleep(min(timeout, _POLL * random.uniform(0.5, 1.0)))

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend nothing. A lease is lost when the requested time is over."""
        now = time.time()
        return [lease for lease in leases if lease.expires_at <= now]

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """Delete finished messages, and leave the others to the server's mover."""
        for settlement in settlements:
            message = settlement.lease.message
            if settlement.action is SettleAction.FAIL_PERM:
                await self._server.send("POST", f"/{message.queue}failed/messages", message.body)
            if settlement.action in {SettleAction.ACK, SettleAction.FAIL_PERM}:
                await self._delete_message(message.queue, message.id)
        return []

    async def reap(self, queue: str) -> ReapResult:
        """Do nothing, because the server's mover returns messages."""
        return ReapResult(now=self._clock.time())

    # -- cells ---------------------------------------------------------------------------------------------------------

    async def cells(self, queue: str, ops: Sequence[CellOp]) -> list[CellReply]:
        """Refuse: mq has messages only."""
        raise no_cells("mq+http", self.deviations)

    # -- queues --------------------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """Refuse: the server does not list its queues."""
        _refuse("list queues")

    async def create(self, queue: str) -> None:
        """Create a queue."""
        await self._server.ask("PUT", f"/{check_queue(queue)}", queue=queue)

    async def delete(self, queue: str) -> None:
        """Delete a queue."""
        await self._server.ask("DELETE", f"/{check_queue(queue)}", queue=queue)

    async def stats(self, queue: str) -> QueueStats:
        """Refuse: the server counts nothing."""
        _refuse("count")

    async def pause(self, queue: str) -> None:
        """Refuse: the server cannot pause a queue."""
        _refuse("pause a queue")

    async def resume(self, queue: str) -> None:
        """Refuse: the server cannot resume a queue."""
        _refuse("resume a queue")

    # -- messages ------------------------------------------------------------------------------------------------------

    def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Refuse: the server lists nothing."""
        _refuse("list messages")

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Refuse: the server lists nothing."""
        _refuse("list messages")

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Refuse: the server shows no messages."""
        _refuse("read messages")

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Refuse: the server has no failed messages."""
        _refuse("requeue")

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages by their ids. The server does not report whether they existed."""
        if selection.ids is None:
            _refuse("remove messages otherwise than by their ids")
        for message_id in selection.ids:
            await self._delete_message(queue, message_id)
        return len(selection.ids)

    async def cancel(
        self, queue: str, selection: Selection, by: str = "", only: Mapping[str, Cell] | None = None
    ) -> list[Cancelled]:
        """Refuse: the server has no failed messages."""
        refuse_cancel("mq+http", self.deviations)

    async def _delete_message(self, queue: str, message_id: str) -> None:
        await self._server.send("DELETE", f"/{check_queue(queue)}/messages/{quote(message_id, safe='')}")


def _refuse(what: str) -> NoReturn:
    raise NotSupported(f"a standard mq server cannot {what}: use `qworker serve`")


def _message_id(answer: Answer) -> str:
    message_id = answer.headers.get("x-message-id", "")
    if not message_id:
        raise BackendUnavailable("the server sent no X-Message-Id: check that it is an mq server")
    return message_id
