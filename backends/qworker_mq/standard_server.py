"""`mq+http://host?standard_only=1`: a server of another make, with mq's six endpoints and nothing else.

It knows no tokens, no tries and no failures, and its mover's delay is the visibility of every message, whatever is asked for. A
message that failed for a while is left to that mover; one that failed for good is put into the queue `<queue>failed` before it is
deleted, for nothing is deleted silently.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import ClassVar, NoReturn
from urllib.parse import quote

from msgspec.structs import replace

from qworker.backend.deviations import refuse_unsupported
from qworker.errors import BackendUnavailable, NotSupported, PublishUncertain
from qworker.message import (
    Draft,
    Lease,
    Message,
    Query,
    QueueStats,
    Selection,
    SettleAction,
    Settlement,
    State,
    StoredMessage,
)
from qworker.names import check_queue
from qworker_mq.client import Answer
from qworker_mq.qworker_server import MqHttpBackend

__all__ = ["PlainMqHttpBackend"]

_PATIENCE = 30.0
# Seconds between looks at a queue: there is no other way to wait.
_POLL = 0.5


class PlainMqHttpBackend(MqHttpBackend):
    """Queues of a plain mq server; see the module."""

    deviations: ClassVar[Mapping[str, str]] = {
        "priority": "mq has no priorities",
        "unique_key": "mq has no keys",
        "given_ids": "the server makes the ids",
        "fields": "a message is its contents alone",
        "keep_done": "mq has no place for finished messages: its reaper unlinks what was acked",
        "argv": "a message is its contents alone",
        "delay": "mq publishes at once",
        "fifo": "a server with peers takes one of the first at random",
        "tries_carried": "mq counts no tries",
        "tries_counted": "mq counts no tries",
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

    async def open(self) -> None:
        """See whether anything answers."""
        await self._client.request("GET", "/", timeout=_PATIENCE)

    @property
    def durability(self) -> str:
        """`disk`: mq answers after its fsync."""
        return "disk"

    async def _plain(self, method: str, target: str, body: bytes = b"") -> Answer:
        return self._checked(await self._client.request(method, target, body=body, timeout=_PATIENCE))

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages, one after the other to keep their order."""
        now = self._clock.time()
        # What was due already is published at once, as everywhere.
        drafts = [replace(draft, due_at=None) if (draft.due_at or now) < now else draft for draft in drafts]
        refuse_unsupported("mq+http", self.deviations, drafts)
        ids: list[str] = []
        for draft in drafts:
            try:
                answer = await self._plain("POST", f"/{check_queue(queue)}/messages", draft.body)
            except BackendUnavailable as error:
                raise PublishUncertain(f"the message may or may not be stored: {error}") from error
            ids.append(_message_id(answer))
        return ids

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Fetch messages before and after the wait, which cannot check whether there are any."""
        leases = await super().lease(queue, limit, visibility)
        if leases or timeout <= 0:
            return leases
        return await super().lease(queue, limit, visibility, timeout)

    async def _lease(self, queue: str, limit: int, visibility: float) -> list[Lease]:
        leases: list[Lease] = []
        while len(leases) < limit:
            answer = await self._plain("GET", f"/{check_queue(queue)}/messages")
            if answer.status != 200:
                break
            message = Message(id=_message_id(answer), queue=queue, body=answer.body)
            now = self._clock.time()
            leases.append(Lease(message=message, token=int(now * 1e6), expires_at=now + visibility))
        return leases

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Wait a moment: whether there is work is known only by fetching it."""
        await asyncio.sleep(min(timeout, _POLL * random.uniform(0.5, 1.0)))

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend nothing: a lease is lost when the time that was asked for is over."""
        now = time.time()
        return [lease for lease in leases if lease.expires_at <= now]

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """Delete what is done; leave what is not to the server's mover."""
        for settlement in settlements:
            message = settlement.lease.message
            if settlement.action is SettleAction.FAIL_PERM:
                await self._plain("POST", f"/{message.queue}failed/messages", message.body)
            if settlement.action in {SettleAction.ACK, SettleAction.FAIL_PERM}:
                await self._remove(message.queue, message.id)
        return []

    async def reap(self, queue: str) -> int:
        """Nothing: the server's mover does."""
        return 0

    async def queues(self) -> list[str]:
        """Not known."""
        self._refuse("list queues")

    async def stats(self, queue: str) -> QueueStats:
        """Not known."""
        self._refuse("count")

    def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Not known."""
        self._refuse("list messages")

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Not known."""
        self._refuse("list messages")

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Not known."""
        self._refuse("look at messages")

    async def requeue(self, queue: str, selection: Selection) -> int:
        """There are no failed messages."""
        self._refuse("requeue")

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages by their ids; the server does not say whether they were there."""
        if selection.ids is None:
            self._refuse("remove messages otherwise than by their ids")
        for message_id in selection.ids:
            await self._remove(queue, message_id)
        return len(selection.ids)

    async def _remove(self, queue: str, message_id: str) -> None:
        await self._plain("DELETE", f"/{check_queue(queue)}/messages/{quote(message_id, safe='')}")

    async def pause(self, queue: str) -> None:
        """Not possible."""
        self._refuse("pause a queue")

    async def resume(self, queue: str) -> None:
        """Not possible."""
        self._refuse("resume a queue")

    @staticmethod
    def _refuse(what: str) -> NoReturn:
        raise NotSupported(f"a standard mq server cannot {what}: use `qworker serve`")


def _message_id(answer: Answer) -> str:
    message_id = answer.headers.get("x-message-id", "")
    if not message_id:
        raise BackendUnavailable("the server sent no X-Message-Id: check that it is an mq server")
    return message_id
