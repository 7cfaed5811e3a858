"""Calls of the endpoints that a qworker server has in addition to mq's, below `/-/`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec

from qworker.clock import Clock
from qworker.errors import BackendUnavailable, PublishUncertain, UsageError
from qworker.kit.parts import WHOLE, bad_part
from qworker.message import Draft, Lease, Message, Query, SettleAction, Settlement, State, StoredMessage
from qworker.names import check_key, check_queue, to_message_id
from qworker_mq.client import Answer
from qworker_mq.server_client import ANSWER_TIMEOUT, ServerClient, decode

__all__ = [
    "RemoteServerLeases",
    "browse",
    "call_for_count",
    "extend",
    "find",
    "lease",
    "native_path",
    "publish",
    "settle",
    "wait",
]

_LONGEST_WAIT = 20.0
# Seconds. An extension must fail while there is time left to cancel the handler.
_EXTEND = 5.0
# Bytes of bodies in one request. Base64 makes them a third longer.
_BATCH = 4 << 20
# Messages in one answer: by their ids, and in a state.
_FOUND = 100
_PAGE = 1000
_ACTIONS = {
    SettleAction.ACK: "ack",
    SettleAction.FAIL_TMP: "retry",
    SettleAction.FAIL_PERM: "fail",
    SettleAction.RELEASE: "release",
}


class _LeaseGrant(msgspec.Struct):
    message: Message
    token: int
    expires_at: float


class _ExtendResponse(msgspec.Struct):
    lost: list[int]
    expires_at: list[float]


class RemoteServerLeases:
    """Leases of the server, which checks the token when they are extended or settled.

    Args:
        server: The server.
        clock: The source of the time.
    """

    def __init__(self, server: ServerClient, clock: Clock) -> None:
        self._server = server
        self._clock = clock

    async def find(self, queue: str, message_id: str, token: int) -> Lease | None:
        """Find the lease, if the message is leased."""
        stored = next(iter(await find(self._server, queue, [message_id])), None)
        if stored is None or stored.state is not State.LEASED:
            return None
        return Lease(message=stored.message, token=token, expires_at=stored.expires_at or self._clock.time())


def native_path(queue: str, what: str, **query: object) -> str:
    """Return the target of a request that concerns a queue."""
    target = f"/-/{check_queue(queue)}/{what}"
    return f"{target}?{urlencode(query)}" if query else target


async def call_for_count(server: ServerClient, what: str, queue: str, value: Any = None) -> int:
    """Call an endpoint that returns a number of messages."""
    return decode(await server.ask("POST", native_path(queue, what), value, queue=queue), int)


async def publish(server: ServerClient, queue: str, drafts: Sequence[Draft]) -> list[str]:
    """Store messages, in requests of bounded size."""
    ids: list[str] = []
    target = native_path(queue, "publish")
    for draft in drafts:
        if draft.id is not None:
            # A text that cannot be an id cannot be JSON either.
            to_message_id(draft.id)
        if draft.unique_key is not None:
            check_key(draft.unique_key)
    for batch in _batches(drafts):
        try:
            answer = await server.ask("POST", target, batch, queue=queue)
        except BackendUnavailable as error:
            raise PublishUncertain(
                f"the message may or may not be stored: {error}: publish it again with the same id"
            ) from error
        ids += decode(answer, list[str])
    return ids


def _batches(drafts: Sequence[Draft]) -> Iterator[list[Draft]]:
    """Divide drafts into requests that a server accepts."""
    batch: list[Draft] = []
    size = 0
    for draft in drafts:
        if batch and size + len(draft.body) > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(draft)
        size += len(draft.body) + 200
    if batch:
        yield batch


async def lease(server: ServerClient, queue: str, limit: int, visibility: float) -> list[Lease]:
    """Lease messages, without waiting for them."""
    target = native_path(queue, "lease", limit=min(limit, 1000), visibility_timeout=visibility)
    grants = decode(await server.ask("POST", target, queue=queue), list[_LeaseGrant])
    return [Lease(message=grant.message, token=grant.token, expires_at=grant.expires_at) for grant in grants]


async def wait(server: ServerClient, queues: Sequence[str], timeout: float) -> None:
    """Let the server wait for a message."""
    deadline = time.monotonic() + timeout
    while True:
        left = max(0.0, min(deadline - time.monotonic(), _LONGEST_WAIT))
        started = time.monotonic()
        request = {"queues": [check_queue(queue) for queue in queues], "timeout": left}
        await server.ask("POST", "/-/wait", request, timeout=left + ANSWER_TIMEOUT)
        # An early answer means that there is a message. Otherwise the server's own limit ended the wait.
        if time.monotonic() - started < left * 0.95 or time.monotonic() >= deadline:
            return


def extend(server: ServerClient, leases: Sequence[Lease], visibility: float) -> list[Lease]:
    """Extend leases, from any thread."""
    if not leases:
        return []
    request = {"leases": [_lease_ref(lease) for lease in leases], "visibility_timeout": visibility}
    answer = server.ask_blocking("POST", "/-/extend", request, timeout=min(_EXTEND, visibility))
    response = decode(answer, _ExtendResponse)
    lost = set(response.lost)
    for index, lease in enumerate(leases):
        if index not in lost:
            lease.expires_at = response.expires_at[index]
    return [lease for index, lease in enumerate(leases) if index in lost]


async def settle(server: ServerClient, settlements: Sequence[Settlement]) -> list[Settlement]:
    """End leases, and return the refused settlements."""
    if not settlements:
        return []
    request = [
        {
            "lease": _lease_ref(each.lease),
            "action": _ACTIONS[each.action],
            "delay": each.delay,
            "error": each.error,
            "died": each.died,
            "survived": each.survived,
        }
        for each in settlements
    ]
    refused = decode(await server.ask("POST", "/-/settle", request), list[int])
    return [settlements[index] for index in refused]


def _lease_ref(lease: Lease) -> dict[str, object]:
    return {"queue": lease.message.queue, "id": lease.message.id, "token": lease.token}


async def browse(server: ServerClient, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
    """Yield the messages in a state. A page is a request, which continues from the end of the one before it."""
    if query.part not in {None, WHOLE}:
        raise bad_part(query.part or "")
    left, after = query.limit, query.after
    # An extended lease is read twice.
    given: set[str] = set()
    while left is None or left > 0:
        wanted: dict[str, object] = {"state": query.state.word, "limit": _PAGE if left is None else min(left, _PAGE)}
        wanted |= {"newest": 1} if query.newest else {}
        wanted |= {} if after is None else {"after": after}
        answer = await server.ask("GET", native_path(queue, "browse", **wanted), queue=queue)
        messages = _decode_messages(answer)
        page = [stored for stored in messages if stored.message.id not in given]
        given.update([stored.message.id for stored in page] if query.state is State.LEASED else [])
        left = None if left is None else left - len(page)
        if page:
            yield page
        if "x-more" not in answer.headers:
            return
        after = messages[-1].position


async def find(server: ServerClient, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
    """Find messages by their ids, a bounded number with each request."""
    unique = list(dict.fromkeys(map(str, ids)))
    messages: list[StoredMessage] = []
    # A request without ids shows whether the queue exists.
    for first in range(0, max(1, len(unique)), _FOUND):
        request = {"ids": unique[first : first + _FOUND]}
        messages += _decode_messages(await server.ask("POST", native_path(queue, "find"), request, queue=queue))
    return messages


def _decode_messages(answer: Answer) -> list[StoredMessage]:
    try:
        return [StoredMessage.from_json(each) for each in decode(answer, list[dict[str, Any]])]
    except (UsageError, ValueError, KeyError) as error:
        raise BackendUnavailable(f"the answer of the server is not valid: {error}") from error
